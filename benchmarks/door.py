"""What stands between a caller and compiled code, in microseconds a call.

    python benchmarks/door.py [--json FILE]

A package is compiled ahead of time for each form of call; `model(...)`, as a user makes it, is timed in turn with the
package's own entry point given a list of tensors. The difference is what `nn.Module` and the door cost together. A
channels-last copy of the input shows what bringing another layout into the compiled one costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import turns
from torchwright.optimization.engines.call import parameters_of
from torchwright.optimization.engines.door import Door
from torchwright.optimization.engines.module import OptimizedModule
from torchwright.optimization.engines.package import Package
from torchwright.optimization.engines.packaging import described
from torchwright.optimization.engines.program import compile_program, export_one
from torchwright.optimization.engines.spec import Takes
from torchwright.optimization.engines.takes import tensors_of
from torchwright.workloads.base import Case

ROUNDS, CALLS = 41, 2000


class Scaled(nn.Module):
    """As little work as compiled code can do on one input or several."""

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return x * 2 + sum(more)


class Named(nn.Module):
    """The same for a dict in and a dict out."""

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
    parser = argparse.ArgumentParser(description="What stands between a caller and compiled code.")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    options = parser.parse_args()
    turns.print_machine()
    print("| call | compiled code, µs | the model, µs | between them, µs |")
    print("|---|---|---|---|", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, (model, args)) in enumerate(forms().items()):
            rows += timed(name, model, Case(name="forward", args=args), Path(folder) / f"{index}.pt2")
    for row in rows:
        print(f"| {row['call']} | {row['compiled']:.2f} | {row['model']:.2f} | {row['between']:.2f} |")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2))


def timed(name: str, model: nn.Module, case: Case, path: Path) -> list[dict[str, Any]]:
    program = export_one(model.eval(), case, None)
    spec = described("forward", program)
    compile_program(program, path, {"freezing": True})
    package = Package(path, spec)
    optimized = OptimizedModule(Door([package], takes=Takes(parameters=parameters_of(model.forward))))
    tensors, run = tensors_of(case), package._loader.boxed_run
    rows = [row(name, lambda: run(list(tensors)), lambda: optimized(*case.args))]
    if name == "an image":
        other = case.args[0].to(memory_format=torch.channels_last)
        rows.append(row("the same, channels-last", lambda: run(list(tensors)), lambda: optimized(other)))
    return rows


def row(name: str, compiled: Callable[[], Any], model: Callable[[], Any]) -> dict[str, Any]:
    with torch.inference_mode():
        pairs = [(seconds(compiled), seconds(model)) for _ in range(ROUNDS)]
    before, after = (1e6 * statistics.median(column) for column in zip(*pairs, strict=True))
    between = 1e6 * statistics.median(b - a for a, b in pairs)
    return {"call": name, "compiled": before, "model": after, "between": between}


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begun) / CALLS


if __name__ == "__main__":
    main()
