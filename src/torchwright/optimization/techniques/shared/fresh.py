# pyright: basic
"""Check that a changed model still answers as before: on its own calls, and on others that its branches may take."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.errors import RefusedTechnique, abbreviated
from torchwright.workloads.base import Case

TOLERANCE = 1e-4
"""Largest relative error (Frobenius norm) of any tensor; a number kept as a tensor has the tensor's precision."""
SEED = 0
FORMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x,
    lambda x: -x,
    torch.zeros_like,
    lambda x: x * 100,
    lambda x: torch.rand_like(x) - 0.5,
    lambda x: torch.randn_like(x) * x.std(correction=0) + x.mean(),
)
"""Floating-point inputs in which values of other signs and sizes take other branches."""


def answers(model: nn.Module, cases: Sequence[Case]) -> list[Any]:
    """Return the model's answer to each case in each form of its inputs; an exception where it raises.

    Raises `RefusedTechnique` where it draws from Python's or NumPy's generators, whose numbers a graph would hold fast.
    """
    found = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _nothing_drawn():
        for args, kwargs in _calls(cases):
            torch.manual_seed(SEED)
            try:
                found.append(nested.map_tensors(torch.clone, model(*args, **kwargs)))
            except Exception as error:
                found.append(error)
    return found


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    before = _generators()
    yield
    if _generators() != before:
        raise RefusedTechnique(
            "this model cannot be made one graph by rewriting lines",
            found="it draws random numbers from Python's or NumPy's generator",
            next="torch's own generators stay random in a graph",
        )


def _generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def disagreement(before: Sequence[Any], after: Sequence[Any]) -> str | None:
    """Return how a model's answers differ from its earlier ones, in words; calls that raised before are not
    compared.
    """
    for expected, found in zip(before, after, strict=True):
        if isinstance(expected, Exception):
            continue
        if isinstance(found, Exception):
            return f"it raises {type(found).__name__}: {str(found).partition(chr(10))[0][:200]}"
        (left, spec), (right, other) = nested.flatten(expected), nested.flatten(found)
        if spec != other:
            return f"it returns {abbreviated(str(other), 200)} in place of {abbreviated(str(spec), 200)}"
        for a, b in zip(left, right, strict=True):
            reason = _unlike(a, b)
            if reason:
                return reason
    return None


def _calls(cases: Sequence[Case]) -> Iterator[tuple[Any, Any]]:
    """Return fresh copies of the calls: floating-point inputs in all forms, other inputs with their rows in another
    order.
    """
    torch.manual_seed(SEED)
    for case in cases:
        for index, form in enumerate(FORMS):

            def changed(x: torch.Tensor, index: int = index, form: Any = form) -> torch.Tensor:
                if x.is_floating_point() and x.numel():
                    return form(x.clone())
                return x.flip(0) if index and x.dim() else x.clone()

            yield nested.map_tensors(changed, (case.args, copy.copy(case.kwargs)))


def _unlike(a: Any, b: Any) -> str | None:
    if not isinstance(a, torch.Tensor):
        return None if type(a) is type(b) and (a == b or a != a) else f"{b!r} in place of {a!r}"[:200]
    if not isinstance(b, torch.Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
        kind = f"{b.dtype} {list(b.shape)}" if isinstance(b, torch.Tensor) else type(b).__name__
        return f"a result is {kind} in place of {a.dtype} {list(a.shape)}"
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    if not (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())):
        return "NaN or infinity is at other places"
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    error = float((a - b).norm() / a.norm().clamp_min(1e-30)) if not torch.equal(a, b) else 0.0
    return f"its results change by {error:.1e}, {TOLERANCE:.0e} is allowed" if error > TOLERANCE else None
