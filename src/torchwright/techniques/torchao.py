"""torchao's quantized layers, where its wheel has kernels for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.facts import Coverage, DeviceFacts
from torchwright.quiet import quiet_import
from torchwright.techniques.base import Phase, Target
from torchwright.techniques.shared.for_parts import ForParts
from torchwright.techniques.shared.wrapping import named

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
"""Both sides of a weight must be multiples of it."""


@dataclass(frozen=True, kw_only=True)
class TorchAO(ForParts):
    """Quantize linear layers with torchao's configuration for the card."""

    name: ClassVar[str] = "torchao"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"linear", "float_weights"})
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
    weights alone: int4 (by half-quadratic quantization: `int4_hqq`), float8, int8."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind != "cuda":
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
        with quiet_import():
            from torchao.quantization import quantize_

        before = {name: layer.weight for name, layer in self._layers(target)}
        if target.compute_dtype == torch.float32 and self.config != "int8_dynamic":
            target.model = target.workload.cast(
                target.model, torch.bfloat16, lambda name, module: not self.covers(name)
            )
            target.compute_dtype = torch.bfloat16
            before = {name: layer.weight for name, layer in self._layers(target)}
        quantize_(target.model, self._config(), filter_fn=self._filter())
        after = {name: layer.weight for name, layer in self._layers(target)}
        skipped = {
            name: f"torchao left its {tuple(weight.shape)} weight alone"
            for name, weight in before.items()
            if after.get(name) is weight
        }
        target.coverage.append(
            Coverage(
                technique=self.name,
                changed=len(before) - len(skipped),
                total=len(before),
                unit="linear layers",
                kernel=f"torchao {self.config}",
                skipped=skipped,
            )
        )

    def _layers(self, target: Target) -> Iterable[tuple[str, Any]]:
        return ((name, layer) for name, layer in named(target.model, nn.Linear) if self.covers(name))

    def _filter(self) -> Callable[[nn.Module, str], bool] | None:
        """Which modules it takes; None where torchao says it itself."""
        block = BLOCKS.get(self.config)
        if block is None and not self.parts:
            return None

        def taken(module: nn.Module, name: str) -> bool:
            if not (type(module) is nn.Linear and self.covers(name)):
                return False
            return block is None or not any(side % block for side in module.weight.shape)

        return taken

    def _config(self) -> Any:
        import torchao.quantization as ao

        # set_inductor_config would change Inductor's settings for the whole process.
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
                return ao.Int8DynamicActivationInt8WeightConfig(**options)
            case "float8_weight_only":
                return ao.Float8WeightOnlyConfig(**options)
            case "int8_weight_only":
                return ao.Int8WeightOnlyConfig(**options)
            case "int4_weight_only" | "int4_hqq":
                algorithm = "hqq" if self.config == "int4_hqq" else "tinygemm"
                options["int4_packing_format"] = "tile_packed_to_4d"  # torch's own kernel; others need MSLK
                options["int4_choose_qparams_algorithm"] = algorithm
                return ao.Int4WeightOnlyConfig(**options)
