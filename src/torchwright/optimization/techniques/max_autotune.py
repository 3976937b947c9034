"""Choosing matrix kernels by measurement while compiling."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch

from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class MaxAutotune(Technique):
    """Let Inductor time its C++ GEMM templates against the library for each matrix shape."""

    name: ClassVar[str] = "max_autotune"
    phase: ClassVar[Phase] = Phase.RUNTIME
    times_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"compiled", "linear"})

    backends: Literal["CPP,ATEN", "CPP", "TRITON,ATEN", "TRITON", "CUTLASS,TRITON,ATEN", "CK,TRITON,ATEN"] = (
        "CPP,ATEN"
    )
    """The sources of candidate kernels: templates in C++, in Triton, of NVIDIA's CUTLASS, of AMD's Composable Kernel
    (CK), with or without the library (ATEN)."""
    prologue_fusion: bool = True
    """Compute what feeds a matrix product inside its Triton template."""

    def variants(self, target: Target) -> Iterable[Self]:
        if target.device.kind == "cpu":
            yield replace(self, backends="CPP,ATEN")
            return
        yield replace(self, backends="TRITON,ATEN")
        yield replace(self, backends="CK,TRITON,ATEN" if torch.version.hip else "CUTLASS,TRITON,ATEN")

    def refuse(self, target: Target) -> str | None:
        cpp = "CPP" in self.backends
        if cpp != (target.device.kind == "cpu"):
            return f"the back ends {self.backends} are not for {target.device.kind}"
        if "CUTLASS" in self.backends and (fault := cutlass_fault()):
            return fault
        if "CK" in self.backends and (fault := ck_fault()):
            return fault
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
        self.cover(target, 1, unit="compilation", kernel=self.backends)


def cutlass_fault() -> str | None:
    """Why Inductor cannot compile CUTLASS's kernels here, or None."""
    from torch._inductor import config

    if torch.version.hip:
        return "CUTLASS is for NVIDIA cards; those of AMD have CK"
    folder = Path(config.cutlass.cutlass_dir)
    if (folder / "python" / "cutlass_library").is_dir():
        return None
    return f"there is no CUTLASS in {folder}: TORCHINDUCTOR_CUTLASS_DIR names a checkout of it"


def ck_fault() -> str | None:
    """Why Inductor cannot compile Composable Kernel's kernels here, or None."""
    if not torch.version.hip:
        return "CK is for AMD cards; those of NVIDIA have CUTLASS"
    return (
        None
        if importlib.util.find_spec("ck4inductor")
        else "CK needs the package ck4inductor, of ROCm's composable_kernel"
    )
