# pyright: basic
"""Find the inputs that the original takes in addition to its example, and how it answers, by calling it.

Compiled code takes what it was compiled for. What else the original takes can be answered by the same code only where
that is known to be right: other numbers of rows, other types, arrays. Each is tried on the original here.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.errors import WorkloadError
from torchwright.optimization.engines.dispatch.call import parameters_of
from torchwright.optimization.engines.dispatch.spec import InputCapabilities, Substitute
from torchwright.workloads.accuracy import flatten, relative_error
from torchwright.workloads.base import Case

SECONDS = 5.0
"""Stop calling the original after this much processor time of this thread, however long that takes on a busy
machine.
"""
ALIKE = 1e-3
"""Relative error between answers for a row among others and apart, in the original's own type."""
FLOATS = ("float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "uint8", "bool")
SMALL = ("uint8", "int64", "int32")
"""Integers that are tried for floating values."""
MOST_GUESSES = 8
"""The rule for which tensors have the rows."""
MOST_TOGETHER = 4
"""Tensors of integers of which every combination is tried."""


def probe(model: nn.Module, case: Case, seconds: float = SECONDS) -> InputCapabilities:
    """Return the inputs that `model` takes in addition to the tensors of `case`."""
    end = time.thread_time() + seconds
    takes = InputCapabilities(parameters=parameters_of(model.forward))
    answer = _Original(model, case, end)
    tensors = tensors_of(case)
    reference = answer(tensors)
    if not tensors or reference is None:
        return takes
    batched, apart = _rows(answer, tensors, reference)
    return replace(
        takes,
        batched=batched,
        pieces=apart,
        substitutes=tuple(_substitutes(answer, tensors)),
        arrays=_takes_arrays(answer, tensors, reference),
    )


@dataclass(frozen=True)
class OriginalAnswer:
    """The original's answer."""

    tensors: list[torch.Tensor]
    """Numbers among them."""
    types: tuple[str, ...]
    """The leaves that are tensors."""
    others: list[str]
    """Every leaf that is not a tensor, as text."""

    def rows(self, order: Any) -> OriginalAnswer:
        return replace(self, tensors=[t[order] for t in self.tensors])


class _Original:
    """Answers as the original does, or with None where it raises or the time is over."""

    def __init__(self, model: nn.Module, case: Case, end: float) -> None:
        self._model, self._end = model, end
        self._leaves, self._spec = nested.flatten((case.args, case.kwargs))

    def __call__(self, tensors: Sequence[Any]) -> OriginalAnswer | None:
        if time.thread_time() > self._end:
            return None
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        # A copy: a model may change what it is given.
        leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = nested.unflatten(leaves, self._spec)
        try:
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                given = self._model(*args, **kwargs)
                leaves = nested.leaves(given)
                types = [str(v.dtype).removeprefix("torch.") for v in leaves if isinstance(v, torch.Tensor)]
                others = [str(v)[:1000] for v in leaves if not isinstance(v, torch.Tensor)]
                return OriginalAnswer(flatten(given), tuple(types), others)
        except Exception:  # what the original does not take, in whatever way it says so
            return None


_Asked = Callable[[Sequence[Any]], OriginalAnswer | None]


def tensors_of(case: Case) -> list[torch.Tensor]:
    return nested.tensors((case.args, case.kwargs))


def with_rows(case: Case, batched: Sequence[int], rows: int) -> Case:
    """The same call with the first `rows` rows, or with rows repeated until there are so many."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if len(tensor) >= rows:
            return tensor[:rows].clone()
        return tensor.repeat(-(-rows // len(tensor)), *[1] * (tensor.dim() - 1))[:rows]

    return with_tensors(case, [resized(t) if i in batched else t for i, t in enumerate(tensors_of(case))])


def with_tensors(case: Case, tensors: Sequence[torch.Tensor]) -> Case:
    """The same call with these in place of its tensors, in their order."""
    remaining = iter(tensors)
    args, kwargs = nested.map_tensors(lambda _: next(remaining), (case.args, case.kwargs))
    return replace(case, args=args, kwargs=kwargs)


def _rows(
    answer: _Asked, tensors: Sequence[torch.Tensor], reference: OriginalAnswer
) -> tuple[tuple[int, ...], bool]:
    """Return the tensors whose first size is the batch size, and whether rows are independent."""
    found: tuple[int, ...] = ()
    for batched in perhaps_batched(tensors):
        rows = len(tensors[batched[0]])
        other = rows // 2 or 2
        if answer(_with(tensors, batched, lambda t, n=other, r=rows: t[[i % r for i in range(n)]])) is None:
            continue
        if _apart(answer, tensors, batched, reference):
            return batched, True
        found = found or batched
    return found, False


def perhaps_batched(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Sets of tensors of one first size: all that have it, all but one, just one."""
    sizes = dict.fromkeys(len(t) for t in tensors if t.dim() and len(t))
    found: list[tuple[int, ...]] = []
    for size in sizes:
        alike = tuple(i for i, t in enumerate(tensors) if t.dim() and len(t) == size)
        found += [alike, *(tuple(i for i in alike if i != left) for left in alike), *((i,) for i in alike)]
    return [batched for batched in dict.fromkeys(found) if batched][:MOST_GUESSES]


def _with(
    tensors: Sequence[torch.Tensor], batched: Sequence[int], change: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    return [change(t) if i in batched else t for i, t in enumerate(tensors)]


def _apart(
    answer: _Asked, tensors: Sequence[torch.Tensor], batched: Sequence[int], reference: OriginalAnswer
) -> bool:
    """Check that each row is answered as if it were alone: in larger and smaller batches, in another order, next to
    large values and next to NaN."""
    rows = len(tensors[batched[0]])
    if any(t.dim() == 0 or len(t) != rows for t in reference.tensors):
        return False

    def same(wanted: OriginalAnswer | None, found: OriginalAnswer | None) -> bool:
        return (
            wanted is not None
            and found is not None
            and wanted.others == found.others
            and _alike(wanted.tensors, found.tensors, ALIKE)
        )

    for number in dict.fromkeys((rows // 2 or 2, 1, 2, 3, 2 * rows)):
        order = [(rows - 1 - i) % rows for i in range(number)]
        if not same(reference.rows(order), answer(_with(tensors, batched, lambda t, o=order: t[o]))):
            return False
    alone = answer(_with(tensors, batched, lambda t: _faint(t[:1])))
    for beside in (lambda t: torch.cat([t[-1:], _loud(t[-1:])]), lambda t: _undefined(t[-1:])):
        among = answer(_with(tensors, batched, lambda t, b=beside: torch.cat([_faint(t[:1]), b(t)])))
        if among is None or any(t.dim() == 0 or not len(t) for t in among.tensors):
            return False
        if not same(alone, among.rows(slice(0, 1))):
            return False
    return True


def _faint(rows: torch.Tensor) -> torch.Tensor:
    """Smaller values that are as valid; whether a value is there at all (a mask) stays."""
    if rows.is_floating_point() or rows.is_complex():
        return rows * 0.5
    masking = rows.dtype == torch.bool or not rows.numel() or int(rows.max()) <= 1
    return rows if masking else torch.where(rows > 1, rows // 2, rows)


def _loud(rows: torch.Tensor) -> torch.Tensor:
    return rows * 1000 if rows.is_floating_point() or rows.is_complex() else rows


def _undefined(rows: torch.Tensor) -> torch.Tensor:
    return rows * float("nan") if rows.is_floating_point() or rows.is_complex() else rows


def _substitutes(answer: _Asked, tensors: Sequence[torch.Tensor]) -> list[Substitute]:
    """Types for one tensor, and for several of a kind at once, with which the original answers alike."""
    changes: list[dict[int, str]] = []
    floating = [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]
    whole = [
        i
        for i, t in enumerate(tensors)
        if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
    ]
    for index, tensor in enumerate(tensors):
        names = (*FLOATS, "float32", *SMALL) if index in floating else (*INTEGERS, "float32")
        changes += [{index: name} for name in names if not tensor.is_complex()]
    if len(floating) > 1:
        changes += [dict.fromkeys(floating, name) for name in (*FLOATS, "float32")]
    for count in range(2, len(whole) + 1) if len(whole) <= MOST_TOGETHER else ():
        changes += [dict.fromkeys(some, "int32") for some in itertools.combinations(whole, count)]
    found = []
    for wished in changes:
        types = {i: name for i, name in wished.items() if getattr(torch, name) != tensors[i].dtype}
        if types and types not in [s.types for s in found]:
            found += _substitute(answer, tensors, types)
    return found


def _substitute(answer: _Asked, tensors: Sequence[torch.Tensor], types: dict[int, str]) -> list[Substitute]:
    changed = [_converted(t, getattr(torch, types[i])) if i in types else t for i, t in enumerate(tensors)]
    given = answer(changed)
    if given is None:
        return []
    back = [c.to(t.dtype) for c, t in zip(changed, tensors, strict=True)]
    wanted = answer(back)
    loose = max((_rounding(t.dtype) for t in given.tensors), default=ALIKE)
    if wanted is None or wanted.others != given.others or not _alike(wanted.tensors, given.tensors, loose):
        return []
    return [Substitute(types=types, outputs=given.types)]


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in another type; floating ones as whole numbers up to 255, among which overflows show."""
    if tensor.is_floating_point() and not dtype.is_floating_point and tensor.numel():
        largest = float(tensor.nan_to_num(0, 0, 0).abs().max()) or 1.0
        return (tensor.nan_to_num(0, 0, 0).abs() * (255 / largest)).to(dtype)
    return tensor.to(dtype)


def _rounding(dtype: torch.dtype) -> float:
    return max(ALIKE, 16 * torch.finfo(dtype).eps) if dtype.is_floating_point else ALIKE


def _takes_arrays(answer: _Asked, tensors: Sequence[torch.Tensor], reference: OriginalAnswer) -> bool:
    """Check whether arrays give what tensors give; false for an original that answers arrays with arrays."""
    try:
        arrays = [tensor.cpu().numpy().copy() for tensor in tensors]
    except TypeError:  # bfloat16 and such, which NumPy has not
        return False
    found = answer(arrays)
    return (
        found is not None
        and found.others == reference.others
        and _alike(reference.tensors, found.tensors, ALIKE)
    )


def _alike(reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor], allowed: float) -> bool:
    try:
        return relative_error(reference, found).value <= allowed
    except WorkloadError:
        return False
