# pyright: basic
"""What the original takes beside its example, and how it answers: found by calling it while it is at hand.

Compiled code takes what it was compiled for. What else the original takes can be answered by the same code only where
that is known to be right: other numbers of rows, other types, arrays. Each is tried on the original here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchwright.engines.call import parameters_of
from torchwright.engines.spec import Substitute, Takes
from torchwright.errors import WorkloadError
from torchwright.workloads.accuracy import flatten, relative_error
from torchwright.workloads.base import Case

SECONDS = 5.0
"""Calls of the original are not begun after this long."""
ALIKE = 1e-3
"""Relative error between answers for a row among others and apart, in the original's own type."""
FLOATS = ("float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "uint8", "bool")


def probe(model: nn.Module, case: Case, seconds: float = SECONDS) -> Takes:
    """What `model` takes beside the tensors of `case`."""
    end = time.monotonic() + seconds
    takes = Takes(parameters=parameters_of(model.forward))
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


class _Original:
    """Answers with the outputs' tensors, or None where the original raises or the time is over."""

    def __init__(self, model: nn.Module, case: Case, end: float) -> None:
        self._model, self._end = model, end
        self._leaves, self._spec = pytree.tree_flatten((case.args, case.kwargs))

    def __call__(self, tensors: Sequence[Any]) -> list[torch.Tensor] | None:
        if time.monotonic() > self._end:
            return None
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        try:
            with torch.inference_mode():
                return flatten(self._model(*args, **kwargs))
        except Exception:  # what the original does not take, in whatever way it says so
            return None


def tensors_of(case: Case) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((case.args, case.kwargs)) if isinstance(leaf, torch.Tensor)]


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
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), (case.args, case.kwargs))
    return replace(case, args=args, kwargs=kwargs)


def _rows(
    answer: Callable[[Sequence[Any]], list[torch.Tensor] | None],
    tensors: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
) -> tuple[tuple[int, ...], bool]:
    """The tensors whose first size is the number of rows, and whether rows are answered apart from each other."""
    if not tensors[0].dim() or not (rows := len(tensors[0])):
        return (), False
    batched = tuple(i for i, t in enumerate(tensors) if t.dim() and len(t) == rows)
    other = rows // 2 or 2
    resized = [
        (t[:other] if rows > 1 else torch.cat([t, t])) if i in batched else t for i, t in enumerate(tensors)
    ]
    found = answer(resized)
    if found is None or len(found) != len(reference):
        return (), False
    if any(t.dim() == 0 or len(t) != other or len(r) != rows for t, r in zip(found, reference, strict=True)):
        return batched, False
    least = min(rows, other)
    return batched, _alike([r[:least] for r in reference], [t[:least] for t in found], ALIKE)


def _substitutes(
    answer: Callable[[Sequence[Any]], list[torch.Tensor] | None], tensors: Sequence[torch.Tensor]
) -> list[Substitute]:
    """Types for one tensor, and for all floating ones at once, with which the original answers alike."""
    changes = []
    for index, tensor in enumerate(tensors):
        names = FLOATS if tensor.is_floating_point() else INTEGERS if not tensor.is_complex() else ()
        changes += [{index: name} for name in (*names, "float32") if getattr(torch, name) != tensor.dtype]
    floating = [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]
    if len(floating) > 1:
        changes += [dict.fromkeys(floating, name) for name in FLOATS]
    found = []
    for types in changes:
        changed = [t.to(getattr(torch, types[i])) if i in types else t for i, t in enumerate(tensors)]
        given = answer(changed)
        if given is None:
            continue
        back = [c.to(t.dtype) for c, t in zip(changed, tensors, strict=True)]
        wanted = answer(back)
        loose = max((_rounding(t.dtype) for t in given), default=ALIKE)
        if wanted is not None and _alike(wanted, given, loose):
            names = tuple(str(t.dtype).removeprefix("torch.") for t in given)
            found.append(Substitute(types=types, outputs=names))
    return found


def _rounding(dtype: torch.dtype) -> float:
    return max(ALIKE, 16 * torch.finfo(dtype).eps) if dtype.is_floating_point else ALIKE


def _takes_arrays(
    answer: Callable[[Sequence[Any]], list[torch.Tensor] | None],
    tensors: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
) -> bool:
    try:
        arrays = [tensor.cpu().numpy() for tensor in tensors]
    except TypeError:  # bfloat16 and such, which NumPy has not
        return False
    found = answer(arrays)
    return found is not None and _alike(reference, found, ALIKE)


def _alike(reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor], allowed: float) -> bool:
    try:
        return relative_error(reference, found).value <= allowed
    except WorkloadError:
        return False
