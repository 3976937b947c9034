"""Entries and samples of PyTorch's own test databases: `op_db`, `module_db`, `optim_db`. In a child process alone.

Samples are made on the CPU, from a seed, and brought to the device: both sides compute on the same numbers.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

MOST_SAMPLES = 24
"""Samples of one entry: some have hundreds, of shapes that differ in one size, and take half of the time."""
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
"""The first that the CPU has for an operator is taken."""
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}
"""Operators whose results hold whatever the memory held: shapes and dtypes are compared."""


@dataclass(frozen=True)
class Entry:
    """An operator, a layer or an optimizer."""

    name: str
    database: str
    samples: Callable[[], Iterator[Sample]]


@dataclass(frozen=True)
class Sample:
    """One computation: `run` does it on the device that it is given and returns its tensors by family.

    `seeded` sides start from one seed; the outputs of `only_shapes` are not compared by value.
    """

    families: tuple[str, ...]
    run: Callable[[str, str], Any]
    """(device, family) → outputs"""
    only_shapes: bool = False


def load() -> list[Entry]:
    """Return all entries, in the order of PyTorch's files."""
    _stand_in_for_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

    operators = [Entry(op.formatted_name, "op_db", _bind(_operator_samples, op)) for op in op_db]
    modules = [Entry(info.name, "module_db", _bind(_module_samples, info)) for info in module_db]
    classes: list[tuple[type[Any], Any]] = [(cast(Any, info.optim_cls), info) for info in optim_db]
    optimizers = [Entry(cls.__name__, "optim_db", _bind(_optimizer_samples, info)) for cls, info in classes]
    return [*operators, *modules, *optimizers]


def _bind(samples: Callable[[Any], Iterator[Sample]], info: Any) -> Callable[[], Iterator[Sample]]:
    return lambda: samples(info)


def _stand_in_for_expecttest() -> None:
    """Let PyTorch's test helpers be imported without `expecttest`, of which they take a base class alone."""
    if importlib.util.find_spec("expecttest") is None:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        stand_in.ACCEPT = False
        sys.modules["expecttest"] = stand_in


def to(device: str, value: Any) -> Any:
    """Return a value with its tensors and devices on a device; tensors that want a gradient are leaves again."""
    if isinstance(value, torch.Tensor):
        moved = value.detach().to(device) if device != "cpu" else value.detach().clone()
        return moved.requires_grad_(value.requires_grad)
    if isinstance(value, torch.device):
        return torch.device(device) if value.type == "cpu" else value
    if isinstance(value, list):
        return [to(device, each) for each in value]
    if isinstance(value, tuple):
        parts = [to(device, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {
            key: device if key == "device" and each == "cpu" else to(device, each)
            for key, each in value.items()
        }
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a result, in their order."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


# ------------------------------------------------------------------------------------------------------------ operators


def _operator_samples(op: Any) -> Iterator[Sample]:
    dtype = next((each for each in DTYPES if each in op.supported_dtypes("cpu")), None)
    if dtype is None:
        raise LookupError("the CPU has it for none of " + ", ".join(str(each) for each in DTYPES))
    differentiable = op.supports_autograd and dtype.is_floating_point
    families = ("forward", "gradient") if differentiable else ("forward",)
    samples = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
    for sample in itertools.islice(samples, MOST_SAMPLES):
        run = _Call(op, sample, dtype).run
        yield Sample(families, run, only_shapes=op.name in UNINITIALISED)


class _Call:
    """A sample of an operator."""

    def __init__(self, op: Any, sample: Any, dtype: torch.dtype) -> None:
        self.op, self.sample, self.dtype = op, sample, dtype

    def run(self, device: str, family: str) -> Any:
        given = to(device, (self.sample.input, self.sample.args, self.sample.kwargs))
        found, args, kwargs = given
        if family == "forward":
            with torch.no_grad():
                return self.op(found, *args, **kwargs)
        leaves = [each for each in tensors(given) if each.requires_grad]
        out = self.sample.output_process_fn_grad(self.op(found, *args, **kwargs))
        wanted = [each for each in tensors(out) if each.requires_grad]
        if not wanted:
            return []
        return torch.autograd.grad(wanted, leaves, _directions(wanted), allow_unused=True)


def _directions(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what gradients are taken along: the same numbers on every device."""
    drawn = torch.Generator().manual_seed(0)
    return [
        torch.randn(out.size(), generator=drawn, dtype=out.dtype).to(out.device)
        if out.dtype.is_floating_point or out.dtype.is_complex
        else torch.ones_like(out)
        for out in outputs
    ]


# --------------------------------------------------------------------------------------------------------------- layers


def _module_samples(info: Any) -> Iterator[Sample]:
    for training in (True, False):
        made = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for sample in itertools.islice(made, MOST_SAMPLES):
            if sample.forward_input is not None:
                yield Sample(("modules",), _Layer(info, sample, training).run)


class _Layer:
    """A sample of a layer: what it returns, and the gradients of its parameters."""

    def __init__(self, info: Any, sample: Any, training: bool) -> None:
        self.info, self.sample, self.training = info, sample, training

    def run(self, device: str, family: str) -> Any:
        made = to("cpu", (self.sample.constructor_input.args, self.sample.constructor_input.kwargs))
        args, kwargs = made
        layer = self.info.module_cls(*args, **kwargs).train(self.training)
        given = to(device, (self.sample.forward_input.args, self.sample.forward_input.kwargs))
        if self.info.is_lazy:  # its parameters are made by a first call
            first = to("cpu", (self.sample.forward_input.args, self.sample.forward_input.kwargs))
            with torch.no_grad():
                layer(*first[0], **first[1])
        layer.to(device)
        out = layer(*given[0], **given[1])
        wanted = [each for each in tensors(out) if each.requires_grad]
        parameters = [each for each in layer.parameters() if each.requires_grad]
        if not wanted or not parameters:
            return out
        return out, torch.autograd.grad(wanted, parameters, _directions(wanted), allow_unused=True)


# ----------------------------------------------------------------------------------------------------------- optimizers


def _optimizer_samples(info: Any) -> Iterator[Sample]:
    if info.only_supports_sparse_grads:
        raise LookupError("it takes sparse gradients alone")
    for sample in itertools.islice(info.optim_inputs_func(device="cpu"), MOST_SAMPLES):
        yield Sample(("optimizers",), _Steps(info, sample).run)


class _Steps:
    """A sample of an optimizer: parameters after three steps on a small problem."""

    def __init__(self, info: Any, sample: Any) -> None:
        self.info, self.sample = info, sample

    def run(self, device: str, family: str) -> Any:
        drawn = torch.Generator().manual_seed(0)
        weight, bias, x = (torch.randn(size, generator=drawn) for size in ((4, 6), (4,), (8, 6)))
        parameters = [each.to(device).requires_grad_() for each in (weight, bias)]
        x = x.to(device)
        optimizer = self.info.optim_cls(parameters, **to(device, self.sample.kwargs))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.linear(x, *parameters).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return parameters
