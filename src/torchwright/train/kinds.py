"""Dispatch on a run file's `kind`: the code behind each verb (torch is imported on demand)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torchwright.core.errors import TorchwrightError, unknown
from torchwright.train.media.config import media_kind
from torchwright.train.run.config.run_file import read_toml

DEFAULT = "language-model"
KINDS: dict[str, dict[str, str]] = {
    DEFAULT: {
        "train": "torchwright.train.run.loop.train:train",
        "prove": "torchwright.train.prove.proof:prove_file",
        "prove_render": "torchwright.train.prove.render",
        "read": "torchwright.train.run.config.read:read_run",
        "words": "torchwright.train.run.words:from_words",
        "data check": "torchwright.train.run.observe.survey:survey",
        "data show": "torchwright.train.run.observe.sample:sample",
        "data pack": "torchwright.train.run.observe.survey:pack",
    },
    "draft": {
        "train": "torchwright.train.draft.trainer:train_draft",
        "read": "torchwright.train.draft.config:read_draft",
        "words": "torchwright.train.draft.quick:from_words",
    },
    "recommender": {
        "train": "torchwright.train.recommender.trainer:train_recommender",
        "prove": "torchwright.train.recommender.prove:prove_file",
        "prove_render": "torchwright.train.recommender.prove_render",
        "read": "torchwright.train.recommender.config:read_recommender",
        "data check": "torchwright.train.recommender.survey:survey",
        "plan-layout": "torchwright.train.recommender.planned:plan_file",
    },
    "image-classification": {
        "train": "torchwright.train.media.trainer:train_images",
        "read": "torchwright.train.media.config:read_images",
        "words": "torchwright.train.media.quick:from_words",
        "files": "torchwright.train.media.quick:files_run",
        "data check": "torchwright.train.media.survey:survey",
        "data show": "torchwright.train.media.survey:sample",
    },
    "speech": {
        "train": "torchwright.train.media.trainer:train_speech",
        "read": "torchwright.train.media.config:read_speech",
        "words": "torchwright.train.media.quick:from_words",
        "files": "torchwright.train.media.quick:files_run",
        "data check": "torchwright.train.media.survey:survey",
        "data show": "torchwright.train.media.survey:sample",
    },
    "vision-language": {
        "train": "torchwright.train.media.trainer:train_vision",
        "read": "torchwright.train.media.config:read_vision",
        "words": "torchwright.train.media.quick:from_words",
        "files": "torchwright.train.media.quick:files_run",
        "data check": "torchwright.train.media.survey:survey",
        "data show": "torchwright.train.media.survey:sample",
    },
}
"""Kind → verb → what it runs: a function as module:function, or a module."""


class KindError(TorchwrightError):
    """A verb that runs of a kind do not have."""


def kind_of(path: Path) -> str:
    """Return a run file's kind. Raises `RunError` if it is not a TOML file, `UnknownName` for an unknown kind."""
    kind = read_toml(path).get("kind", DEFAULT)
    if kind not in KINDS:
        raise unknown(f"kind of {path}", str(kind), KINDS)
    return kind


def kind_of_model(folder: Path) -> str:
    """The kind of run that trains a folder's model, as its configuration names it."""
    return media_kind(folder) or DEFAULT


def verb(kind: str, name: str) -> Any:
    """Return the function that `torchwright NAME` runs for a kind. Raises `KindError`."""
    if name not in KINDS[kind]:
        others = ", ".join(other for other, verbs in KINDS.items() if name in verbs)
        raise KindError(f"`{name}` has nothing to do with a run of kind {kind}", allowed=others)
    module, _, function = KINDS[kind][name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, function) if function else found
