"""A run over pictures or sounds made from a model and its data: `torchwright train --model DIR --data FOLDER`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchwright.hub.folder import resolve
from torchwright.train.data.rows import is_dataset
from torchwright.train.media.config import IMAGES, ImageRun, SpeechRun, media_kind, parse_media
from torchwright.train.media.images import list_pictures
from torchwright.train.media.sounds import list_spoken
from torchwright.train.media.trainer import train_media
from torchwright.train.run.data_section import RunError
from torchwright.train.run.quick import to_toml

BATCH = 16
"""Samples of a step, where there are enough."""
STEPS = 50
"""Steps of an epoch at least, while a step has more than one sample."""
EPOCHS = 3
RATES = {IMAGES: 1e-4, "speech": 2e-5}
"""Peak learning rates."""
HELD_OUT = ("validation", "valid", "val", "test")
"""Beside `train` in a folder: what is held out, the first of these that is there."""


def from_words(
    model: str, data: Sequence[str], *, world: int, **options: Any
) -> tuple[str, Callable[..., Any]]:
    """The run file that these words make, and what trains by it into a folder. Raises `RunError`, `DataError`."""
    for name, asked in options.items():
        if asked not in (None, False):
            raise RunError(f"--{name} is for language models", found=model, next=f"leave --{name} out")
    run = files_run(model, data, Path())
    listed = list_pictures(run, Path()) if isinstance(run, ImageRun) else list_spoken(run, Path())
    count = len(listed.train.items)
    each = 1
    while world * each * 2 <= BATCH and world * each * 2 * STEPS <= count:
        each *= 2
    batch = world * each
    samples = max(1, round(EPOCHS * count / batch)) * batch
    values: dict[str, Any] = {
        "kind": run.kind,
        "out": ".",
        "samples": samples,
        "batch": batch,
        "log_every": max(1, min(10, samples // batch // 10)),
        "model": {"folder": run.model.folder},
        "data": run.data.model_dump(mode="json", include={"train", "validation"}),
        "optimizer": {"lr": RATES[run.kind]},
        "schedule": {"warmup_samples": samples // 10},
        "checkpoint": {"every_steps": max(10, min(200, samples // batch // 10))},
    }
    if world > 1:
        values["layout"] = {"dp_shard": world}
    made = parse_media(values, "the run that these words make")
    text = to_toml(values) + "\n"
    return text, partial(train_media, made, text=text)


def files_run(
    model: str, data: Sequence[str], folder: Path, fields: dict[str, Any] | None = None
) -> ImageRun | SpeechRun:
    """A run over files, by names that start from `folder`, to look at; it has no `out`."""
    source = resolve(model).resolve()
    train, validation = list[str](), list[str]()
    for name in data:
        path = (folder / name).resolve()
        if path.is_dir() and not is_dataset(path):
            inner, held = _divided(path)
            train += inner
            validation += held
        else:
            train.append(str(path))
    values: dict[str, Any] = {
        "kind": media_kind(source),
        "out": "",
        "samples": 1,
        "batch": 1,
        "model": {"folder": str(source)},
        "data": {"train": train, "validation": validation, **(fields or {})},
    }
    return parse_media(values, "the command line")


def _divided(folder: Path) -> tuple[list[str], list[str]]:
    """A folder as it is, or its `train` and what is held out beside it; of manifests each file by itself."""
    if not (folder / "train").is_dir():
        tables = sorted(str(path) for path in folder.glob("*.jsonl"))
        return tables or [str(folder)], []
    held = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None)
    found = [_divided(part)[0] for part in (folder / "train", held) if part is not None]
    return found[0], found[1] if len(found) > 1 else []
