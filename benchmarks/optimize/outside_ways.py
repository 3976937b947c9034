"""Ways to call a module of outside.py: other strides, batches, dtypes, threads and habits; errors of the answers.

Torchwright is not imported: the original's process must hold nothing of Torchwright.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.models.outside import Inputs

EXAMPLE = "contiguous"
BUSY_THREADS, BUSY_CALLS = 4, 3
Model = Callable[..., Any]
Way = Callable[[Model], Any]
"""A way to call a model: given the original or the artifact, returns what is to agree."""


@dataclass(frozen=True)
class Call:
    """A call's arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Inputs) -> Call:
        return cls((), inputs) if isinstance(inputs, dict) else cls(inputs, {})

    def tensors(self) -> list[torch.Tensor]:
        return [
            leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)
        ]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, self.kwargs))
        return Call(args, kwargs)

    @property
    def batch(self) -> int | None:
        """The leading dimension that all tensors share."""
        sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in self.tensors()}
        return sizes.pop() if len(sizes) == 1 else None

    def sizes(self) -> list[int]:
        """Other batches: one, half, three, double."""
        if not self.batch:
            return []
        return sorted({1, max(1, self.batch // 2), 3, 2 * self.batch} - {self.batch})

    def rows(self, count: int) -> Call:
        """The same call with this many rows, last ones first, so that no row is where it was."""
        assert self.batch
        index = torch.arange(count).flip(0) % self.batch
        return self.map(lambda x: x[index])


def ways(original: nn.Module, call: Call) -> dict[str, Way]:
    """Name → way to call. The first is the example as it is."""
    found = {EXAMPLE: plainly(call)}
    found |= {name: plainly(call.map(change)) for name, change in layouts(call).items()}
    if call.batch:
        found |= {f"batch {count}": plainly(call.rows(count)) for count in call.sizes()}
    found["other values"] = plainly(call.map(other_values))
    found |= {str(dtype).removeprefix("torch."): plainly(other) for dtype, other in dtypes(call).items()}
    if (bound := bound_otherwise(original, call)) is not None:
        found["by name" if call.args else "by position"] = plainly(bound)
    found |= {f"threads {count}": on_threads(call, count) for count in (1, 2)}
    found |= modes(call)
    found |= {
        "inputs written over": lambda model: after_writing_inputs(model, call),
        "answer written over": lambda model: after_writing_answer(model, call),
        "answer kept": lambda model: after_another_call(model, call),
        "inputs as they were": lambda model: inputs_after(model, call),
        f"{BUSY_THREADS} callers at once": lambda model: at_once(model, call),
    }
    return found


def plainly(call: Call) -> Way:
    def way(model: Model) -> Any:
        with torch.inference_mode():
            return model(*call.args, **call.kwargs)

    return way


def layouts(call: Call) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The same values, but for `expanded`, in storage that lies otherwise; where no tensor can lie so, none."""
    most = max(tensor.ndim for tensor in call.tensors())
    found = {
        "rows strided": rows_strided,
        "last axis strided": last_axis_strided,
        "offset": lambda x: at_offset(x, 64),
        "misaligned": lambda x: at_offset(x, 1),
        "expanded": lambda x: x[:1].expand_as(x),
    }
    if most >= 2:
        found["transposed"] = lambda x: x.mT.contiguous().mT if x.ndim >= 2 else x
        found["batch innermost"] = lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0)
    if most in (4, 5):
        found["channels last"] = channels_last
    return found


def rows_strided(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_zeros(2 * x.shape[0], *x.shape[1:])
    wide[::2] = x
    return wide[::2]


def last_axis_strided(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def at_offset(x: torch.Tensor, elements: int) -> torch.Tensor:
    flat = x.new_zeros(x.numel() + elements)
    flat[elements:] = x.flatten()
    return flat[elements:].view(x.shape)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    if x.ndim not in (4, 5):
        return x
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def other_values(x: torch.Tensor) -> torch.Tensor:
    """Rows backwards, and floating numbers smaller: integers must stay within what they index."""
    return x.flip(0) * 0.7 if x.is_floating_point() else x.flip(0)


def dtypes(call: Call) -> dict[torch.dtype, Call]:
    """Every floating tensor in another type, or every int64 in int32."""

    def cast(source: torch.dtype, target: torch.dtype) -> Call:
        return call.map(lambda x: x.to(target) if x.dtype == source else x)

    present = {tensor.dtype for tensor in call.tensors()}
    found = {}
    if torch.float32 in present:
        found |= {to: cast(torch.float32, to) for to in (torch.float64, torch.bfloat16, torch.float16)}
    if torch.int64 in present:
        found[torch.int32] = cast(torch.int64, torch.int32)
    return found


def bound_otherwise(original: nn.Module, call: Call) -> Call | None:
    """Positional arguments by keyword, or the other way round; None where the names do not tell."""
    signature = inspect.signature(original.forward)
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values()):
        return None
    arguments = signature.bind(*call.args, **call.kwargs).arguments
    return Call((), arguments) if call.args else Call(tuple(arguments.values()), {})


def on_threads(call: Call, count: int) -> Way:
    """With this many threads, which the call must leave as they are."""

    def way(model: Model) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return plainly(call)(model), torch.get_num_threads()
        finally:
            torch.set_num_threads(before)

    return way


def modes(call: Call) -> dict[str, Way]:
    """Grad modes, for the call and for where its inputs were made."""

    def under(mode: Callable[[], contextlib.AbstractContextManager[Any]], call: Call) -> Way:
        def way(model: Model) -> Any:
            with mode():
                return model(*call.args, **call.kwargs)

        return way

    with torch.inference_mode():
        made_in_inference = call.map(torch.clone)
    return {
        "no_grad": under(torch.no_grad, call),
        "no guard": under(contextlib.nullcontext, call),
        "inference tensors": under(torch.inference_mode, made_in_inference),
        "inference tensors, no_grad": under(torch.no_grad, made_in_inference),
    }


def after_writing_inputs(model: Model, call: Call) -> Any:
    """An answer must not be a view of what the caller owns."""
    own = call.map(torch.clone)
    answer = plainly(own)(model)
    for tensor in own.tensors():
        tensor.zero_()
    return answer


def after_writing_answer(model: Model, call: Call) -> Any:
    """The next answer must not depend on what the caller did with this one."""
    with torch.inference_mode():
        for tensor in pytree.tree_leaves(plainly(call)(model)):
            tensor.zero_()
    return plainly(call)(model)


def after_another_call(model: Model, call: Call) -> Any:
    """An answer must outlive the next call."""
    answer = plainly(call)(model)
    plainly(call.map(other_values))(model)
    return answer


def inputs_after(model: Model, call: Call) -> Any:
    own = call.map(torch.clone)
    plainly(own)(model)
    return own.tensors()


def at_once(model: Model, call: Call) -> Any:
    """The answers to calls from several threads, each with rows in an order of its own."""
    calls = [
        call.map(lambda x, shift=i: x.roll(shift, 0)) if call.batch else call for i in range(BUSY_THREADS)
    ]
    answers: list[Any] = [None] * BUSY_THREADS
    failures: list[Exception] = []

    def caller(index: int) -> None:
        try:
            answers[index] = [plainly(calls[index])(model) for _ in range(BUSY_CALLS)]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(BUSY_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return answers


def difference(expected: Any, got: Any) -> tuple[str, float]:
    """(what is wrong beyond numbers, the worst relative error of an output)"""
    before, spec = pytree.tree_flatten(expected)
    after, other = pytree.tree_flatten(got)
    if spec != other:
        return f"answers with {other}"[:200], math.inf
    worst = 0.0
    for one, two in zip(map(torch.as_tensor, before), map(torch.as_tensor, after), strict=True):
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            wanted = f"{one.dtype} {list(one.shape)}"
            return f"answers with {two.dtype} {list(two.shape)}, not {wanted}", math.inf
        worst = max(worst, relative_error(one, two))
    return "", worst


def relative_error(reference: torch.Tensor, found: torch.Tensor) -> float:
    """‖found − reference‖ / ‖reference‖; of whole numbers the share that differ. NaN and infinity must be the same."""
    if not reference.is_floating_point():
        return (reference != found).double().mean().item() if reference.numel() else 0.0
    reference, found = reference.double(), found.double()
    finite = reference.isfinite()
    if not torch.equal(reference[~finite].nan_to_num(), found[~finite].nan_to_num()):
        return math.inf
    error = (found[finite] - reference[finite]).norm().item() / (reference[finite].norm().item() or 1.0)
    return math.inf if math.isnan(error) else error
