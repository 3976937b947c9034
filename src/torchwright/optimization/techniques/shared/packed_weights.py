"""Shared code of techniques that quantize the native decoder's packed layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.core.records import DeviceFacts
from torchwright.core.scheme import SCHEMES, Scheme, scheme_of
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hardware.kernels.pack import finite
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.wrapping import (
    known_names,
    named,
    relative_error,
    replace_module,
)


@dataclass(frozen=True, kw_only=True)
class PackedWeights(Technique):
    """The scheme of its name for the native decoder's linear layers; the most sensitive ones keep a wider one."""

    phase: ClassVar[Phase] = Phase.WEIGHTS
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"decoder", "wide_weights"})
    removes: ClassVar[frozenset[str]] = frozenset({"wide_weights"})
    wider: ClassVar[Scheme]
    """The scheme of the layers in `skip`."""

    skip: tuple[str, ...] = ()
    """Names of layers that keep more bits."""
    side: Literal["both", "encoder", "decoder"] = "both"
    """The stacks to quantize, in a model with an encoder and a decoder."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return ops.fault(device.kind)

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.name]

    def variants(self, target: Target) -> Iterable[Self]:
        yield self
        if "two_stacks" in target.properties:
            yield replace(self, side="encoder")
            yield replace(self, side="decoder")

    def refuse(self, target: Target) -> str | None:
        if self.side != "both" and "two_stacks" not in target.properties:
            return f"the model has no {self.side} beside another side"
        return None

    def importance(self, target: Target) -> dict[nn.Module, torch.Tensor]:
        """Return the calibration statistics of each layer's input features, for schemes that need them; see
        `PackedLinear`.
        """
        return {}

    def apply(self, target: Target) -> None:
        every = dict(named(target.model, PackedLinear))
        layers = {name: each for name, each in every.items() if self._asked(name)}
        asked = known_names(f"{self.name}:skip", self.skip, every)
        importance = self.importance(target)
        skipped: dict[str, str] = {}
        for name, layer in layers.items():
            scheme = self.scheme
            if name in asked:
                scheme, skipped[name] = self.wider, f"kept in {self.wider.name}: among the most sensitive"
            if scheme != layer.scheme:
                wide_NK = finite(layer.wide_weight(), name)
                packed = self._packed(layer, wide_NK, scheme, importance.get(layer))
                replace_module(target.model, layer, packed)
        self.cover(
            target,
            len(every),
            changed=len(layers) - len(skipped),
            unit="layers",
            kernel=f"int{self.scheme.weight_bits} weights, {_rows(self.scheme)} rows",
            skipped=skipped,
        )

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        if not isinstance(module, PackedLinear):
            return None
        expected = module.forward(x).float()  # not module(x): the ranking calls this from a hook on it
        mean_squares_K = x.float().square().flatten(0, -2).mean(0)
        packed = self._packed(module, module.wide_weight(), self.scheme, mean_squares_K)
        return relative_error(expected, packed.forward(x).float())

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names)

    def _asked(self, name: str) -> bool:
        return self.side == "both" or name.startswith(f"{self.side}.")

    def _packed(
        self, layer: PackedLinear, wide_NK: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None
    ) -> PackedLinear:
        """In place of `layer`. Integers are chosen on the CPU, wherever they will lie."""
        device = layer.packed.device
        packed = PackedLinear(
            wide_NK.cpu(),
            None if layer.bias is None else layer.bias.cpu(),
            scheme,
            importance=None if importance is None else importance.cpu(),
            device=device,
        )
        return packed.to(device)


@dataclass(frozen=True, kw_only=True)
class GroupedWeights(PackedWeights):
    """4-bit weights, chosen by calibration."""

    group_size: Literal[32, 64, 128] = 32
    """Inputs that share a scale; smaller is more exact and has more bytes."""
    rounding: Literal["nearest", "gptq"] = "nearest"
    """Each weight by itself, or each making up for the errors of those before it (slower; Frantar et al., 2023)."""

    @property
    def calibrates(self) -> bool:
        return True

    @property
    def scheme(self) -> Scheme:
        return scheme_of(self.name, self.group_size)

    def importance(self, target: Target) -> dict[nn.Module, torch.Tensor]:
        return mean_products(target) if self.rounding == "gptq" else mean_squares(target)


def _rows(scheme: Scheme) -> str:
    return "int8" if scheme.digits == 1 else f"{scheme.input_bits}-bit"


def mean_squares(target: Target) -> dict[nn.Module, torch.Tensor]:
    """The mean square of each input feature of every packed layer over the calibration calls: layer → (K,)."""
    return _means(target, lambda rows: rows.square().sum(0))


def mean_products(target: Target) -> dict[nn.Module, torch.Tensor]:
    """The mean product of each two input features of every packed layer: layer → (K, K)."""
    return _means(target, lambda rows: rows.T @ rows)


def _means(target: Target, total_of: Callable[[torch.Tensor], torch.Tensor]) -> dict[nn.Module, torch.Tensor]:
    sums: dict[nn.Module, torch.Tensor] = {}
    counts: Counter[nn.Module] = Counter()

    def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
        rows = args[0].float().flatten(0, -2)
        total = total_of(rows)
        sums[module] = sums[module].add_(total) if module in sums else total
        counts[module] += len(rows)

    layers: Sequence[nn.Module] = [m for m in target.model.modules() if isinstance(m, PackedLinear)]
    handles = [layer.register_forward_pre_hook(watch) for layer in layers]
    try:
        with torch.inference_mode():
            for case in target.workload.calibration(target.compute_dtype):
                target.model(*case.args, **case.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {module: total / counts[module] for module, total in sums.items()}
