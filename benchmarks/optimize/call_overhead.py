"""The overhead between a caller and compiled code, in microseconds a call.

    python -m benchmarks.optimize.call_overhead [--json FILE]

A package is compiled ahead of time for each form of call. `model(...)`, as a user makes it, is timed in turn with the
package's own entry point given a list of tensors. The difference is the cost of `nn.Module` and of the dispatcher
together. A channels-last copy of the input shows the cost of bringing another layout into the compiled one.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.harness.turns import seconds
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.packaging import described
from torchwright.optimization.engines.compiled.program import compile_program, export_one
from torchwright.optimization.engines.dispatch.call import parameters_of
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.optimization.engines.dispatch.module import OptimizedModule
from torchwright.optimization.engines.dispatch.spec import InputCapabilities
from torchwright.workloads.base import Case

ROUNDS, CALLS = 41, 2000


class Scaled(nn.Module):
    """The least work that compiled code can do on one input or several."""

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return x * 2 + sum(more)


class Named(nn.Module):
    """The least work on a dict that returns a dict."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": batch["a"] + batch["b"], "difference": batch["a"] - batch["b"]}


def forms() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    a, b, c, image = (torch.randn(shape) for shape in ((4, 8), (4, 8), (4, 8), (1, 3, 8, 8)))
    return {
        "one tensor": (Scaled(), (a,)),
        "three tensors": (Scaled(), (a, b, c)),
        "a dict of two": (Named(), ({"a": a, "b": b},)),
        "an image": (Scaled(), (image,)),
    }


def main() -> None:
    options = run.options(__doc__)
    rows = run.Rows(options.json, ("call", "compiled code, µs", "the model, µs", "between them, µs"))
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, (model, args)) in enumerate(forms().items()):
            for row in timed(name, model, Case(name="forward", args=args), Path(folder) / f"{index}.pt2"):
                times = (f"{row[key]:.2f}" for key in ("compiled", "model", "between"))
                rows.add(row, (row["call"], *times))


def timed(name: str, model: nn.Module, case: Case, path: Path) -> list[Row]:
    program = export_one(model.eval(), case, None)
    spec = described("forward", program)
    compile_program(program, path, {"freezing": True})
    package = Package(path, spec)
    optimized = OptimizedModule(
        CallDispatcher([package], takes=InputCapabilities(parameters=parameters_of(model.forward)))
    )
    tensors, boxed = tensors_of(case), package._loader.boxed_run
    found = [compared(name, lambda: boxed(list(tensors)), lambda: optimized(*case.args))]
    if name == "an image":
        other = case.args[0].to(memory_format=torch.channels_last)
        name = "the same, channels-last"
        found.append(compared(name, lambda: boxed(list(tensors)), lambda: optimized(other)))
    return found


def compared(name: str, compiled: Callable[[], Any], model: Callable[[], Any]) -> Row:
    with torch.inference_mode():
        pairs = [(seconds(compiled, CALLS), seconds(model, CALLS)) for _ in range(ROUNDS)]
    before, after = (1e6 * statistics.median(column) for column in zip(*pairs, strict=True))
    between = 1e6 * statistics.median(b - a for a, b in pairs)
    return {"call": name, "compiled": before, "model": after, "between": between}


if __name__ == "__main__":
    main()
