"""The speech model that comes with the package. No torch here."""

from __future__ import annotations

from pathlib import Path

from torchwright.core.errors import ModelError

FOLDER = Path(__file__).parents[2] / "workloads" / "bundled" / "speech"
NOTICE = "the bundled speech model knows 194 English words and the letters; --model names one that knows more"


def bundled() -> Path:
    """Its folder; raises `ModelError` where the package was built without it."""
    if not (FOLDER / "model.safetensors").is_file():
        raise ModelError(
            "this copy of Torchwright has no speech model in it",
            found=f"no model.safetensors in {FOLDER}",
            next="name one with --model, or make it: scripts/train_speech.py",
        )
    return FOLDER
