"""ONNX Runtime in place of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchwright.facts import Coverage, DeviceFacts
from torchwright.techniques.base import Phase, Target, Technique
from torchwright.techniques.shared.engine import REPLACED, missing

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

    def apply(self, target: Target) -> None:
        target.settings.engine = NAME
        total = sum(1 for _ in target.model.modules())
        target.coverage.append(Coverage(technique=NAME, changed=total, total=total, kernel="ONNX Runtime"))
