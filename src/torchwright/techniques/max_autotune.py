"""Choosing matrix kernels by measurement while compiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchwright.facts import Coverage
from torchwright.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class MaxAutotune(Technique):
    """Let Inductor time its C++ GEMM templates against the library for each matrix shape."""

    name: ClassVar[str] = "max_autotune"
    phase: ClassVar[Phase] = Phase.RUNTIME
    needs: ClassVar[frozenset[str]] = frozenset({"compiled", "linear"})

    backends: Literal["CPP,ATEN", "TRITON,ATEN"] = "CPP,ATEN"
    """Where candidate kernels come from."""

    def refuse(self, target: Target) -> str | None:
        if (self.backends == "CPP,ATEN") != (target.device.kind == "cpu"):
            return f"the back ends {self.backends} are not for {target.device.kind}"
        return None

    def apply(self, target: Target) -> None:
        target.settings.inductor |= {
            "max_autotune": True,
            "max_autotune_gemm_backends": self.backends,
            "autotune_num_choices_displayed": 0,
        }
        target.coverage.append(
            Coverage(technique=self.name, changed=1, total=1, unit="compilation", kernel=self.backends)
        )
