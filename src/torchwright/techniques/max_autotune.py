"""Choosing matrix kernels by measurement while compiling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torchwright.facts import Coverage
from torchwright.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class MaxAutotune(Technique):
    """Let Inductor time its C++ GEMM templates against the library for each matrix shape."""

    name: ClassVar[str] = "max_autotune"
    phase: ClassVar[Phase] = Phase.RUNTIME
    needs: ClassVar[frozenset[str]] = frozenset({"compiled", "linear"})

    backends: Literal["CPP,ATEN", "CPP", "TRITON,ATEN", "TRITON"] = "CPP,ATEN"
    """Where candidate kernels come from: templates in C++ or Triton, beside the library (ATEN) or without it."""
    prologue_fusion: bool = True
    """Compute what feeds a matrix product inside its Triton template."""

    def variants(self, target: Target) -> Iterable[Self]:
        yield replace(self, backends="CPP,ATEN" if target.device.kind == "cpu" else "TRITON,ATEN")

    def refuse(self, target: Target) -> str | None:
        cpp = "CPP" in self.backends
        if cpp != (target.device.kind == "cpu"):
            return f"the back ends {self.backends} are not for {target.device.kind}"
        if cpp and not self.prologue_fusion:
            return "only Triton's templates have prologues, so there is nothing to switch off"
        return None

    def apply(self, target: Target) -> None:
        target.settings.inductor |= {
            "max_autotune": True,
            "max_autotune_gemm_backends": self.backends,
            "autotune_num_choices_displayed": 0,
            "prologue_fusion": self.prologue_fusion,
        }
        target.coverage.append(
            Coverage(technique=self.name, changed=1, total=1, unit="compilation", kernel=self.backends)
        )
