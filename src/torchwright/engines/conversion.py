"""What an engine made of a model in one trial, for the next that asks the same model of it and runs it in another way.

A trial's process ends before the next begins; what it leaves lies in a folder of the search's, removed with it.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from torchwright.engines.spec import CallSpec
from torchwright.json_file import read_json, typed

CONTENTS = "conversion.json"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What lies in such a folder beside the engine's files."""

    calls: tuple[CallSpec, ...]
    seconds: float
    """That the conversion took."""


def leave(kept: Path, folder: Path, conversion: Conversion) -> None:
    """Let other trials find the files of `folder` in `kept`, which takes the place of what lay there."""
    beside = kept.with_name(f"{kept.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    kept.parent.mkdir(exist_ok=True)
    _linked(folder, beside)
    (beside / CONTENTS).write_text(json.dumps(asdict(conversion)))
    shutil.rmtree(kept, ignore_errors=True)
    beside.rename(kept)


def take(kept: Path, folder: Path) -> Conversion:
    """Have in `folder`, too, what an earlier trial left in `kept`. A file that is to change must be replaced."""
    _linked(kept, folder)
    (folder / CONTENTS).unlink()
    return typed(read_json(kept / CONTENTS), Conversion, str(kept))


def _linked(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """The same file by another name: weights lie on the disk once."""
    try:
        os.link(source, target)
    except OSError:  # no links on this file system
        shutil.copy2(source, target)
