"""What a run file's `kind` chooses: the code behind each verb (no torch until it is asked for)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchwright.errors import TorchwrightError, unknown
from torchwright.train.run.config import read_toml

DEFAULT = "language-model"
KINDS: dict[str, dict[str, str]] = {
    DEFAULT: {
        "train": "torchwright.train.run.loop:train",
        "prove": "torchwright.train.prove.proof:prove_file",
    },
    "recommender": {
        "train": "torchwright.train.recommender.trainer:train_recommender",
    },
}
"""Kind → verb → module:function, whose first argument is the run file."""


class KindError(TorchwrightError):
    """A verb that runs of a kind do not have."""


def kind_of(path: Path) -> str:
    """A run file's kind. Raises `RunError` for no TOML file, `UnknownName` for a kind that is none."""
    kind = read_toml(path).get("kind", DEFAULT)
    if kind not in KINDS:
        raise unknown(f"kind of {path}", str(kind), KINDS)
    return kind


def verb(path: Path, name: str) -> Callable[..., Any]:
    """What `torchwright NAME` does with a run file. Raises as `kind_of`, and `KindError`."""
    kind = kind_of(path)
    if name not in KINDS[kind]:
        others = ", ".join(other for other, verbs in KINDS.items() if name in verbs)
        raise KindError(f"`{name}` has nothing to do with a run of kind {kind}", allowed=others)
    module, _, function = KINDS[kind][name].partition(":")
    return getattr(importlib.import_module(module), function)
