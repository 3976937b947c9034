# pyright: basic
"""A package of native code by AOTInductor, with its weights inside, for processors of a kind; C++ can load it."""

from __future__ import annotations

import contextlib
import platform
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchwright.core import system
from torchwright.core.errors import RefusedTechnique
from torchwright.exporter.base import GraphTarget, Run, Written
from torchwright.exporter.sizes import widen
from torchwright.exporter.targets.pt2 import profiled
from torchwright.exporter.verification.operators import refused_graph
from torchwright.hardware.devices import get_device
from torchwright.hardware.measure.toolchain import compiler_fault
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.program import CHECK_LEAST, compile_program
from torchwright.optimization.engines.rewrites.layout import lay_out_rows

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from torchwright.exporter.subject import Subject
    from torchwright.optimization.engines.dispatch.spec import CallSpec
    from torchwright.optimization.techniques.base import Target

MODEL = "model.pt2"
CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"
"""Has the compiled code refuse inputs of other types and sizes; without it they are undefined behaviour."""
OWN = "its own code"
"""Its kernels, and those of torch's that it calls without torch's dispatcher, such as matrix products."""
VECTOR_BITS = {"x86-64-v3": 256}
"""Levels of x86-64 that code is made for, and the vectors that Inductor then writes in: AVX2 without AVX-512."""


class Aoti(GraphTarget):
    """Native code for this kind of processor, or a level of its family, by AOTInductor (.pt2); loads without Python."""

    name: ClassVar[str] = "aoti"
    runtime: ClassVar[str] = "AOTInductor"
    levels: ClassVar[tuple[str, ...]] = tuple(VECTOR_BITS)

    @classmethod
    def unavailable(cls) -> str | None:
        return compiler_fault(get_device("cpu").identify())

    @classmethod
    def write(cls, subject: Subject, precision: str, folder: Path) -> Written:
        if subject.march is None:
            return super().write(subject, precision, folder)
        subject.target.settings.inductor |= level_flags(subject.march)
        written = super().write(subject, precision, folder)
        return replace(written, notes=(f"for any processor of {subject.march}", *written.notes))

    @classmethod
    def convert(
        cls, program: ExportedProgram, spec: CallSpec, target: Target, precision: str, folder: Path
    ) -> Written:
        lay_out_rows(program.graph_module)
        widen(program)

        def widened(lowered: Any) -> Any:
            widen(program)
            return lowered

        # What torch asks of a convolution narrows the bounds again, lowering an LSTM does, and code is generated then.
        options = dict(target.settings.inductor) | {
            "post_grad_custom_post_pass": widened,
            "_pre_fusion_custom_pass": widened,
            CHECK_LEAST: True,
        }
        try:
            compile_program(program, folder / MODEL, options)
        except OSError:
            raise
        except Exception as error:  # of Inductor, at what it does not know
            raise refused_graph("AOTInductor cannot compile this model", program, error) from error
        return Written(
            operators=_operators(folder / MODEL),
            notes=(
                f"sizes that it was not compiled for are refused where {CHECKS}=1 is set, and crash elsewhere",
            ),
        )

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        return _run(Package(folder / MODEL, spec))

    @classmethod
    def times(
        cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor], threads: int
    ) -> list[dict[str, float]]:
        run = cls.open(folder, spec, threads)
        return [
            called | {OWN: max(whole - sum(called.values()), 0.0)}
            for called, whole in profiled(lambda: run(tensors))
        ]

    @classmethod
    def reweighted(cls, folder: Path, spec: CallSpec, weights: dict[str, Tensor]) -> Run | None:
        package = Package(folder / MODEL, spec)
        package.load_weights(weights)
        return _run(package)


def level_flags(level: str) -> dict[str, Any]:
    """Inductor's settings for a level of x86-64. Raises `RefusedTechnique` on another family, or a torch without."""
    from torch._inductor import config

    if platform.machine() not in ("x86_64", "AMD64"):
        raise RefusedTechnique(f"{level} is a level of another family", found=platform.machine())
    if not hasattr(config.cpp, "march"):
        raise RefusedTechnique(
            "this torch compiles for its own processor alone", next="torch 2.13 takes --march"
        )
    return {"cpp.march": level, "cpp.simdlen": VECTOR_BITS[level]}


def _run(package: Package) -> Run:
    import torch

    from torchwright.core import nested

    begun = False

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        nonlocal begun
        # It reads the variable once, when its first call gets that far; others in this process are not to find it.
        with torch.no_grad(), contextlib.nullcontext() if begun else system.environment({CHECKS: "1"}):
            outputs = package.run([tensor.contiguous() for tensor in tensors])
        begun = True
        return nested.tensors(outputs)

    return run


def _operators(file: Path) -> dict[str, int]:
    """Kernels that were generated for the model, and calls of torch's own."""
    with zipfile.ZipFile(file) as archive:
        wrappers = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
        text = "".join(archive.read(name).decode() for name in wrappers)
    called = sum(
        line.count("aoti_torch_cpu_") for line in text.splitlines() if "AOTI_TORCH_ERROR_CODE_CHECK" in line
    )
    generated = sum(line.lstrip().startswith("cpp_fused_") for line in text.splitlines())
    return {"fused into kernels of its own": generated, "calls of torch's kernels": called}
