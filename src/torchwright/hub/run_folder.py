"""The folder of a training run, where a model is wanted: what it trained. No torch here."""

from __future__ import annotations

from pathlib import Path

from torchwright.core.errors import ModelError

SOURCE, MODEL, ADAPTER = "source", "model", "adapter"
"""Subfolders of a run: its initial configuration and tokenizer, the trained model, the trained adapters."""


def trained_model(path: Path) -> Path:
    """The model that a run has written, for the run's folder; any other path as it is.

    Raises `ModelError` for a run that has written none.
    """
    if (path / "config.json").is_file() or not (path / SOURCE / "config.json").is_file():
        return path
    if (path / MODEL).is_dir():
        return path / MODEL
    if (path / ADAPTER).is_dir():
        raise ModelError(
            f"{path} is a run that trained adapters, and no model was made of them",
            next=f"name the model that they were trained on and `--adapter {path / ADAPTER}`, or give the run's "
            "command again with --merge",
        )
    raise ModelError(f"{path} is a run that has not reached its end", next="go on with it by its own command")
