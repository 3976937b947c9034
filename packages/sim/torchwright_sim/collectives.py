"""Collectives of torch.distributed on simulated devices, over the process group's backend for the CPU (gloo).

    torch.distributed.init_process_group("gloo")       tensors of the CPU and of sim

Each collective is PyTorch's own operator (`c10d::allreduce_`): it runs on copies in the host's memory, which come back
when it is done. The call returns when it is done, whatever `async_op` says.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from torchwright_sim import NAME


def register() -> list[torch.library.Library]:
    """Register the collectives; nothing where this PyTorch was built without them."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # PyTorch has kernels for backends that bring collectives of their own, and says that these are replaced.
        warnings.simplefilter("ignore")
        for name in names:
            base, _, overload = name.removeprefix("c10d::").partition(".")
            op = getattr(getattr(torch.ops.c10d, base), overload or "default")
            if any("Tensor" in str(argument.type) for argument in op._schema.arguments):
                library.impl(name.removeprefix("c10d::"), functools.partial(run, op), "PrivateUse1")
    return [library]


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective on the host; the tensors that it was given then hold what the host's copies hold."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == NAME:
            host = value.detach().cpu()
            pairs.append((value, host))
            return host
        if isinstance(value, list | tuple):
            return [on_host(each) for each in value]
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    host_args = [on_host(each) for each in args]
    host_kwargs = {name: on_host(each) for name, each in kwargs.items()}
    out = op(*host_args, **host_kwargs)
    for each in out if isinstance(out, tuple) else (out,):
        if isinstance(each, torch.ScriptObject):
            _distributed().Work.unbox(each).wait()
    for device, host in pairs:
        device.detach().copy_(host)
    return _on_device(
        out, {host.data_ptr(): device for device, host in pairs}, [device for device, _ in pairs]
    )


def _on_device(out: Any, there: dict[int, torch.Tensor], everything: list[torch.Tensor]) -> Any:
    """Return a result with the device's tensors for the host's, by their memory, and a piece of work that is done."""
    if isinstance(out, torch.ScriptObject):
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(everything)
        return _distributed()._create_work_from_future(done).boxed()
    if isinstance(out, torch.Tensor):
        return there.get(out.data_ptr(), out)
    if isinstance(out, list | tuple):
        return type(out)(_on_device(each, there, everything) for each in out)
    return out


def _distributed() -> Any:
    core: Any = torch._C
    return core._distributed_c10d
