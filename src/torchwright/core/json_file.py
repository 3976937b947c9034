"""Untrusted JSON: size and depth are limited before a file is parsed, names and types are checked after."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from torchwright.core.errors import ArtifactError
from torchwright.core.regular_file import read_regular

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
    """Return the content of a JSON file of an artifact; raise `ArtifactError`, naming the file, for any fault."""
    return parse_json(read_bytes(path, largest), str(path), deepest=deepest)


def read_bytes(path: Path, largest: int) -> bytes:
    """Return a whole file; raise `ArtifactError` if it cannot be read or has more than `largest` bytes."""
    try:
        return read_regular(path, largest)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read", found=str(error)) from error
    except ValueError as error:
        raise _damaged(str(path), str(error)) from error


def parse_json(data: bytes, what: str, *, deepest: int = DEEPEST) -> Any:
    """Return the value of an artifact's JSON text; raise `ArtifactError`, naming `what`, for any fault.

    Duplicate keys, NaN and infinities are faults: no writer of ours makes them.
    """
    try:
        return decode_json(data, deepest=deepest, object_pairs_hook=_unique, parse_constant=_refuse)
    except ValueError as error:
        raise _damaged(what, str(error) or type(error).__name__) from error


def decode_json(data: bytes, *, deepest: int = DEEPEST, **hooks: Any) -> Any:
    """Return the value of a JSON text; raise `ValueError` if it is not JSON or nests too deeply.

    `hooks` are those of `json.loads`. Without any, NaN and infinities pass: published config.json files hold them
    (Mamba-2's `time_step_limit`), and `hub.fields` refuses them where a number is read.
    """
    if _depth(data) > deepest:
        raise ValueError(f"lists and objects more than {deepest} deep")
    try:
        return json.loads(data.decode(), **hooks)
    except RecursionError as error:
        raise ValueError("lists and objects too deep") from error


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
    """Return the nesting depth of the brackets outside of strings."""
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
