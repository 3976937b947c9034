"""Converted models of one trial, kept for the next trial that converts the same model and runs it in another way.

A trial's process ends before the next begins; what it leaves lies in a folder of the search's, removed with it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchwright.core.json_file import read_json, typed
from torchwright.optimization.engines.dispatch.spec import CallSpec

if TYPE_CHECKING:
    from torchwright.optimization.techniques.base import Target

CONTENTS = "conversion.json"
ROOM = 4
"""Times the size of what was made must be free on the disk, or it is not left: a search makes several such."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The record in such a folder, next to the engine's files."""

    calls: tuple[CallSpec, ...]
    seconds: float
    """That the conversion took."""


def shared(target: Target, folder: Path, make: Callable[[], tuple[CallSpec, ...]]) -> tuple[CallSpec, ...]:
    """Run `make` in the empty `folder` and keep the result for other trials, or reuse the result of another trial."""
    kept = target.conversion
    if kept is not None and kept.is_dir():
        conversion = take(kept, folder)
        target.spared = conversion.seconds
        return conversion.calls
    start = time.perf_counter()
    conversion = Conversion(calls=make(), seconds=time.perf_counter() - start)
    target.converted = conversion.seconds
    if kept is not None and _is_room_for(folder):
        leave(kept, folder, conversion)
    return conversion.calls


def leave(kept: Path, folder: Path, conversion: Conversion) -> None:
    """Let other trials find the files of `folder` in `kept`, which takes the place of what lay there."""
    beside = kept.with_name(f"{kept.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    kept.parent.mkdir(exist_ok=True)
    _linked(folder, beside)
    (beside / CONTENTS).write_text(json.dumps(asdict(conversion)), encoding="utf-8")
    shutil.rmtree(kept, ignore_errors=True)
    beside.rename(kept)


def take(kept: Path, folder: Path) -> Conversion:
    """Have in `folder`, too, what an earlier trial left in `kept`. A file that is to change must be replaced."""
    _linked(kept, folder)
    (folder / CONTENTS).unlink()
    return typed(read_json(kept / CONTENTS), Conversion, str(kept))


def _is_room_for(folder: Path) -> bool:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return ROOM * size <= shutil.disk_usage(folder).free


def _linked(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """The same file by another name: weights lie on the disk once."""
    try:
        os.link(source, target)
    except OSError:  # no links on this file system
        shutil.copy2(source, target)
