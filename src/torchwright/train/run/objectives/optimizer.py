"""The run's optimizers as one: who moves which parameter, the rate of a step, and the state by name for checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchwright.core.quiet import quiet_import
from torchwright.train.run.config import run as config
from torchwright.train.run.config.data_section import RunError

PEAK = "peak_lr"


class Optimizers:
    """One or two `torch.optim` optimizers over a model's parameters.

    AdamW (Loshchilov and Hutter, 2019), Adafactor (Shazeer and Stern, 2018), or Muon (Jordan et al., 2024). AdamW by
    torchao has moments in 8 bits (Dettmers et al., 2022) or 4 bits (Li et al., 2023). Muon is for the matrices of
    the layers, each expert's among them; AdamW takes routers and the rest.
    """

    def __init__(self, model: nn.Module, chosen: config.OptimizerSection, *, compiled: bool) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(parameters.values())
        self._few_bits = chosen.name in config.FEW_BITS
        self._eager = self._few_bits and not compiled
        self._matrices = _matrices(parameters, chosen.name)
        self._names: dict[torch.Tensor, str] = {p: name for name, p in parameters.items()}
        for parameter, matrices in self._matrices.items():
            name = self._names[parameter]
            one = parameter.dim() < 3
            self._names |= {m: name if one else f"{name}.{expert}" for expert, m in enumerate(matrices)}
        self.optimizers = list(_build(parameters, self._matrices, chosen))
        for group in self._groups():
            group[PEAK] = float(group["lr"])

    def step(self, rate: float) -> None:
        """Move every parameter by its gradient at `rate` times the peak learning rate, and let the gradients go."""
        for group in self._groups():
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * group[PEAK])
            else:
                group["lr"] = rate * group[PEAK]
        for parameter, matrices in self._matrices.items():
            assert parameter.grad is not None
            for matrix, gradient in zip(matrices, _parts(parameter.grad), strict=True):
                matrix.grad = gradient
        # torchao compiles its step; without a compiler, or where the run does not compile, it runs as it is written.
        stance = torch.compiler.set_stance("force_eager") if self._eager else contextlib.nullcontext()
        with stance:
            for optimizer in self.optimizers:
                optimizer.step()
        for parameter in self._names:
            parameter.grad = None

    def prepare(self) -> None:
        """Make the state exist before the first step, for a checkpoint to fill; no parameter changes."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.step(0.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state itself, not copies, as plain (or sharded) tensors under the parameters' names."""
        found: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    name = f"{self._names[parameter]}.{key}"
                    found |= _flattened(name, value) if self._few_bits else {name: value}
        return found

    def _groups(self) -> Iterable[dict[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)


def _build(
    parameters: dict[str, nn.Parameter],
    matrices: dict[nn.Parameter, list[torch.Tensor]],
    chosen: config.OptimizerSection,
) -> Iterable[torch.optim.Optimizer]:
    # A parameter that several modules share is in `parameters` once.
    common: dict[str, Any] = {"betas": chosen.betas, "eps": chosen.eps}
    if chosen.name == "adamw":
        yield torch.optim.AdamW(_groups(parameters, chosen.weight_decay), lr=chosen.lr, fused=True, **common)
        return
    if chosen.name in config.FEW_BITS:
        with quiet_import():
            from torchao.optim import AdamW4bit, AdamW8bit

        kind = AdamW4bit if chosen.name == "adamw4bit" else AdamW8bit
        yield kind(_groups(parameters, chosen.weight_decay), lr=chosen.lr, **common)
        return
    if chosen.name == "adafactor":
        whole = [matrix for of_one in matrices.values() for matrix in of_one]
        decayed, others = ([p for p in whole if (p.dim() >= 2) is decays] for decays in (True, False))
        groups = [{"params": decayed, "weight_decay": chosen.weight_decay}, {"params": others}]
        yield torch.optim.Adafactor([group for group in groups if group["params"]], lr=chosen.lr)
        return
    yield torch.optim.Muon(
        [matrix for of_one in matrices.values() for matrix in of_one],
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        momentum=config.MOMENTUM if chosen.momentum is None else chosen.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = {name: p for name, p in parameters.items() if p not in matrices}
    layers = {name: p for name, p in rest.items() if name.startswith("layers.")}
    ends = {name: p for name, p in rest.items() if name not in layers}
    groups = [*_groups(layers, chosen.weight_decay), *_groups(ends, 0.0)]
    yield torch.optim.AdamW(groups, lr=chosen.adam_lr or chosen.lr, fused=True, **common)


def _matrices(parameters: dict[str, nn.Parameter], optimizer: str) -> dict[nn.Parameter, list[torch.Tensor]]:
    """Return the tensors that Adafactor and Muon take: whole ones that share the parameters' memory, one per expert.

    Adafactor takes all of them, Muon each matrix of the layers but the routers', others none. Raises `RunError` where a
    process does not hold them whole.
    """
    found: dict[nn.Parameter, list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        inside = parameter.dim() >= 2 and name.startswith("layers.") and not name.endswith("router.weight")
        if optimizer != "adafactor" and not (optimizer == "muon" and inside):
            continue
        if isinstance(parameter, DTensor) and parameter.to_local().shape != parameter.shape:
            raise RunError(
                f"optimizer '{optimizer}' needs whole matrices, and the layout shards them",
                found=f"{name} of {tuple(parameter.shape)}, of which a process holds "
                f"{tuple(parameter.to_local().shape)}",
                next="use dp_replicate alone of all axes, or optimizer 'adamw'",
            )
        found[parameter] = _parts(parameter.detach())
    return found


def _parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    """A parameter in this process: itself, or a matrix for each expert."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return [local] if local.dim() < 3 else list(local.unbind())


def _groups(parameters: dict[str, nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; parameters of different meshes go apart, since one operator takes one mesh."""
    groups: dict[Any, dict[str, Any]] = {}
    for parameter in parameters.values():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        amount = decay if parameter.dim() >= 2 else 0.0
        group = groups.setdefault((mesh, amount), {"params": [], "weight_decay": amount})
        group["params"].append(parameter)
    return list(groups.values())


def _flattened(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """One tensor of torchao's state under its name; one of few bits as its codes and scales."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    local = value.to_local() if isinstance(value, DTensor) else value
    if not isinstance(local, OptimState8bit | OptimState4bit):
        return {name: value}
    # Blocks of codes do not follow the rows of a matrix, so that they cannot be cut anew: each process keeps its own.
    own = f".of-{dist.get_rank()}" if isinstance(value, DTensor) else ""
    return {f"{name}.codes{own}": local.codes, f"{name}.scale{own}": local.scale}
