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
from torchwright.train.run.objectives.whole_matrices import WholeMatrices, whole_matrices

PEAK = "peak_lr"


class Optimizers:
    """One or two `torch.optim` optimizers over a model's parameters.

    AdamW (Loshchilov and Hutter, 2019), Adafactor (Shazeer and Stern, 2018), or Muon (Jordan et al., 2024). AdamW by
    torchao has moments in 8 bits (Dettmers et al., 2022) or 4 bits (Li et al., 2023). Muon is for the matrices of
    the layers, each expert's among them; AdamW takes routers, the taps of convolutions and the rest. Adafactor and Muon
    take whole matrices, of parameters that are shared out too (`whole_matrices.py`).
    """

    def __init__(self, model: nn.Module, chosen: config.OptimizerSection, *, compiled: bool) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(parameters.values())
        self._few_bits = chosen.name in config.FEW_BITS
        self._eager = self._few_bits and not compiled
        self._matrices = _matrices(parameters, chosen.name)
        self._names: dict[torch.Tensor, str] = {p: name for name, p in parameters.items()}
        for wholes in self._matrices:
            name, one = self._names[wholes.parameter], wholes.parameter.dim() < 3
            for expert, matrix in enumerate(wholes.matrices):
                self._names[matrix] = name if one else f"{name}.{expert}"
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
        for wholes in self._matrices:
            wholes.begin()
        # torchao compiles its step; without a compiler, or where the run does not compile, it runs as it is written.
        stance = torch.compiler.set_stance("force_eager") if self._eager else contextlib.nullcontext()
        with stance:
            for optimizer in self.optimizers:
                optimizer.step()
        for wholes in self._matrices:
            wholes.end()
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
    wholes: list[WholeMatrices],
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
    # Of parameters that are shared out, a process has those that it owns: perhaps none.
    matrices = [matrix for of_one in wholes for matrix in of_one.matrices]
    if chosen.name == "adafactor":
        decaying = {parameter for name, parameter in parameters.items() if _decays(name, parameter)}
        decayed, others = (
            [
                matrix
                for of_one in wholes
                if (of_one.parameter in decaying) is it
                for matrix in of_one.matrices
            ]
            for it in (True, False)
        )
        groups = [{"params": decayed, "weight_decay": chosen.weight_decay}, {"params": others}]
        if matrices:
            yield torch.optim.Adafactor([group for group in groups if group["params"]], lr=chosen.lr)
        return
    if matrices:
        yield torch.optim.Muon(
            matrices,
            lr=chosen.lr,
            weight_decay=chosen.weight_decay,
            momentum=config.MOMENTUM if chosen.momentum is None else chosen.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    moved = {of_one.parameter for of_one in wholes}
    rest = {name: p for name, p in parameters.items() if p not in moved}
    layers = {name: p for name, p in rest.items() if name.startswith("layers.")}
    ends = {name: p for name, p in rest.items() if name not in layers}
    groups = [*_groups(layers, chosen.weight_decay), *_groups(ends, 0.0)]
    yield torch.optim.AdamW(groups, lr=chosen.adam_lr or chosen.lr, fused=True, **common)


def _matrices(parameters: dict[str, nn.Parameter], optimizer: str) -> list[WholeMatrices]:
    """Return what Adafactor and Muon take: all parameters, or each matrix of layers but routers and convolutions."""
    if optimizer == "adafactor":
        return whole_matrices(parameters.values())
    if optimizer != "muon":
        return []
    return whole_matrices(
        parameter
        for name, parameter in parameters.items()
        if _decays(name, parameter)
        and name.startswith("layers.")
        and not name.endswith(("router.weight", "conv.weight"))
    )


def _decays(name: str, parameter: torch.Tensor) -> bool:
    """Check whether a parameter is a matrix, or one for each expert: the biases of all experts are vectors."""
    return parameter.dim() >= 2 and not name.endswith("bias")


def _groups(parameters: dict[str, nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; parameters of different meshes go apart, since one operator takes one mesh."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        amount = decay if _decays(name, parameter) else 0.0
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
