"""The description of a checkpoint, checkpoint.json, and the checkpoints that are whole (no torch)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwright.core.errors import TorchwrightError
from torchwright.core.json_file import LARGEST, decode_json
from torchwright.core.regular_file import read_regular

FOLDER, DESCRIPTION = "checkpoints", "checkpoint.json"
FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")
SHARD = re.compile(r"[\w.-]{1,200}")
"""Names of the files that checkpoint.json lists."""


class CheckpointError(TorchwrightError):
    """A checkpoint that cannot be written, or that is missing, damaged or of another run."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """The content of checkpoint.json."""

    step: int
    """Steps that the state contains."""
    tokens: int
    run: dict[str, Any]
    """The run file's values."""
    facts: dict[str, Any]
    """Versions, and facts that a run needs to continue."""
    files: dict[str, str] = field(default_factory=dict)
    """File → SHA-256."""


def whole(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, the newest last."""
    found = [
        path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and (path / DESCRIPTION).is_file()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def describe(folder: Path) -> Described:
    """Read a checkpoint's description. Raises `CheckpointError` if it cannot be read."""
    path = folder / DESCRIPTION
    try:
        data = decode_json(read_regular(path, LARGEST))
        if data.pop("format") != FORMAT:
            raise ValueError(f"format {data}")
        described = Described(**data)
        if fault := _malformed(described):
            raise ValueError(fault)
        return described
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, DESCRIPTION, str(error)) from error


def _malformed(described: Described) -> str | None:
    """Return the field of an untrusted description that has a wrong type; None if all are right."""
    if type(described.step) is not int or type(described.tokens) is not int:
        return f"step {described.step!a:.40}, tokens {described.tokens!a:.40}"
    kinds = (("run", described.run), ("facts", described.facts), ("files", described.files))
    if wrong := [name for name, value in kinds if not isinstance(value, dict)]:
        return f"{wrong[0]} is not an object"
    names = (
        name
        for name, digest in described.files.items()
        if not SHARD.fullmatch(name) or type(digest) is not str
    )
    return next((f"a file {name!a:.40}" for name in names), None)


def damaged(folder: Path, name: str, reason: str) -> CheckpointError:
    """Return the error for a checkpoint whose file `name` cannot be used; it names the checkpoint before."""
    others = [path for path in whole(folder.parent) if path != folder]
    return CheckpointError(
        f"the checkpoint {folder} is damaged: {name}",
        found=reason,
        allowed=f"the last one before it is {others[-1]}" if others else None,
        next=f"move {folder} away and start the same command again; nothing was overwritten",
    )
