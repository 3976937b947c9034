"""A small artifact, and what a forger can do to a copy of it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchwright as tw
from in_process import TRIED, trials_in_process
from torchwright.core.paths import file_digest
from torchwright.optimization.artifact import folder as artifact

INPUT = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8)).eval()


def made(tmp: Path, model: nn.Module, techniques: list[str]) -> Path:
    """An artifact of a search whose every comparison ends at twice the speed."""
    with pytest.MonkeyPatch.context() as patch:
        names = [technique.partition(":")[0] for technique in techniques]
        trials_in_process(patch, 2.0, tried={*TRIED, *names}, cache=tmp / "cache")
        result = tw.optimize(model, INPUT, techniques=techniques, max_drop=0.05, time_budget=600)
        assert [step.name for step in result.recipe.steps] == names
        with warnings.catch_warnings(action="ignore"):  # of those that hold no model
            return result.save(tmp / "artifact")


def copied(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to / "copy"))


def seal(folder: Path) -> None:
    """What a forger can do: make all checksums right. The signature they cannot."""
    manifest = json.loads((folder / artifact.MANIFEST).read_text())
    names = artifact._names(folder)  # pyright: ignore[reportPrivateUsage]
    manifest["files"] = {name: file_digest(folder / name) for name in names}
    (folder / artifact.MANIFEST).write_text(json.dumps(manifest))


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    if file.name != artifact.MANIFEST:
        seal(file.parent)
