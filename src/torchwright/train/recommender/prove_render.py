"""A recommender's proof as lines for people and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from torchwright.train.recommender.prove import TOLERANCE, Proof, TensorComparison

WIDTH = 64


def line(part: TensorComparison) -> Text:
    """One comparison's result."""
    text = Text("  ok     " if part.passed else "  wrong  ", "green" if part.passed else "bold red")
    name = (
        f"{part.processes} processes in {part.groups} groups, {part.optimizer}, sync every {part.sync_every}"
    )
    text.append(f"{name:{WIDTH}}", "default")
    text.append(f"  {part.error:.0e} from {part.against}", "default")
    return text.append(f"  {part.seconds:.1f} s", "dim")


def verdict(proof: Proof) -> RenderableType:
    """Return the proved and the unproved parts, or the fault."""
    compared = Text(
        f"losses, dense layers and tables after each of four steps in float64, within {TOLERANCE:.0e} of the largest",
        "dim",
    )
    if proof.passed:
        lines = [Text("several processes compute what one process computes", "bold green")]
        if proof.extrapolated:
            lines.append(Text(f"not run, and taken to follow: {'; '.join(proof.extrapolated)}", "yellow"))
        return Group(*lines, compared)
    first = next(part for part in proof.parts if not part.passed)
    return Group(
        Text("several processes compute something else than one process", "bold red"),
        Text(f"  first difference: {first.first} (against {first.against})\n  likely cause: {proof.likely}"),
        compared,
    )


def plain(proof: Proof) -> dict[str, Any]:
    """Return the proof as JSON takes it; an error that is not a number is null."""
    parts = [
        asdict(part) | {"passed": part.passed, "error": part.error if part.error < float("inf") else None}
        for part in proof.parts
    ]
    return {
        "run": proof.run,
        "passed": proof.passed,
        "runs": parts,
        "likely": proof.likely,
        "extrapolated": list(proof.extrapolated),
    }
