"""A run over pictures or sounds made from a model and its data: `torchwright train --model DIR --data FOLDER`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchwright.core.rows import is_dataset
from torchwright.hub.folder import resolve
from torchwright.train.data.hold_out import MOST
from torchwright.train.media.chats import list_conversations
from torchwright.train.media.config import (
    IMAGES,
    VISION,
    AnyRun,
    ImageRun,
    MediaLora,
    VisionRun,
    media_kind,
    parse_media,
)
from torchwright.train.media.images import list_pictures
from torchwright.train.media.listing import METADATA
from torchwright.train.media.sounds import list_spoken
from torchwright.train.media.trainer import train_media
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run_file import with_settings
from torchwright.train.run.quick import (
    HOLD_OUT,
    choose_precision,
    own_reasons,
    power_of_two,
    read_fields,
    to_toml,
)

BATCH = 16
"""Samples of a step, where there are enough."""
FEW_STEPS = 6
"""Steps of an epoch at least, while a step has more than one sample."""
STEPS, EPOCHS, MOST_EPOCHS = 60, 3, 10
"""Steps of a run at least, and how often data are read at least and at the most."""
RATES = {IMAGES: 1e-4, "speech": 2e-5, VISION: 2e-5}
"""Peak learning rates."""
LORA_FASTER = 10
"""Adapters begin at zero and take larger steps than whole weights (as for text)."""
HELD_OUT = ("validation", "valid", "val", "test")
"""Names of the held-out folder next to `train`; the first that exists is used."""


@contextlib.contextmanager
def from_words(
    model: str,
    data: Sequence[str],
    *,
    world: int,
    out: Path,
    fresh: bool = False,
    epochs: float | None = None,
    lora: str | None = None,
    no_validation: bool = False,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Generator[tuple[str, Callable[..., Any]]]:
    """The run file that these words make, and what trains by it into `out`. Raises `RunError`, `DataError`."""
    if media_kind(resolve(model).resolve()) == VISION and lora is None:
        raise RunError(
            f"{model} takes pictures: adapters of its language model are trained", next="add --lora"
        )
    for name, asked in options.items():
        if asked not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise RunError(f"{option} is for language models", found=model, next=f"leave {option} out")
    asked = dict(settings or {})
    fields = {name.removeprefix("data."): asked[name] for name in asked if name.startswith("data.")}
    run = files_run(model, data, Path(), fields)
    if not no_validation and not run.data.validates:
        fields["hold_out"] = HOLD_OUT
        run = files_run(model, data, Path(), fields)
    listed = _listed(run)
    count = len(listed.train.items)
    each = power_of_two(max(1, min(BATCH // world, count // FEW_STEPS // world)))
    batch = world * each
    # Few samples are read more often: a new head needs some steps to find its classes.
    times = epochs or min(MOST_EPOCHS, max(EPOCHS, -(-STEPS * batch // max(1, count))))
    samples = max(1, round(times * count / batch)) * batch
    values: dict[str, Any] = {
        "kind": run.kind,
        "out": ".",
        "samples": samples,
        "batch": batch,
        "log_every": max(1, min(10, samples // batch // 10)),
        "model": {"folder": run.model.folder},
        "data": {**run.data.model_dump(mode="json", include={"train", "validation"}), **fields},
        "optimizer": {"lr": RATES[run.kind] * (1 if lora is None else LORA_FASTER)},
        "schedule": {"warmup_samples": samples // 10},
        "checkpoint": {"every_steps": max(10, min(200, samples // batch // 10))},
    }
    if lora is not None:
        values["lora"] = {"r": MediaLora().r} | read_fields("--lora", lora, MediaLora)
    if world > 1:
        values["layout"] = {"dp_shard": world}
    reasons = {
        "batch": f"{count:,} samples, {FEW_STEPS} steps an epoch at least",
        "samples": f"{samples // batch:,} steps; each of {count:,} samples is read {samples / count:.1f} times",
    }
    held = len(listed.validation.items)
    if 0 < held <= MOST:  # of more the last evaluation alone takes its time
        values["evaluation"] = {"every_steps": values["checkpoint"]["every_steps"]}
        reasons["evaluation.every_steps"] = "with each checkpoint, so that the best one is kept"
        if run.data.hold_out is not None:
            reasons["data.hold_out"] = (
                f"{held:,} samples are held out for validation; --no-validation holds nothing out"
            )
    elif not held and values["data"].pop("hold_out", None):
        reasons["data.train"] = "too few to hold some out for validation"
    choose_precision(values, reasons)
    values = with_settings(values, asked)
    made = parse_media(values, "the run that these words make")
    text = to_toml(values, own_reasons(reasons, asked)) + "\n"
    yield text, partial(train_media, made, out, text=text, fresh=fresh)


def _listed(run: AnyRun) -> Any:
    if isinstance(run, ImageRun):
        return list_pictures(run, Path())
    return list_conversations(run, Path()) if isinstance(run, VisionRun) else list_spoken(run, Path())


def files_run(model: str, data: Sequence[str], folder: Path, fields: dict[str, Any] | None = None) -> AnyRun:
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
    if values["kind"] == VISION:
        values["lora"] = {}
    return parse_media(values, "the command line")


def _divided(folder: Path) -> tuple[list[str], list[str]]:
    """Return the training and held-out files: a folder, or its `train` and held-out folders, or single manifests."""
    if not (folder / "train").is_dir():
        if any((folder / name).is_file() for name in METADATA):
            return [str(folder)], []
        tables = sorted(str(path) for path in folder.glob("*.jsonl"))
        return tables or [str(folder)], []
    held = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None)
    found = [_divided(part)[0] for part in (folder / "train", held) if part is not None]
    return found[0], found[1] if len(found) > 1 else []
