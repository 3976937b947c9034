"""A proof as lines for people and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torchwright.train.prove.proof import Proof, Run, used

WIDTH = 36


def line(run: Run) -> Text:
    """One layout's result: its largest relative error in each dtype."""
    text = Text("  ok     " if run.passed else "  wrong  ", "green" if run.passed else "bold red")
    text.append(f"{run.layout!s:{WIDTH}}", "default")
    for dtype, error in run.errors.items():
        text.append(f"  {dtype} {error:.0e}", "default")
    return text.append(f"  {run.seconds:.1f} s", "dim")


def verdict(proof: Proof) -> RenderableType:
    """What was proved, or what is wrong."""
    config = proof.config
    small = (
        f"{config.layers} layers of {config.architecture}, {config.heads} query and {config.kv_heads} key-value heads"
        + (f", {config.experts.count} experts" if config.experts else "")
    )
    if proof.divergence is None:
        parts: list[RenderableType] = [
            Text(f"{proof.layout} computes what one process computes", "bold green"),
            Text(f"loss, gradients, gradient norm and parameters over three steps; {small}", "dim"),
        ]
        if proof.not_run:
            more = 2 ** min(len(used(proof.layout)), 4)
            parts.append(Text(f"not run together: {'; '.join(proof.not_run)} (--processes {more})", "yellow"))
        return Group(*parts)
    found = proof.divergence
    return Group(
        Text(f"{proof.layout} computes something else than one process", "bold red"),
        Padding(
            Text(
                f"first difference: {found.tensor} ({found.dtype}, relative error {found.error:.1e})\n"
                f"axis: {found.axis}\nlikely cause: {found}"
            ),
            (0, 0, 0, 2),
        ),
        Text(small, "dim"),
    )


def plain(proof: Proof) -> dict[str, Any]:
    """The proof as JSON takes it; an error that is no number is null."""

    def number(value: float | None) -> float | None:
        return value if value is not None and abs(value) < float("inf") else None

    found = proof.divergence
    return {
        "model": proof.model,
        "layout": asdict(proof.layout),
        "passed": proof.passed,
        "runs": [
            {
                "layout": asdict(run.layout),
                "processes": run.layout.processes,
                "passed": run.passed,
                "errors": {dtype: number(error) for dtype, error in run.errors.items()},
                "worst": run.worst,
                "seconds": round(run.seconds, 2),
            }
            for run in proof.runs
        ],
        "divergence": None
        if found is None
        else asdict(found)
        | {"error": number(found.error), "ratio": number(found.ratio), "summary": str(found)},
        "not_run": list(proof.not_run),
    }
