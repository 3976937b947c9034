"""Shared code of techniques that replace a model's layers by 8-bit ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import deviation, overridden
from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Phase, Settings, Target
from torchwright.optimization.techniques.shared.for_parts import ForParts
from torchwright.optimization.techniques.shared.int8 import Int8Layer, register_patterns
from torchwright.optimization.techniques.shared.int8_graph import share_integers
from torchwright.optimization.techniques.shared.multihead import separate_heads
from torchwright.optimization.techniques.shared.wrapping import (
    known_names,
    layer_input,
    named,
    outputs,
    replace_module,
    stand_in_error,
)
from torchwright.workloads.base import Case

EPSILON = 2.0**-5
"""`Technique.epsilon` of 8-bit integers: a row reaches to about four times its root mean square, in 127 steps."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNCALLED = "it is not called on the example inputs"
Replacement = Callable[[Any], nn.Module | str]
"""From a layer to what takes its place, or to the reason why it stays."""


@dataclass(frozen=True, kw_only=True)
class Int8Layers(ForParts):
    """Layers of some kinds on 8-bit weights and activations; those of `skip` stay as they are."""

    phase: ClassVar[Phase] = Phase.WEIGHTS
    tolerance: ClassVar[float] = 0.1
    needs: ClassVar[frozenset[str]] = frozenset({"float_weights", "linear", "compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    kernels: ClassVar[str] = "oneDNN int8 (u8 x s8)"
    """Return the name of the layers' kernels, for messages."""
    rewrite: ClassVar[Callable[[torch.fx.GraphModule], None]] = share_integers
    """For the exported graph: what its layers can share."""

    skip: tuple[str, ...] = ()
    """Names of layers that stay in floating point."""

    def variants(self, target: Target) -> Iterable[Self]:
        return self.by_parts(target)

    def refuse(self, target: Target) -> str | None:
        return super().refuse(target) or self.lacks(target, *self.kinds)

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return None if device.kind == "cpu" else "its kernels are oneDNN's, for x86 CPUs"

    @property
    def epsilon(self) -> float:
        return EPSILON

    @property
    def kernel(self) -> str | None:
        return "int8"

    def replace_layer(self, layer: Any) -> nn.Module | str:
        """Return an 8-bit layer that needs no calibration, or the reason against one."""
        return Int8Layer(layer, None)

    def replacements(self, target: Target) -> Replacement:
        """Return the replacement layers for `apply`; may prepare the model and calibrate first."""
        called = fewest_rows(target, self.kinds, target.workload.calibration(target.compute_dtype))
        return lambda layer: self.replace_layer(layer) if layer in called else UNCALLED

    def apply(self, target: Target) -> None:
        separate_heads(target.model)
        replacement = self.replacements(target)
        names = (name for name, _ in named(target.model, self.kinds))
        asked = known_names(f"{self.name}:skip", self.skip, names)
        found = [each for each in quantizable(target.model, asked, self.kinds) if self.covers(each[0])]
        skipped: dict[str, str] = {}
        for name, layer, reason in found:
            new = reason or replacement(layer)
            if isinstance(new, str):
                skipped[name] = new
            else:
                replace_module(target.model, layer, new)
        if self.parts and len(found) == len(skipped):
            why = "; ".join(sorted(set(skipped.values()))) or "its layers are something else already"
            raise RefusedTechnique(f"{self.name} changes nothing of {', '.join(self.parts)}", found=why)
        self.compile_with(target.settings)
        self.cover(target, len(found), unit="layers", kernel=self.kernels, skipped=skipped)

    def compile_with(self, settings: Settings) -> None:
        """Tell the compiler what the layers count on."""
        register_patterns()
        # Asked of the class, because an instance would be its first argument.
        if type(self).rewrite not in settings.rewrites:
            settings.rewrites.append(type(self).rewrite)

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        return stand_in_error(module, self.stand_in(module), x)

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        if overridden(module, self.kinds):
            return None
        replaced = self.replace_layer(module)
        return None if isinstance(replaced, str) else replaced

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names)


def quantizable(
    model: nn.Module, skip: set[str], kinds: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, Any, str]]:
    """(name, layer, reason to leave it alone or '') for every layer of these kinds."""
    for name, module in named(model, kinds):
        reason = ""
        if name in skip:
            reason = "left in float: among the most sensitive"
        elif why := deviation(module, kinds):
            reason = why
        elif isinstance(module, nn.Conv2d) and (
            module.padding_mode != "zeros" or isinstance(module.padding, str)
        ):
            reason = "the padding is not a number of zeros"
        elif module.weight.dtype not in FLOATS:
            reason = f"its weight is {module.weight.dtype}"
        yield name, module, reason


def fewest_rows(
    target: Target, kinds: tuple[type[nn.Module], ...], calls: Sequence[Case]
) -> dict[nn.Module, int]:
    """Return the layers that these calls of the model run, each with the rows of its smallest call.

    The owner of another layer may read its weight directly, as torchvision's Swin does.
    """
    rows: dict[nn.Module, int] = {}

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = layer_input(args, kwargs)
        now = x.numel() // max(x.shape[-1], 1) if isinstance(x, torch.Tensor) and x.dim() else 0
        rows[module] = min(now, rows.get(module, now))

    handles = [
        layer.register_forward_pre_hook(count, with_kwargs=True) for _, layer in named(target.model, kinds)
    ]
    try:
        outputs(target.model, calls)
    finally:
        for handle in handles:
            handle.remove()
    return rows
