# pyright: basic
"""Nested inputs and outputs as JSON and safetensors: what a self-test is kept in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from torchwright.errors import ArtifactError


def write_tree(path: Path, value: Any) -> None:
    """Keep tensors, numbers, strings, None and nested lists, tuples and dicts as `path`.json and `path`.safetensors.

    Raises `TypeError` for anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(value, tensors))
    save_file(tensors, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(text)


def read_tree(path: Path) -> Any:
    """What `write_tree` kept; raises `ArtifactError` for damaged files."""
    try:
        tensors = load_file(path.with_suffix(".safetensors"))
        return _decode(json.loads(path.with_suffix(".json").read_text()), tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ArtifactError(f"{path.name} in {path.parent} cannot be read", found=str(error)) from error


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if type(value) is dict:
        return {"dict": {str(key): _encode(item, tensors) for key, item in value.items()}}
    if type(value) in (
        list,
        tuple,
    ):  # of a class of its own, such as a packed sequence, it would come back as another
        return {type(value).__name__: [_encode(item, tensors) for item in value]}
    raise TypeError(f"a {type(value).__name__} cannot be kept in a self-test")


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, item),) = value.items()
    if kind == "tensor":
        return tensors[item]
    if kind == "dict":
        return {key: _decode(entry, tensors) for key, entry in item.items()}
    if kind in ("list", "tuple"):
        items = [_decode(entry, tensors) for entry in item]
        return tuple(items) if kind == "tuple" else items
    return item
