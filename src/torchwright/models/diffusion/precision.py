"""Modules of a half-precision denoiser that stay in float32: time embeddings, norms and modulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

HOMES = ("diffusers.models.embeddings", "diffusers.models.normalization")
"""Modules of diffusers with embedders and norms, modulating ones included."""
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def delicate(denoiser: nn.Module, prefix: str) -> tuple[str, ...]:
    """Names of the outermost embedders and norms with weights, `prefix` before each."""
    found: list[str] = []
    for name, module in denoiser.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        wanted = isinstance(module, NORMS) or type(module).__module__ in HOMES
        if name and wanted and not inside and any(True for _ in module.parameters()):
            found.append(name)
    return tuple(f"{prefix}.{name}" for name in found)


def bound(model: nn.Module, dtype: torch.dtype, keep: Callable[[str, nn.Module], bool]) -> None:
    """Have what `keep` names compute in float32 inside a model of `dtype`, in place.

    Each such layer widens its inputs; the outermost modules return `dtype`. A whole component, whose calls'
    inputs are cast to its own type already, is left as it is.
    """
    kept = {name for name, module in model.named_modules() if "." in name and keep(name, module)}
    for name, module in model.named_modules():
        whole = name.partition(".")[0]
        if name not in kept or keep(whole, model.get_submodule(whole)):
            continue
        outermost = name.rpartition(".")[0] not in kept
        if outermost or module._parameters:
            _rewrap(module, torch.float32 if module._parameters else None, dtype if outermost else None)


def _rewrap(module: nn.Module, given: torch.dtype | None, returned: torch.dtype | None) -> None:
    """Cast what a module is given and returns; it keeps its name, attributes and class."""
    cls: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if given is not None:
            args, kwargs = _cast((args, kwargs), given)
        output = cls.forward(self, *args, **kwargs)
        return output if returned is None else _cast(output, returned)

    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
