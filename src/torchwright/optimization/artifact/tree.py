# pyright: basic
"""Nested inputs and outputs as JSON and safetensors: what a self-test is kept in."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from torchwright.core import nested
from torchwright.core.errors import ArtifactError
from torchwright.core.json_file import read_json

NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""That JSON has no numbers for."""
KINDS = ("dict", "float", "list", "record", "tensor", "tuple", "value")


def write_tree(path: Path, value: Any) -> None:
    """Write tensors, numbers, strings, None and nested lists, tuples, dicts, dataclass instances and named tuples.

    The files are `path`.json and `path`.safetensors. Raises `TypeError` for anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(value, tensors))
    save_file(tensors, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(text, encoding="utf-8")


def read_tree(path: Path) -> Any:
    """Read what `write_tree` wrote, instances as records. Raises `ArtifactError` for damaged files."""
    try:
        tensors = load_file(path.with_suffix(".safetensors"))
        return _decode(read_json(path.with_suffix(".json")), tensors)
    except (OSError, ValueError, RuntimeError, MemoryError, SafetensorError) as error:
        raise ArtifactError(f"{path.name} in {path.parent} cannot be read", found=str(error)) from error


def read_self_test(path: Path) -> dict[str, Any]:
    """Read an artifact's first call: name, args, kwargs, fixed, seed, and output as a list of tensors.

    Instances in the arguments are of their own classes where these are imported, else records. Raises `ArtifactError`
    for anything else.
    """
    kept = {"seed": 0, "fixed": None} | tree if isinstance(tree := read_tree(path), dict) else {}
    match kept:
        case {
            "name": str(),
            "args": tuple(),
            "kwargs": dict(),
            "fixed": None | bool(),
            "seed": int(seed),
            "output": list(output),
        }:
            if 0 <= seed < 2**63 and all(isinstance(tensor, torch.Tensor) for tensor in output):
                known = nested.closed((kept["args"], kept["kwargs"]), stand_ins=False)
                return kept | dict(zip(("args", "kwargs"), known, strict=True))
    raise ArtifactError(f"{path.name} in {path.parent} cannot be read", found="not one call and its output")


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or _is_plain(value):
        return {"value": value}
    if type(value) is dict:
        return {"dict": {str(key): _encode(item, tensors) for key, item in value.items()}}
    if type(value) in (
        list,
        tuple,
    ):  # of a class of its own, such as a packed sequence, it would come back as another
        return {type(value).__name__: [_encode(item, tensors) for item in cast("Sequence[Any]", value)]}
    if (record := nested.taken_apart(value)) is not None:
        items = [_encode(item, tensors) for item in record.values]
        return {"record": {"class": nested.to_json(record.type), "items": items}}
    raise TypeError(f"a {type(value).__name__} cannot be kept in a self-test")


def _is_plain(value: Any) -> bool:
    """Check for a value that JSON keeps; a member of an Enum would come back as its value alone."""
    return isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= set(KINDS):
        raise ValueError(f"{str(value)[:80]!r} is no part of a tree")
    ((kind, item),) = value.items()
    match kind, item:
        case "record", {"class": str(cls), "items": list(items)}:
            made = nested.from_json(cls)
            if len(made.fields) == len(items):
                return nested.FlattenedInstance(made, [_decode(entry, tensors) for entry in items])
        case "tensor", str() if item in tensors:
            return tensors[item]
        case "float", str() if item in NUMBERS:
            return NUMBERS[item]
        case "dict", dict():
            return {key: _decode(entry, tensors) for key, entry in item.items()}
        case "list", list():
            return [_decode(entry, tensors) for entry in item]
        case "tuple", list():
            return tuple(_decode(entry, tensors) for entry in item)
        case "value", None | bool() | int() | float() | str():
            return item
    raise ValueError(f"{str(item)[:80]!r} is no {kind}")
