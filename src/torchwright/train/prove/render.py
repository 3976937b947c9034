"""A proof as lines for people and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torchwright.train.prove.proof import LayoutProof, Proof

WIDTH = 36


def line(part: LayoutProof) -> Text:
    """One layout's result: its largest relative error in each column."""
    text = Text("  ok     " if part.passed else "  wrong  ", "green" if part.passed else "bold red")
    text.append(f"{_name(part):{WIDTH}}", "default")
    for column, error in part.errors.items():
        text.append(f"  {column} {error:.0e}", "default")
    return text.append(f"  {part.seconds:.1f} s", "dim")


def verdict(proof: Proof) -> RenderableType:
    """Return the proved and the unproved parts, or the fault."""
    config, asked = proof.config, _asked(proof)
    small = (
        f"{config.layers} layers of {config.architecture}, {config.heads} query and {config.kv_heads} key-value heads"
        + (f", {config.experts.count} experts" if config.experts else "")
    )
    if proof.divergence is None:
        compared = Text(f"loss, gradients, gradient norm and parameters over three steps; {small}", "dim")
        if not proof.extrapolated:
            return Group(Text(f"{asked} computes what one process computes", "bold green"), compared)
        parts = "; ".join(dict.fromkeys(str(part.layout) for part in proof.parts))
        return Group(
            Text(f"parts of {asked} compute what one process computes: {parts}", "bold green"),
            Text(f"not run, and taken to follow: {'; '.join(proof.extrapolated)}", "yellow"),
            Text(f"the whole takes --processes {proof.layout.processes}", "yellow"),
            compared,
        )
    found = proof.divergence
    return Group(
        Text(f"{asked} computes something else than one process", "bold red"),
        Padding(
            Text(
                f"first difference: {found.tensor} ({found.dtype}, relative error {found.error:.1e})\n"
                f"axis: {found.axis}\nlikely cause: {found}"
            ),
            (0, 0, 0, 2),
        ),
        Text(small, "dim"),
    )


def _name(part: LayoutProof) -> str:
    return f"{part.layout}{' compiled' if part.compiled else ''}"


def _asked(proof: Proof) -> str:
    """The layout with what a run file adds to it."""
    run = proof.run
    more = [f"recompute={run.recompute}"] if run.recompute != "none" else []
    more += ["compile"] if run.compile else []
    more += [f"micro_batches={run.micro_batches}"] if run.micro_batches > 1 else []
    more += [run.pipeline.schedule] if run.parallel.pp > 1 else []
    more += [run.precision] if run.precision != "fp32" else []
    more += [run.qat.scheme] if run.qat else []
    more += [run.optimizer.name] if run.optimizer.name != "adamw" else []
    return ", ".join([str(proof.layout), *more])


def plain(proof: Proof) -> dict[str, Any]:
    """Return the proof as JSON takes it; an error that is not a number is null."""

    def number(value: float | None) -> float | None:
        return value if value is not None and abs(value) < float("inf") else None

    found = proof.divergence
    return {
        "model": proof.model,
        "layout": asdict(proof.layout),
        "passed": proof.passed,
        "runs": [
            {
                "layout": asdict(part.layout),
                "processes": part.layout.processes,
                "compiled": part.compiled,
                "passed": part.passed,
                "errors": {column: number(error) for column, error in part.errors.items()},
                "worst": part.worst,
                "seconds": round(part.seconds, 2),
            }
            for part in proof.parts
        ],
        "divergence": None
        if found is None
        else asdict(found)
        | {"error": number(found.error), "ratio": number(found.ratio), "summary": str(found)},
        "extrapolated": list(proof.extrapolated),
    }
