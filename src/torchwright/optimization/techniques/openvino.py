"""OpenVINO in place of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.core.records import DeviceFacts, Step
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared import half
from torchwright.optimization.techniques.shared.batchnorm import fold
from torchwright.optimization.techniques.shared.engine import (
    FLOAT32_GAIN,
    REPLACED,
    hand_over,
    missing,
    writes,
)
from torchwright.optimization.techniques.shared.int8 import LAYERS
from torchwright.optimization.techniques.shared.int8_layers import EPSILON
from torchwright.optimization.techniques.shared.rounded_products import Rounded
from torchwright.optimization.techniques.shared.wrapping import known_names, named

NAME = "openvino"
LIBRARIES = ("openvino", "nncf")
EPSILONS = {"f32": 0.0, "f16": 2.0**-10, "bf16": 1.3 * 2.0**-8, "int8": EPSILON}
"""`Technique.epsilon` by precision. OpenVINO's bfloat16 loses 1.3 times as much as PyTorch's autocast: the
median of 22 models of benchmarks/optimize/zoo.py, 0.3 to 2.8 times each. A model in bfloat16 loses twice as much as
with PyTorch's autocast."""
AUTOCAST = 0.6
"""The share that `autocast` loses (seven transformers: 0.1 to 0.8, the most where the budget is near)."""
RATES = {"bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True, kw_only=True)
class RunOpenVino(Technique):
    """Run the whole model by OpenVINO, of which an artifact keeps the converted graph."""

    name: ClassVar[str] = NAME
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "exportable", "float32", "cpu"})
    removes: ClassVar[frozenset[str]] = REPLACED
    tolerance: ClassVar[float] = 0.1

    precision: Literal["f32", "bf16", "f16", "int8"] = "f32"
    """The precision of the arithmetic; int8 is NNCF's, calibrated, with biases corrected and the rest in bf16 where the
    processor supports it.
    """
    hint: Literal["latency", "throughput"] = "latency"
    """Use all threads for one call, or share them between calls from several threads."""
    autocast: bool = False
    """Compute products alone in half precision, and what stands between them in float32, as torch.autocast does."""
    skip: tuple[str, ...] = ()
    """Names of layers that int8 leaves in floating point, and `autocast` in float32."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return missing(NAME, LIBRARIES, device)

    def variants(self, target: Target) -> Iterable[Self]:
        # What is added up along a transformer loses most by half precision, and takes next to no time in float32;
        # what stands between convolutions takes up to a fifth of theirs.
        for autocast in (True, False) if "sdpa" in target.properties else (False, True):
            yield replace(self, precision="bf16", autocast=autocast)
        for precision in ("int8", "f32", "f16"):
            yield replace(self, precision=precision)

    @property
    def calibrates(self) -> bool:
        return self.precision == "int8"

    @property
    def errors_add(self) -> bool:
        return self.precision == "int8" or self.autocast

    @property
    def rounds_between(self) -> bool:
        return self.autocast

    @property
    def expected_loss(self) -> float:
        return self.tolerance if self.epsilon else Technique.tolerance

    @property
    def half(self) -> str | None:
        return RATES.get(self.precision)  # OpenVINO keeps float32 where a processor has none of them

    @property
    def epsilon(self) -> float:
        return EPSILONS[self.precision] * (AUTOCAST if self.autocast else 1.0)

    @property
    def expected_gain(self) -> float | None:
        return FLOAT32_GAIN if self.precision in ("f32", "f16") else None

    @property
    def conversion(self) -> Step:
        return type(self)().step()

    def refuse(self, target: Target) -> str | None:
        if self.skip and self.precision != "int8" and not self.autocast:
            return f"skip is for int8 and autocast, and the precision is {self.precision}"
        if self.autocast and self.precision not in RATES:
            return f"autocast is for {' and '.join(RATES)}, and the precision is {self.precision}"
        if self.precision == "int8" and "layers" not in target.properties:
            return "no layer of the model has weights that int8 would narrow"
        rates = target.device.tflops
        fast, full = rates.get(self.half or ""), rates.get("float32")
        if fast and full and fast < full:
            return f"{self.precision} matrix products reach {fast:.2f} TFLOP/s here, float32 {full:.2f}"
        return writes(target)

    def apply(self, target: Target) -> None:
        known_names(f"{NAME}:skip", self.skip, (name for name, _ in named(target.model, self._layers())))
        if "batch_norm" in target.properties:
            # OpenVINO folds them, too, and calls the layers by other names than those of `skip`.
            fold(target.model, target.workload.cases(target.compute_dtype))
        hand_over(
            target,
            NAME,
            f"OpenVINO {self.precision}{' by autocast' if self.autocast else ''}",
            precision=self.precision,
            hint=self.hint.upper(),
            autocast=self.autocast,
            skip=self.skip,
        )

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, self._layers()):
            return None
        if self.precision == "int8":
            return Rounded(module)
        return half.Lower(module, getattr(torch, RATES[self.precision])) if self.autocast else None

    @property
    def emulates(self) -> bool:
        return self.precision == "int8"

    def emulate(self, target: Target) -> None:
        for name, module in list(named(target.model, LAYERS)):
            if self.emulates and name not in self.skip:
                module.forward = Rounded(module).forward  # its owner may read its weight

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names) if self.precision == "int8" or self.autocast else None

    def _layers(self) -> tuple[type[nn.Module], ...]:
        """Return the names that `skip` takes."""
        return half.LAYERS if self.autocast else LAYERS
