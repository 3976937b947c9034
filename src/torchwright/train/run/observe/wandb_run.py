"""A run's figures for Weights & Biases: nothing is written or sent unless the run file has a `[wandb]`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Wandb


def check_wandb(asked: Wandb | None) -> None:
    """Raise `RunError` where the run asks for what is not installed."""
    if asked is not None and find_spec("wandb") is None:
        raise RunError(
            "[wandb] needs the package wandb",
            next="`pip install wandb`, or leave the section out of the run file",
        )


def wandb_run(folder: Path, asked: Wandb, facts: dict[str, Any]) -> Any:
    """Begin a run of RUN/wandb; each start of a run folder is one, and the folder is their group."""
    wandb: Any = import_module("wandb")
    own = folder.resolve().name
    settings = wandb.Settings(mode=asked.mode, console="off", silent=True, disable_git=True, save_code=False)
    return wandb.init(
        project=asked.project, group=own, dir=str(folder), config=facts.get("run"), settings=settings
    )
