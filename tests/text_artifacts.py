"""Artifacts of models that read text, as `optimize` leaves those that nothing made faster; written without a search."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from factories import make_recipe
from torchwright.optimization.artifact import folder as artifact


def eager_artifact(workload: Any, out: Path) -> Path:
    """The artifact of an encoder or a classifier, in float32."""
    with artifact.writing(out) as temporary:
        for name, file in workload.files(weights=True).items():
            to = temporary / artifact.MODEL / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to)
        recipe = make_recipe(engine="eager", workload=workload.describe(), steps=())
        artifact.finish(temporary, recipe, {"engine": "eager", "dtype": "float32"})
    return out
