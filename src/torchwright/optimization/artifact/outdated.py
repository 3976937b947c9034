"""Faults of artifacts that an older version made, which only optimizing again mends."""

from __future__ import annotations

from pathlib import Path

from torchwright.core.records import Recipe
from torchwright.optimization.artifact.folder import Manifest
from torchwright.optimization.engines.dispatch.spec import NumberDomain

ONE_SCALE = b"quantized_decomposed.choose_qparams"
"""The operator of the older `int8_dynamic`: one activation scale for all rows of a call."""


def outdated(path: Path, recipe: Recipe, manifest: Manifest, domain: NumberDomain) -> str | None:
    """Return what an artifact computes wrongly and what to do, or None for one without a known fault.

    `domain` is that of its engine.
    """
    steps = {step.name for step in recipe.steps}
    faults: list[str] = []
    if "int8_dynamic" in steps and _holds(path / "programs.json", ONE_SCALE):
        faults.append("rows of a batch influence each other, since int8_dynamic has one scale per call")
    narrow = "int8_static" in steps or domain != NumberDomain()
    if narrow and manifest.calls and not any(spec.guards for spec in manifest.calls):
        faults.append(
            "calls are not checked for numbers that its engine computes differently, such as NaN or 64-bit integers"
        )
    if not faults:
        return None
    return f"made by an older version: {'; '.join(faults)}; optimize the model again"


def _holds(file: Path, text: bytes) -> bool:
    return file.is_file() and text in file.read_bytes()
