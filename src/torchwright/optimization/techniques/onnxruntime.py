"""ONNX Runtime in place of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.engine import (
    FLOAT32_GAIN,
    REPLACED,
    hand_over,
    missing,
    writes,
)

NAME = "onnxruntime"
LIBRARIES = ("onnxruntime", "onnx", "onnxscript")


@dataclass(frozen=True, kw_only=True)
class RunOnnxRuntime(Technique):
    """Run the whole model by ONNX Runtime in float32, of which an artifact keeps the ONNX file."""

    name: ClassVar[str] = NAME
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "exportable", "float32", "cpu"})
    removes: ClassVar[frozenset[str]] = REPLACED
    tolerance: ClassVar[float] = 1e-3

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return missing(NAME, LIBRARIES, device)

    @property
    def expected_gain(self) -> float:
        return FLOAT32_GAIN

    def refuse(self, target: Target) -> str | None:
        return writes(target)

    def apply(self, target: Target) -> None:
        hand_over(target, NAME, "ONNX Runtime")
