"""The result of `tw.optimize`."""

from __future__ import annotations

import shutil
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

from torchwright.core.records import Interval, Recipe, StepResult
from torchwright.optimization.artifact import folder as artifact
from torchwright.report import terminal, view


class Result:
    """A search's result: the artifact it wrote, its recipe, and the model ready to call.

    `result.model` is called like the original; a language model has `result.model.generate(...)`, too.
    `result.speedup`, `result.steps` (one `StepResult` for each step that was tried or refused),
    `print(result)`, `result.save(folder)`.
    """

    def __init__(
        self, path: Path, recipe: Recipe, *, original: Any = None, on_new_shape: Any = "run"
    ) -> None:
        self.path, self.recipe = path, recipe
        self._original, self._on_new_shape = original, on_new_shape

    @cached_property
    def model(self) -> Any:
        """The optimized model; loaded on first use. Calls that it cannot take itself the original answers."""
        from torchwright.optimization.artifact.load import load

        manifest = artifact.open_artifact(self.path)[1]
        own = self._original if manifest.measured_on_module else None
        loaded = load(
            self.path, model=own, original=self._original, trust=True, on_new_shape=self._on_new_shape
        )
        for notice in loaded.notices:
            warnings.warn(notice, UserWarning, stacklevel=3)
        return loaded.model

    @property
    def speedup(self) -> Interval:
        """The speed-up over the original, with its 95% interval."""
        return self.recipe.speedup

    @property
    def verdict(self) -> str:
        """`faster`, `original` where nothing pays, or `inconclusive` where the time was too short to say."""
        return view.verdict(self.recipe)

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """Every step that was tried or refused: its own effect, whether it was kept, and why."""
        return self.recipe.rungs

    def save(self, folder: str | Path) -> Path:
        """Copy the artifact to `folder`, whole or not at all.

        Raises `ArtifactError` when `folder` exists and is not an artifact.
        """
        folder = Path(folder)
        with artifact.writing(folder) as temporary:
            shutil.copytree(self.path, temporary, dirs_exist_ok=True)
        if not artifact.open_artifact(folder)[1].self_contained:
            needed = view.needs_module(self.recipe, str(folder))
            warnings.warn(needed or "the artifact holds no model: tw.load(DIR, model=…)", stacklevel=2)
        return folder

    def __str__(self) -> str:
        return terminal.plain(self.recipe)

    def __repr__(self) -> str:
        return f"Result(speedup={self.speedup}, steps={', '.join(map(str, self.recipe.steps)) or 'none'})"
