"""torchao's quantized layers, where its wheel has kernels for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.facts import Coverage, DeviceFacts
from torchwright.quiet import quiet_import
from torchwright.techniques.base import Phase, Target, Technique
from torchwright.techniques.shared.wrapping import named

CAPABILITY = {"int8_dynamic": (8, 0), "int4_weight_only": (8, 0), "float8_dynamic": (8, 9)}
"""Compute capability from which each configuration has kernels."""


@dataclass(frozen=True, kw_only=True)
class TorchAO(Technique):
    """Quantize linear layers with torchao's configuration for the card."""

    name: ClassVar[str] = "torchao"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"linear", "float_weights"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    tolerance: ClassVar[float] = 0.25

    config: Literal["float8_dynamic", "int8_dynamic", "int4_weight_only"] = "int8_dynamic"
    """Weights and activations: float8 by rows, int8 by tokens, or int4 weights alone."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind != "cuda":
            return "torchao's wheel has no CPU kernels; torchwright's own int8 goes through oneDNN"
        return None

    def variants(self, target: Target) -> Iterable[Self]:
        yield replace(self, config="float8_dynamic")
        yield replace(self, config="int8_dynamic")
        yield replace(self, config="int4_weight_only")

    def refuse(self, target: Target) -> str | None:
        fault = self.available(target.device)
        if fault:
            return fault
        have, want = torch.cuda.get_device_capability(), CAPABILITY[self.config]
        if have < want:
            return f"{self.config} needs compute capability {want[0]}.{want[1]}; this card has {have[0]}.{have[1]}"
        return None

    def apply(self, target: Target) -> None:
        with quiet_import():
            from torchao.quantization import quantize_

        before = {name: layer.weight for name, layer in named(target.model, nn.Linear)}
        if target.compute_dtype == torch.float32 and self.config != "int8_dynamic":
            target.model = target.workload.cast(target.model, torch.bfloat16, lambda name, module: False)
            target.compute_dtype = torch.bfloat16
            before = {name: layer.weight for name, layer in named(target.model, nn.Linear)}
        quantize_(target.model, self._config())
        after = {name: layer.weight for name, layer in named(target.model, nn.Linear)}
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

    def _config(self) -> Any:
        # set_inductor_config would change Inductor's settings for the whole process.
        import torchao.quantization as ao

        if self.config == "int8_dynamic":
            return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
        if self.config == "int4_weight_only":
            return ao.Int4WeightOnlyConfig(set_inductor_config=False)
        return ao.Float8DynamicActivationFloat8WeightConfig(
            granularity=ao.PerRow(), set_inductor_config=False
        )
