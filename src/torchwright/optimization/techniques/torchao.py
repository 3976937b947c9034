"""torchao's quantized layers, where its wheel has kernels for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import overridden
from torchwright.core.quiet import quiet_import
from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Phase, Target
from torchwright.optimization.techniques.shared.for_parts import ForParts
from torchwright.optimization.techniques.shared.int8_layers import EPSILON, fewest_rows
from torchwright.optimization.techniques.shared.wrapping import known_names, named, plain_name, stand_in_error

CAPABILITY = {
    "nvfp4": (10, 0),
    "mxfp8": (10, 0),
    "float8_dynamic": (8, 9),
    "int8_dynamic": (8, 0),
    "int4_weight_only": (8, 0),
    "float8_weight_only": (8, 9),
    "int8_weight_only": (8, 0),
    "int4_hqq": (8, 0),
}
"""Compute capability from which each configuration has kernels; most promising first."""
BLOCKS = {"nvfp4": 16, "mxfp8": 32}
"""The divisor of both sides of a weight."""
FEWEST_ROWS = {"int8_dynamic": 17}
"""The fewest rows of a product that multiplies 8-bit integers (`torch._int_mm`)."""
EPSILONS = {"nvfp4": 2.0**-2, "mxfp8": 2.0**-4, "float8": 2.0**-4, "int8": EPSILON, "int4": 16 * EPSILON}
"""`Technique.epsilon` by the format's name: of floats half of the last bit that is kept."""


@dataclass(frozen=True, kw_only=True)
class TorchAO(ForParts):
    """Quantize linear layers with torchao's configuration for the card."""

    name: ClassVar[str] = "torchao"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    # What it rounds at a call costs more than it saves until a compiler has fused it: 0.05x on an H100 (docs/log.md).
    needs: ClassVar[frozenset[str]] = frozenset({"linear", "float_weights", "compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    tolerance: ClassVar[float] = 0.25

    config: Literal[
        "nvfp4",
        "mxfp8",
        "float8_dynamic",
        "int8_dynamic",
        "int4_weight_only",
        "float8_weight_only",
        "int8_weight_only",
        "int4_hqq",
    ] = "int8_dynamic"
    """Weights and activations: NVIDIA's 4-bit floats, float8 by blocks of 32 (MX) or by rows, int8 by tokens; or
    weights alone: int4 (by half-quadratic quantization: `int4_hqq`), float8, int8. `nvfp4` scales its blocks by one
    more number for the whole call: a NaN in one row reaches all rows."""
    skip: tuple[str, ...] = ()
    """Names of layers that stay in floating point."""

    @property
    def epsilon(self) -> float:
        return next(error for name, error in EPSILONS.items() if self.config.startswith(name))

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind not in ("cpu", "cuda"):
            return f"its configurations are chosen for CUDA's kernels; this device is {device.kind}"
        if device.kind == "cpu":
            return (
                "torchao's wheel has no CPU kernels, and none reads float8 or 4-bit floats on a CPU: weights would be "
                "widened at every call; torchwright's own int8 goes through oneDNN"
            )
        return None

    def variants(self, target: Target) -> Iterable[Self]:
        for config in CAPABILITY:
            yield from replace(self, config=config).by_parts(target)

    def refuse(self, target: Target) -> str | None:
        fault = self.available(target.device) or super().refuse(target)
        if fault:
            return fault
        have, want = torch.cuda.get_device_capability(), CAPABILITY[self.config]
        if have < want:
            return f"{self.config} needs compute capability {want[0]}.{want[1]}; this card has {have[0]}.{have[1]}"
        return None

    def apply(self, target: Target) -> None:
        before = {name: layer.weight for name, layer in self._layers(target)}
        if target.compute_dtype == torch.float32 and not self._keeps_float32:
            target.model = target.workload.cast(
                target.model, torch.bfloat16, lambda name, module: not self.covers(name)
            )
            target.compute_dtype = torch.bfloat16
            before = {name: layer.weight for name, layer in self._layers(target)}
        asked = known_names(f"{self.name}:skip", self.skip, before)
        left = dict.fromkeys(asked, "left in float: among the most sensitive") | self._too_few_rows(target)
        chosen = {layer for name, layer in self._layers(target) if name not in left}
        self._quantize(target.model, lambda module: module in chosen)
        after = {name: layer.weight for name, layer in self._layers(target)}
        skipped = {
            name: left.get(name, f"torchao left its {tuple(weight.shape)} weight alone")
            for name, weight in before.items()
            if after.get(name) is weight
        }
        if before and len(skipped) == len(before):
            why = "; ".join(sorted(set(skipped.values())))
            raise RefusedTechnique(f"torchao:config={self.config} changes nothing here", found=why)
        self.cover(
            target, len(before), unit="linear layers", kernel=f"torchao {self.config}", skipped=skipped
        )

    def _too_few_rows(self, target: Target) -> dict[str, str]:
        """Layers that the workload calls on fewer rows than the format's product takes."""
        least = FEWEST_ROWS.get(self.config, 0)
        if not least:
            return {}
        calls = target.workload.cases(target.compute_dtype)
        rows = fewest_rows(target, (nn.Linear,), calls)
        few = {name: rows.get(layer, least) for name, layer in self._layers(target)}
        return {
            name: f"called on {count} rows, and its product takes {least} or more"
            for name, count in few.items()
            if count < least
        }

    def _layers(self, target: Target) -> Iterable[tuple[str, Any]]:
        return ((name, layer) for name, layer in named(target.model, nn.Linear) if self.covers(name))

    def _takes(self, module: nn.Module) -> bool:
        """Check whether the format supports a module's weight; torchao itself leaves other modules alone."""
        block = BLOCKS.get(self.config, 1)
        # Hooks stay: torchao changes the weight and keeps the layer.
        if overridden(module, (nn.Linear,)):
            return False
        weight: Any = module.weight
        return not any(side % block for side in weight.shape)

    def retreat(self, names: tuple[str, ...]) -> Self:
        return replace(self, skip=tuple(sorted({*self.skip, *map(plain_name, names)})))

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        return stand_in_error(module, self.stand_in(module), x)

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        if not self._takes(module):
            return None
        rounded = InItsType(copy.deepcopy(module), torch.float32 if self._keeps_float32 else torch.bfloat16)
        self._quantize(rounded, lambda module: True)
        return rounded

    def _quantize(self, model: nn.Module, wanted: Callable[[nn.Module], bool]) -> None:
        with quiet_import():  # older ones warn of what their own configurations do
            from torchao.quantization import quantize_

            quantize_(model, self._config(), lambda module, _: wanted(module) and self._takes(module))

    @property
    def _keeps_float32(self) -> bool:
        """Check whether torchao's kernels for the format return float32 as well."""
        return self.config == "int8_dynamic"

    def _config(self) -> Any:
        import torchao.quantization as ao

        # set_inductor_config would change Inductor's settings for the whole process. Of 8-bit integers torchao 0.17 has
        # two forms, and warns in each call of the older, its default there.
        options: dict[str, Any] = {"set_inductor_config": False}
        match self.config:
            case "nvfp4":
                from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig

                return NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)  # it needs MSLK
            case "mxfp8":
                from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig

                return MXDynamicActivationMXWeightConfig()
            case "float8_dynamic":
                return ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow(), **options)
            case "int8_dynamic":
                return ao.Int8DynamicActivationInt8WeightConfig(version=2, **options)
            case "float8_weight_only":
                return ao.Float8WeightOnlyConfig(**options)
            case "int8_weight_only":
                return ao.Int8WeightOnlyConfig(version=2, **options)
            case "int4_weight_only" | "int4_hqq":
                algorithm = "hqq" if self.config == "int4_hqq" else "tinygemm"
                options["int4_packing_format"] = "tile_packed_to_4d"  # torch's own kernel; others need MSLK
                options["int4_choose_qparams_algorithm"] = algorithm
                return ao.Int4WeightOnlyConfig(**options)


class InItsType(nn.Module):
    """A layer called in `dtype` where its weight is float32; others are called as they are."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype if layer.weight.dtype == torch.float32 else layer.weight.dtype
        self.layer = layer.to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.dtype))
