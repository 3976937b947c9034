"""Choosing matrix kernels by measurement while compiling."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch

from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class MaxAutotune(Technique):
    """Let Inductor time its C++ GEMM templates against the library for each matrix shape."""

    name: ClassVar[str] = "max_autotune"
    phase: ClassVar[Phase] = Phase.RUNTIME
    needs: ClassVar[frozenset[str]] = frozenset({"compiled", "linear"})

    backends: Literal[
        "CPP,ATEN",
        "CPP",
        "TRITON,ATEN",
        "TRITON",
        "CUTLASS,TRITON,ATEN",
        "CUTEDSL,TRITON,ATEN",
        "NVGEMM,TRITON,ATEN",
        "CK,TRITON,ATEN",
    ] = "CPP,ATEN"
    """The sources of candidate kernels: templates in C++ or Triton, with or without the library (ATEN). For cards also
    NVIDIA's CUTLASS, CuteDSL (products of experts on Blackwell) and universal GEMM (NVGEMM), and AMD's CK."""
    prologue_fusion: bool = True
    """Compute what feeds a matrix product inside its Triton template."""

    def variants(self, target: Target) -> Iterable[Self]:
        if target.device.kind == "cpu":
            yield replace(self, backends="CPP,ATEN")
            return
        yield replace(self, backends="TRITON,ATEN")
        if torch.version.hip:
            yield replace(self, backends="CK,TRITON,ATEN")
            return
        yield replace(self, backends="CUTLASS,TRITON,ATEN")
        yield replace(self, backends="CUTEDSL,TRITON,ATEN")
        yield replace(self, backends="NVGEMM,TRITON,ATEN")

    def refuse(self, target: Target) -> str | None:
        cpp = "CPP" in self.backends
        if cpp != (target.device.kind == "cpu"):
            return f"the back ends {self.backends} are not for {target.device.kind}"
        for name, fault in FAULTS.items():
            if name not in self.backends:
                continue
            if torch.version.hip and name != "CK":
                return f"{name} is for NVIDIA cards; those of AMD have CK"
            if why := fault(target.device):
                return why
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


def cutlass_fault(_: DeviceFacts) -> str | None:
    """Return what Inductor lacks for CUTLASS's kernels, None where they compile."""
    from torch._inductor import config

    folder = Path(config.cutlass.cutlass_dir)
    if (folder / "python" / "cutlass_library").is_dir():
        return None
    return f"there is no CUTLASS in {folder}: TORCHINDUCTOR_CUTLASS_DIR names a checkout of it"


def cutedsl_fault(device: DeviceFacts) -> str | None:
    """Return what Inductor lacks for CuteDSL's kernels, which multiply experts, or None."""
    if not any(name.startswith(BLACKWELL) for name in device.isa):
        here = ", ".join(device.isa) or "another"
        return f"Inductor's templates in CuteDSL are for {BLACKWELL}x; this card is {here}"
    return _package_fault("ensure_cute_available", "CuteDSL", "nvidia-cutlass-dsl")


def nvgemm_fault(_: DeviceFacts) -> str | None:
    """Return what Inductor lacks for NVIDIA's universal GEMM, or None."""
    return _package_fault("ensure_nv_universal_gemm_available", "NVGEMM", "nvidia-cutlass")


def _package_fault(check: str, name: str, package: str) -> str | None:
    """Ask this torch: its versions look for packages of different names."""
    from torch._inductor import utils

    available = getattr(utils, check, None)
    if available is None:
        return f"Inductor of torch {torch.__version__} has no {name}"
    return None if available() else f"{name} needs the package {package}, which this torch does not find"


def ck_fault(_: DeviceFacts) -> str | None:
    """Return what Inductor lacks for Composable Kernel's kernels, or None."""
    if not torch.version.hip:
        return "CK is for AMD cards; those of NVIDIA have CUTLASS"
    return (
        None
        if importlib.util.find_spec("ck4inductor")
        else "CK needs the package ck4inductor, of ROCm's composable_kernel"
    )


BLACKWELL = "sm_10"
"""The compute capability's beginning of the cards that Inductor's CuteDSL templates are for."""
FAULTS: dict[str, Callable[[DeviceFacts], str | None]] = {
    "CUTLASS": cutlass_fault,
    "CUTEDSL": cutedsl_fault,
    "NVGEMM": nvgemm_fault,
    "CK": ck_fault,
}
"""Back end → the reason for which it is refused."""
