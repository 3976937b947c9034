"""JSON from a file that a stranger may have written: its size and depth are limited before it is parsed."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from torchwright.errors import ArtifactError

T = TypeVar("T")
LARGEST = 16 * 2**20
"""Bytes of one file, where its reader names no other limit."""
DEEPEST = 64
"""Lists and objects within each other. Nothing that is written here comes near it."""
LONGEST_TEXT = 1_000_000
"""Characters of one text."""
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
OTHERS = bytes(set(range(256)) - set(STEPS))


def read_json(path: Path, *, largest: int = LARGEST, deepest: int = DEEPEST) -> Any:
    """The content of a JSON file; raises `ArtifactError`, which names the file, for whatever is wrong with it."""
    return parse_json(read_bytes(path, largest), str(path), deepest=deepest)


def read_bytes(path: Path, largest: int) -> bytes:
    """A whole file; raises `ArtifactError` for one that cannot be read or has more than `largest` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read", found=str(error)) from error
    if len(data) > largest:
        raise _damaged(str(path), f"more than {largest:,} bytes")
    return data


def parse_json(data: bytes, what: str, *, deepest: int = DEEPEST) -> Any:
    """The value of a JSON text; raises `ArtifactError`, which names `what`, for whatever is wrong with it."""
    if _depth(data) > deepest:
        raise _damaged(what, f"lists and objects more than {deepest} deep")
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise _damaged(what, str(error) or type(error).__name__) from error


def typed(data: Any, kind: type[T], what: str) -> T:
    """Parsed JSON as a dataclass: exactly its fields, of exactly its types, texts and numbers within bounds.

    Raises `ArtifactError`, which names `what`, for anything else.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_max_length=LONGEST_TEXT)
    try:
        return TypeAdapter(with_config(strict)(kind)).validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise _damaged(what, f"{where}: {first['msg']}") from error


def _depth(data: bytes) -> int:
    """How deep the brackets outside of texts go."""
    brackets = STRING.sub(b"", data).translate(None, OTHERS)
    return max(accumulate(map(STEPS.__getitem__, brackets)), default=0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a key twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _damaged(what: str, found: str) -> ArtifactError:
    return ArtifactError(f"{what} is damaged", found=found[:300], next="optimize again")
