"""A CUDA device that is not there: tensors that say they lie on one, and compute on the CPU.

    with simulated_card(): ...

An operator that mixes them with tensors of the CPU fails as it does on a real card, and so does reading one without
fetching it. What compiles, and kernels of our own, are not simulated: those have reference code in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchwright.devices.base import Ceilings
from torchwright.devices.cuda import CUDA
from torchwright.facts import DeviceFacts
from torchwright.kernels import ops, reference
from torchwright.kernels.gpu import operators
from torchwright.kernels.linear import PackedLinear

CARD = torch.device("cuda", 0)
FACTS = DeviceFacts(
    kind="cuda",
    name="a simulated card",
    isa=("sm_90",),
    cores=132,
    memory_bytes=80 << 30,
)
aten = torch.ops.aten
ACROSS = (aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put_.default)
"""Operators that take tensors of both."""
FETCH = (torch.Tensor.cpu, torch.Tensor.to)


class OnCard(torch.Tensor):
    """A tensor of the CPU, `inner`, that says it lies on the card."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnCard:
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        sizes = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        found = make(
            cls, inner.size(), **sizes, dtype=inner.dtype, device="cpu"
        )  # CUDA's would ask for a driver
        found.inner = inner
        return found

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return CARD

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: OnCard) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        torch.Tensor.data.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]
        self.inner = value.inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnCard({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def simulated_card() -> Iterator[None]:
    """Inside, CUDA can be used; gradients cannot be taken."""
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    on, forward = ops.on, PackedLinear.forward
    with pytest.MonkeyPatch.context() as patch, _Numbered(), _Dispatched(), torch.no_grad():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        # In which operators that are made of others come whole.
        patch.setattr(torch.inference_mode, "__enter__", lambda self: None)
        patch.setattr(torch.inference_mode, "__exit__", lambda self, *error: None)
        patch.setattr(CUDA, "unavailable", classmethod(lambda cls: None))
        patch.setattr(CUDA, "identify", lambda self: FACTS)
        patch.setattr(CUDA, "ceilings", lambda self, **options: Ceilings(read_gb_per_s=3000.0, tflops={}))
        patch.setattr(CUDA, "synchronize", lambda self: None)
        patch.setattr(CUDA, "reset_peak_memory", lambda self: True)
        patch.setattr(CUDA, "peak_memory_bytes", lambda self: 1 << 30)
        patch.setattr(operators, "load", lambda: None)
        patch.setattr(
            ops, "on", lambda device, *rest: reference if device.type == "cuda" else on(device, *rest)
        )
        patch.setattr(
            PackedLinear, "forward", lambda self, x: self.reference(x) if x.is_cuda else forward(self, x)
        )
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrite)


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Numbered(TorchFunctionMode):
    """Says which card: PyTorch would ask a driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def number(leaf: Any) -> Any:
            return CARD if leaf == "cuda" or leaf == torch.device("cuda") else leaf

        args, kwargs = pytree.tree_map_only((str, torch.device), number, (args, kwargs or {}))
        if func is torch.tensor and kwargs.get("device") == CARD:  # which copies past every operator
            return func(*args, **kwargs | {"device": "cpu"}).to(CARD)
        if func is torch.Tensor.__deepcopy__ and isinstance(
            args[0], OnCard
        ):  # which copies the storage, that has none
            return args[0].clone()
        if func in FETCH and isinstance(args[0], OnCard):
            places = [
                place for place in (*args[1:], *kwargs.values()) if isinstance(place, str | torch.device)
            ]
            if func is torch.Tensor.cpu or any(torch.device(place).type == "cpu" for place in places):
                return func(args[0].inner.clone(), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnCard)]
    here = [tensor for tensor in tensors if not isinstance(tensor, OnCard) and tensor.dim()]
    if there and here and func not in ACROSS:
        raise RuntimeError(f"{func} expects all tensors to be on the same device, but found cuda:0 and cpu")
    stays = isinstance(args[0], OnCard) if func is aten.copy_.default else bool(there)
    device = kwargs.get("device")
    if device is not None:
        stays = stays or torch.device(device).type == "cuda"
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = pytree.tree_map_only(OnCard, lambda leaf: leaf.inner, (args, kwargs))
    out = func(*args, **kwargs)
    if not stays:
        return out
    known = {
        id(tensor.inner): tensor for tensor in there
    }  # an operator that writes in place returns what it was given
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: known[id(leaf)] if id(leaf) in known else OnCard(leaf), out
    )
