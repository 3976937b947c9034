# pyright: basic
"""torch.export's own archive: the graph and its weights, for other tools and for PyTorch anywhere."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torchwright.exporter.base import PROFILED, GraphTarget, Run, Values, Written
from torchwright.exporter.verification.reference import eager, graph_values
from torchwright.optimization.engines.compiled.program import ignore_library_warnings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from torchwright.optimization.engines.dispatch.spec import CallSpec
    from torchwright.optimization.techniques.base import Target

MODEL = "model.pt2"


class Pt2(GraphTarget):
    """torch.export's archive (.pt2): the graph and its weights, which PyTorch runs operator by operator."""

    name: ClassVar[str] = "pt2"
    runtime: ClassVar[str] = "PyTorch"

    @classmethod
    def convert(
        cls, program: ExportedProgram, spec: CallSpec, target: Target, precision: str, folder: Path
    ) -> Written:
        save(program, folder / MODEL)
        count = sum(node.op == "call_function" for node in program.graph.nodes)
        return Written(operators={"torch's own": count})

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        return eager(_read(folder))

    @classmethod
    def values(cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor]) -> Values:
        return graph_values(_read(folder), tensors)

    @classmethod
    def times(
        cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor], threads: int
    ) -> list[dict[str, float]]:
        run = eager(_read(folder))
        return [called for called, _ in profiled(lambda: run(tensors))]


def profiled(call: Callable[[], object]) -> Iterator[tuple[dict[str, float], float]]:
    """Return microseconds by torch's operators, and of the whole, each over PROFILED calls."""
    from torch.profiler import ProfilerActivity, profile

    call()
    for _ in range(PROFILED):
        # torch 2.11 warns of every profile that keeps no events of earlier cycles, and there is one cycle.
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
            begun = time.perf_counter()
            call()
            whole = 1e6 * (time.perf_counter() - begun)
        yield {row.key: row.self_cpu_time_total for row in found.key_averages()}, whole


class Telling(io.FileIO):
    """A file that keeps its error: torch's writer of archives ends the process at one that is raised to it."""

    fault: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        whole = len(rest)
        try:
            while rest and self.fault is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.fault = error
        return whole


def save(program: ExportedProgram, path: Path) -> None:
    """Write torch.export's archive. Raises `OSError`, as of a full disk."""
    with Telling(path, "w") as file, ignore_library_warnings():
        torch.export.save(program, file)
        if file.fault is not None:
            raise file.fault


def _read(folder: Path) -> Any:
    with ignore_library_warnings():
        return torch.export.load(folder / MODEL)
