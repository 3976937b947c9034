"""Any `nn.Module` with example inputs."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.errors import ModelError, TorchwrightError, WorkloadError, shown
from torchwright.core.records import Quality
from torchwright.workloads import accuracy
from torchwright.workloads.base import (
    Case,
    Run,
    Workload,
    changed_tensors,
    fresh,
    from_anywhere,
    own_tensors,
    to_device,
)
from torchwright.workloads.factory import find_factory
from torchwright.workloads.huggingface import register_recorded
from torchwright.workloads.training_mode import training_notice

CALIBRATING = 4
"""One of so many inputs, and one at least, calibrates."""
CALIBRATED_SCALE, JUDGED_SCALE = 0.5, 0.75
"""A single example calibrates as it is and half as large, and what was calibrated is judged between the two as well."""
FACTORY_SEED = 0
"""Seed of torch's random numbers while a factory runs; any constant will do."""
Inputs = Any
"""A tuple of positional arguments, a dict of keyword arguments, a single tensor or dataclass instance, or a list of
any of these."""


def _next_step(model: Any) -> str | None:
    """The advice for a model that is not a module."""
    if isinstance(model, type):
        return f"give an instance: {model.__name__}(…)"
    if callable(model):
        return "torchwright.compile_numpy(function) for NumPy code; for torch code, call it in a module's forward"
    return None


class ModuleWorkload(Workload):
    """A module with its inputs. Metric: relative error of its outputs, top-1 agreement, or the user's own.

    Inputs that the module changes in place count as outputs. Inputs of one shape are one call to compile and to time,
    and one sample to judge by. Of several inputs the first quarter calibrates; the loss is that of the others, or,
    where those that calibrated fare worse, theirs. Of four and more the last quarter judges what the search has
    chosen, if it has no shapes of its own.

    `task="classification"` judges by top-1 agreement over the last axis of the first output instead of by relative
    error: nothing in a tensor's shape says that it is a classifier, so it is never guessed.
    """

    name = "module"
    from_code = True

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        metric: Callable[[Any], float] | None = None,
        higher_is_better: bool = True,
        task: str = "regression",
        dynamic: Any = None,
        source: str = "",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"the model is a {type(model).__name__}", allowed="a torch.nn.Module", next=_next_step(model)
            )
        if task not in ("regression", "classification"):
            raise WorkloadError(f"unknown task '{task}'", allowed="regression, classification")
        self.training_notice = training_notice(model)
        """Return the notice for a model in training mode; the copy here is in eval mode."""
        self.model = fresh(model)
        self.inputs = nested.map_tensors(torch.Tensor.detach, normalise(inputs))
        self._shape_of = _numbered([_layout(*call) for call in self.inputs])
        if dynamic is not None and self._shapes > 1:
            raise WorkloadError("dynamic= is for one shape of inputs", found=f"{self._shapes} shapes")
        self.dynamic = dynamic
        self.metric, self.higher_is_better, self.task = metric, higher_is_better, task
        self.label, self._from_factory = source or type(model).__qualname__, bool(source)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register_recorded(self.model)

    def called_as_is(self) -> bool:
        return True

    def build(self) -> nn.Module:
        return fresh(self.model)

    def cases(self, dtype: torch.dtype) -> list[Case]:
        counts = collections.Counter(self._shape_of)
        often = math.gcd(*counts.values())
        return [
            replace(self._case(self._shape_of.index(shape)), repeat=counts[shape] // often)
            for shape in range(self._shapes)
        ]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        found = [self._case(index) for index in range(self._calibrating)]
        # With one example a correction would fit its values alone.
        return [*found, self._scaled(CALIBRATED_SCALE)._case(0)] if self._varies else found

    def varied(self) -> Self | None:
        return self._scaled(JUDGED_SCALE) if self._varies else None

    @property
    def _varies(self) -> bool:
        """Check whether one example both calibrates and judges, and has numbers that can be scaled."""
        leaves, _ = nested.flatten(self.inputs[0])
        floating = any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves)
        return floating and self.task == "regression" and not self.calibrates_apart()

    def _scaled(self, scale: float) -> Self:
        """The same with its example's floating numbers multiplied."""
        other = copy.copy(self)
        other.inputs = nested.map_tensors(
            lambda tensor: tensor * scale if tensor.is_floating_point() else tensor, self.inputs
        )
        return other

    def _case(self, index: int) -> Case:
        """One of the inputs as a call, named by its shape."""
        args, kwargs = to_device(own_tensors(self.inputs[index]), self.device)
        name = "forward" if self._shapes == 1 else f"shape {self._shape_of[index] + 1}"
        return Case(name=name, args=args, kwargs=kwargs, dynamic=self.dynamic)

    @property
    def _shapes(self) -> int:
        return max(self._shape_of) + 1

    def calibrates_apart(self) -> bool:
        return self.metric is not None or len(self.inputs) > 1

    @property
    def _calibrating(self) -> int:
        """Return how many of the inputs, from the first on, calibrate."""
        return len(self.inputs) if self.metric else max(1, len(self.inputs) // CALIBRATING)

    def observe(self, run: Run, dtype: torch.dtype) -> Any:
        if self.metric:
            return self._ask_metric(_Callable(from_anywhere(run, self.device), self._case(0).name))
        sample = self.sample or range(len(self.inputs) - self._kept_apart)
        return [self._seen(run, self._case(index), self.inputs[index]) for index in sample]

    def unseen(self) -> Self | None:
        count, kept = len(self.inputs), self._kept_apart
        return self.judged_by(range(count - kept, count)) if kept else None

    @property
    def _kept_apart(self) -> int:
        """Return how many of the inputs, at the end, are held out of the search."""
        kept = 0 if self.metric else len(self.inputs) // CALIBRATING
        first = len(self.inputs) - kept
        return kept if set(self._shape_of[first:]) <= set(self._shape_of[:first]) else 0

    def _seen(self, run: Run, case: Case, given: tuple[tuple[Any, ...], dict[str, Any]]) -> _Seen:
        outputs = [_widened(tensor) for tensor in accuracy.flatten(run(case))]
        if self.task == "classification":
            outputs = [_rows(outputs[0])]
        changed = changed_tensors(given, (case.args, case.kwargs))
        return _Seen(case.name, outputs, {index: _widened(tensor.cpu()) for index, tensor in changed.items()})

    def compare(self, reference: Any, candidate: Any) -> Quality:
        if self.metric:
            name = getattr(self.metric, "__name__", "metric")
            return accuracy.scalar(name, reference, candidate, self.higher_is_better)
        for before, after in zip(reference, candidate, strict=True):
            if before.changed.keys() != after.changed.keys():
                raise WorkloadError(
                    "the candidate does not change the same inputs in place as the original",
                    found=f"inputs {sorted(after.changed)}, not {sorted(before.changed)}, are changed in place",
                )
            accuracy.check_shapes(before.outputs, after.outputs)
        first = 0 if self.sample else self._calibrating % len(self.inputs)
        judged = self._loss(reference[first:], candidate[first:])
        if not first:
            return judged
        calibrated = self._loss(reference[:first], candidate[:first])
        if calibrated.drop <= judged.drop:
            return judged
        # Scales were chosen on these: they are seen as they are, and say nothing of others.
        worst = max(calibrated.drop, judged.drop_high)
        return replace(calibrated, drop_low=calibrated.drop, drop_high=worst)

    def _loss(self, reference: Sequence[_Seen], candidate: Sequence[_Seen]) -> Quality:
        if self.task == "classification":
            return accuracy.answers(_logits(reference), _logits(candidate))
        return accuracy.relative_error(_tensors(reference), _tensors(candidate))

    def _ask_metric(self, model: nn.Module) -> float:
        assert self.metric is not None
        name = getattr(self.metric, "__name__", "metric")
        try:
            return float(self.metric(model))
        except TorchwrightError:
            raise
        except Exception as error:
            raise WorkloadError(
                f"the metric '{name}' failed",
                found=f"{type(error).__name__}: {error}",
                allowed="a callable that is given a model and returns a number",
            ) from error

    def properties(self, model: nn.Module) -> set[str]:
        return {"several_shapes"} if self._shapes > 1 else set()

    def notices(self) -> tuple[str, ...]:
        return (self.training_notice,) if self.training_notice else ()

    def made_again(self) -> bool:
        return self._from_factory and self.metric is None

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "shapes": [_shapes(args, kwargs) for args, kwargs in self.inputs],
            "task": self.task,
            "metric": getattr(self.metric, "__name__", "metric") if self.metric else None,
        }


@dataclass(frozen=True)
class _Seen:
    """The result of one call, and the inputs that it changed in place, by position."""

    call: str
    """Its name, equal for inputs of one shape."""
    outputs: list[torch.Tensor]
    changed: dict[int, torch.Tensor]


class _Callable(nn.Module):
    """The model as a user's metric receives it: called like the original, on any inputs."""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__()
        self._run, self._name = run, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(Case(name=self._name, args=args, kwargs=kwargs))


def normalise(inputs: Inputs) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return every accepted form of inputs as a list of (args, kwargs).

    Raises `WorkloadError` for an empty list and for a form that is not accepted.
    """
    items = inputs if isinstance(inputs, list) else [inputs]
    if not items:
        raise WorkloadError(
            "there are no inputs", allowed="a tuple, a dict, a tensor, a dataclass, or a list of these"
        )
    calls = []
    for item in items:
        if isinstance(item, torch.Tensor):
            calls.append(((item,), {}))
        elif isinstance(item, Mapping):
            calls.append(((), dict(item)))
        elif isinstance(item, tuple):
            calls.append((item, {}))
        elif nested.form_of(type(item)) is not None:
            calls.append(((item,), {}))
        else:
            raise WorkloadError(
                f"inputs of type {type(item).__name__} cannot be passed to a model",
                allowed="a tuple of positional arguments, a dict of keyword arguments, a tensor, or a list of these",
            )
    return calls


def from_factory(target: str) -> ModuleWorkload:
    """Return the workload of `package.module:factory` or `file.py:factory`.

    The factory returns a module and example inputs. It is imported and called with torch's random numbers seeded: a
    model with random weights is the same one in `optimize` and in `verify`. Raises `ModelError` with the reason if the
    module, the factory or its result is missing or unusable.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(FACTORY_SEED)
            result = find_factory(target)()
    except TorchwrightError:
        raise
    except Exception as error:
        raise ModelError(
            f"the factory '{target}' failed", found=f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise ModelError(
            f"the factory '{target}' returned {type(result).__name__}",
            allowed="a pair (torch.nn.Module, example inputs)",
        )
    return ModuleWorkload(result[0], result[1], source=target)


def _tensors(seen: Sequence[_Seen]) -> list[torch.Tensor]:
    """Every output by the shape of its call: those of several inputs are one sample, the shapes are not."""
    samples: dict[tuple[str, str], list[torch.Tensor]] = {}
    for one in seen:
        outputs = {f"output {index}": tensor for index, tensor in enumerate(one.outputs)}
        changed = {f"input {index}": tensor for index, tensor in one.changed.items()}
        for place, tensor in (outputs | changed).items():
            samples.setdefault((one.call, place), []).append(tensor.flatten())
    return [torch.cat(sample) for sample in samples.values()]


def _logits(seen: Sequence[_Seen]) -> torch.Tensor:
    return torch.cat([one.outputs[0] for one in seen])


def _rows(logits: torch.Tensor) -> torch.Tensor:
    if not logits.ndim:
        raise WorkloadError(
            "a classifier returned a single number", allowed="logits with the classes as last axis"
        )
    return logits.reshape(-1, logits.shape[-1])


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _layout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a key that is equal for inputs of one compiled call: shapes, dtypes, strides, and non-tensors as they
    are.
    """

    def layout(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.dtype, leaf.shape, leaf.layout, leaf.stride() if leaf.layout is torch.strided else ()

    leaves, structure = nested.flatten((args, kwargs))
    return repr(([layout(leaf) for leaf in leaves], structure))


def _numbered(values: Sequence[str]) -> list[int]:
    """Each value as its number, in order of first appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    def shape(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return shown(value, 60)
        return [str(value.dtype).removeprefix("torch."), *value.shape]

    leaves = nested.leaves
    return {
        "args": [shape(leaf) for leaf in leaves(args)],
        "kwargs": {key: [shape(leaf) for leaf in leaves(value)] for key, value in kwargs.items()},
    }
