"""From the flat outputs of a compiled call to the result that the original gives."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchwright.core import nested
from torchwright.core.errors import ArtifactError
from torchwright.optimization.engines.dispatch.spec import SIZE, TENSOR

Builder = Callable[[list[Any]], Any]
HOMES = {"transformers": "transformers.modeling_outputs", "diffusers": "diffusers.models.modeling_outputs"}
"""The module in which a library has its models' shared result classes. No module that a file names is imported."""


def call_result(
    spec: str | pytree.TreeSpec, layouts: Sequence[tuple[int, ...] | None], results: Sequence[str]
) -> Builder:
    """Builds a call's result in the original's form: its structure, its memory layout, its constants."""
    return with_constants(laid_out(result_builder(spec), layouts), results)


def result_builder(spec: str | pytree.TreeSpec) -> Builder:
    """Builds a result from flat outputs; `spec` is pytree's, or its JSON.

    The usual forms (one tensor, a flat tuple, list or dict) take a fraction of a microsecond; pytree takes several.
    """
    tree = _tree(spec) if isinstance(spec, str) else spec
    _import_homes(tree)
    if tree.is_leaf():
        return lambda outputs: outputs[0]
    flat = all(child.is_leaf() for child in tree.children())
    if flat and tree.type is tuple:
        return tuple
    if flat and tree.type is list:
        return list
    if flat and tree.type is dict:
        names = list(tree.context)
        return lambda outputs: dict(zip(names, outputs, strict=True))
    if flat and tree.type is nested.FlattenedInstance:
        return lambda outputs: nested.rebuilt(tree.context, outputs)
    return lambda outputs: nested.unflatten(outputs, tree)


def _tree(text: str) -> pytree.TreeSpec:
    """Raises `ArtifactError` for a class that pytree does not know, as it knows them once their module is imported."""
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        name = str(error).removeprefix("Deserializing ").partition(" in pytree")[0][:120]
        if _imported(HOMES.get(name.partition(".")[0])):
            return _tree(text)
        raise ArtifactError(
            "a result is of a class that is not known in this process",
            found=name,
            next="import the module that defines it, then load the artifact",
        ) from error


def _import_homes(tree: pytree.TreeSpec) -> None:
    """Import the shared classes of results of a known library, where a record is of one."""
    if tree.type is nested.FlattenedInstance:
        _imported(HOMES.get(tree.context.module.partition(".")[0]))
    for child in tree.children():
        _import_homes(child)


def _imported(module: str | None) -> bool:
    """Check whether the module was missing before, and is now loaded."""
    if module is None or module in sys.modules:
        return False
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def with_constants(build: Builder, results: Sequence[str]) -> Builder:
    """Wrap `build` to restore non-tensors; compiled code returns 0-dimensional tensors for numbers.

    `results` is of `CallSpec`.
    """
    constants = {index: _constant(text) for index, text in enumerate(results) if text not in (TENSOR, SIZE)}
    sizes = [index for index, text in enumerate(results) if text == SIZE]
    if not constants and not sizes:
        return build

    def built(outputs: list[Any]) -> Any:
        outputs = [constants.get(index, output) for index, output in enumerate(outputs)]
        for index in sizes:
            outputs[index] = int(outputs[index])
        return build(outputs)

    return built


def _constant(text: str) -> Any:
    try:
        return float(text) if text in ("nan", "inf", "-inf") else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ArtifactError("a constant result is no constant", found=text[:80]) from error


def laid_out(build: Builder, layouts: Sequence[tuple[int, ...] | None]) -> Builder:
    """`build` with outputs brought into the layouts that are given: dimensions, the outermost in memory first.

    There is one layout for each tensor and number among the outputs.
    """
    if not any(layouts):
        return build

    def built(outputs: list[Any]) -> Any:
        remaining = iter(layouts)
        return build(
            [
                arranged(v, next(remaining)) if isinstance(v, torch.Tensor | int | float) else v
                for v in outputs
            ]
        )

    return built


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The order of a tensor's dimensions in memory, the outermost first; of equal strides the earlier one."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def arranged(tensor: Any, order: tuple[int, ...] | None) -> Any:
    """A tensor with its dimensions in this order in memory; anything else, and without an order, as it is."""
    if order is None or not isinstance(tensor, torch.Tensor):
        return tensor
    back = sorted(range(len(order)), key=lambda place: order[place])
    return tensor.permute(order).contiguous().permute(back)
