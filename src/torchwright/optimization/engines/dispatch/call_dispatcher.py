# pyright: basic, reportPrivateUsage=false
"""Dispatches calls to compiled code, caching the chosen path per input signature.

    dispatcher = CallDispatcher(calls, takes=…, general=…, original=…)
    dispatcher(x, mask=None)     → the result of the path for this signature, found or cached

Compiled code takes its inputs as if they were laid out like the example's. So types, sizes, strides and devices are
part of a call's signature. The paths, the fastest first:

1. a compiled call of these sizes; a tensor that lies otherwise in memory is copied
2. other batch sizes in pieces, or padded, by a compiled call
3. a graph, operator by operator: with all shapes dynamic, or for one row
4. one of these with tensors of another type, if the original gave equal answers for them
5. the original, if the caller has given it

`by_rows` gives the order of the first three per batch size, where it was measured. Paths 2 to 5 are reported once, as a
`SlowerCall` warning; with `strict` only the first is taken.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._C._functorch import peek_interpreter_stack as _peek_interpreter_stack

from torchwright.core import nested
from torchwright.core.errors import WorkloadError
from torchwright.hardware.kernels.cpu.threads import torch_threads
from torchwright.optimization.engines.dispatch.call import Binder, is_array, numbered, seen
from torchwright.optimization.engines.dispatch.call_guard import CallGuard
from torchwright.optimization.engines.dispatch.messages import say_slower, signature, text_of, untraceable
from torchwright.optimization.engines.dispatch.spec import (
    CallSpec,
    InputCapabilities,
    NotHeld,
    OutsideDomain,
    TensorSpec,
)
from torchwright.workloads.base import Case
from torchwright.workloads.rows import Pieces

OutputLayout = tuple[Any, Any, torch.dtype]
"""Shape, strides and type of a tensor."""
CallPath = Callable[[list[torch.Tensor]], Any]
"""Takes a call's tensors in the caller's order."""


class CompiledCall(Protocol):
    """One compiled or exported call."""

    spec: CallSpec
    build: Callable[[list[Any]], Any]
    """Makes the result of the flat outputs."""

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The result for tensors in the order, and with the layout, of `spec`."""
        ...


class CallDispatcher:
    """Answers calls of the original's form by compiled ones."""

    remembered: int = 1024
    """Signatures whose path is cached."""

    def __init__(
        self,
        calls: Sequence[CompiledCall],
        *,
        takes: InputCapabilities | None = None,
        by_rows: Sequence[tuple[int, str]] = (),
        general: Sequence[CompiledCall] = (),
        original: Callable[..., Any] | None = None,
        device: str = "cpu",
        threads: int | None = None,
        strict: bool = False,
    ) -> None:
        self.calls, self.takes, self._by_rows = list(calls), takes or InputCapabilities(), by_rows
        self.general, self.original, self.strict = tuple(general), original, strict
        self._by_name = {call.spec.name: call for call in calls}
        self._binder = Binder(self.takes.parameters)
        self._device, self._threads = torch.device(device), threads
        self._known: dict[Any, tuple[CallPath | None, tuple[CallGuard, CallPath] | None]] = {}
        self._recent: tuple[CallGuard, CallPath] | None = None
        """The signature of the last call and its path, if calls like it may skip the lookup."""
        self._warned: set[str] = set()
        self.mutates = any(call.spec.mutates for call in self._all_calls())
        """True if a call changes one of its inputs in place."""
        self.returns_instances = any(nested.has_classes(call.spec.nesting) for call in self._all_calls())
        """True if a result is of a class that pytree does not know: a dataclass, or a named tuple."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recent = self._recent
        if recent is not None:
            tensors = recent[0].tensors_of(args, kwargs)
            if tensors is not None:
                try:
                    return self._guarded(recent[1], tensors)
                except NotHeld:
                    pass  # contextlib.suppress takes half a microsecond
        return self._looked_up(args, kwargs)

    def _looked_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key: list[Any] = []
        tensors: list[torch.Tensor] = []
        try:
            for value in args:
                if type(value) is torch.Tensor:
                    key.append(
                        (value.dtype, value.shape, value.stride(), value.device, value.layout, value.is_neg())
                    )
                    tensors.append(value)
                else:
                    seen(value, key, tensors)
            if kwargs:
                key.append(tuple(kwargs))
                for value in kwargs.values():
                    seen(value, key, tensors)
            looks = tuple(key)
            known = self._known.get(looks)
        except (TypeError, RuntimeError):  # what cannot be compared, or has no strides
            return self._run_unusual(args, kwargs)
        if known is None:
            path = self._find_path(args, kwargs, tensors)
            if len(self._known) >= self.remembered:
                self._known.clear()
            known = self._known[looks] = path, self._call_guard(path, args, kwargs, tensors)
        path, recent = known
        if self.mutates and path is not None and _overlap(tensors):
            self._fall_back(args, kwargs, "it changes its inputs, and these share memory")
            path = None
        if path is None:
            return self.by_original(args, kwargs)
        if recent is not None and recent[0].tensors_of(args, kwargs) is None:  # it was made in another mode
            recent = self._call_guard(path, args, kwargs, tensors) or recent
            self._known[looks] = path, recent
        self._recent = recent
        try:
            return self._guarded(path, tensors)
        except OutsideDomain as error:  # of this call's values: the next may be within
            return self._outside(args, kwargs, error)
        except NotHeld:
            if self.original is None:
                raise
            self._known[looks] = self._fall_back(args, kwargs), None
            self._recent = None
            return self.by_original(args, kwargs)

    def _call_guard(
        self,
        path: CallPath | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> tuple[CallGuard, CallPath] | None:
        if path is None or self.mutates:  # what changes its inputs is looked at every time
            return None
        found = CallGuard.of(args, kwargs, tensors)
        return None if found is None else (found, path)

    def run(self, case: Case) -> Any:
        """Make a call by its name, if it is known by that, or by what it looks like."""
        if not case.fixed:
            return self(*case.args, **case.kwargs)
        tensors: list[torch.Tensor] = []
        seen((case.args, case.kwargs), [], tensors)
        try:
            return self._guarded(self._by_name[case.name].run, tensors)
        except OutsideDomain as error:
            return self._outside(case.args, case.kwargs, error)

    def _outside(self, args: Any, kwargs: Any, error: OutsideDomain) -> Any:
        """The original's answer to a call with values that the engine does not compute as PyTorch does."""
        if self.original is None:
            raise error
        self._warn_once("domain", f"the original: {error.found}", args, kwargs)
        with torch.no_grad():
            return self.original(*args, **kwargs)

    def _guarded(self, path: CallPath, tensors: list[torch.Tensor]) -> Any:
        """Compiled code computes in its own types, records nothing for gradients, and cannot be traced."""
        if torch._C._get_tracing_state() is not None:
            raise untraceable("torch.jit.trace")
        if _peek_interpreter_stack() is not None:
            raise untraceable("torch.func")
        if self._threads is not None and self._threads != torch.get_num_threads():
            return self._on_threads(path, tensors)
        gradients = torch.is_grad_enabled()
        if gradients:
            torch._C._set_grad_enabled(False)
        try:
            if torch._C._is_any_autocast_enabled():
                with torch._C._DisableAutocast():
                    return path(tensors)
            return path(tensors)
        finally:
            if gradients:
                torch._C._set_grad_enabled(True)

    def _on_threads(self, path: CallPath, tensors: list[torch.Tensor]) -> Any:
        with torch_threads(self._threads):
            return self._guarded(path, tensors)

    def result_of(self, args: Any, kwargs: Any) -> tuple[CompiledCall, list[OutputLayout]] | None:
        """For a call whose tensors may have sizes and no data: what makes its result of flat outputs, and of those
        that are tensors the form. None where only the original takes it."""
        leaves = nested.tensors((args, kwargs))
        counter = [0]
        given = numbered(args, counter), numbered(kwargs, counter)
        for structure, calls in itertools.groupby(self._all_calls(), key=lambda call: call.spec.structure):
            order = self._binder.place(structure, *given)
            if order is not None:
                tensors = [leaves[i] for i in order]
                types, shapes = [_name(t.dtype) for t in tensors], [tuple(t.shape) for t in tensors]
                found = self._predicted(list(calls), types, shapes)
                if found is not None:
                    return found
        return None

    def _predicted(
        self, calls: Sequence[CompiledCall], types: list[str], shapes: list[tuple[Any, ...]]
    ) -> tuple[CompiledCall, list[OutputLayout]] | None:
        """Return where `_way` will lead."""
        for call, rows in self._candidates(calls, types, shapes):
            fitted = shapes if rows is None else self._fitted(call, shapes)
            if fitted is not None and call.spec.outputs is not None:
                sizes = call.spec.bind(fitted) or {}
                return call, [_sized(spec, sizes, rows) for spec in call.spec.outputs]
        outputs = None if self.strict else self._outputs_of(calls, types)
        if outputs is None:
            return None
        found = self._predicted(calls, _types(calls[0]), shapes)
        if found is None or len(found[1]) != len(outputs):
            return None
        call, forms = found
        return call, [
            (shape, strides, getattr(torch, name))
            for (shape, strides, _), name in zip(forms, outputs, strict=True)
        ]

    def _candidates(
        self, calls: Sequence[CompiledCall], types: list[str], shapes: list[tuple[Any, ...]]
    ) -> list[tuple[CompiledCall, Any]]:
        """Return the calls that take tensors like these, the best first, with the batch size if it is split into
        pieces.
        """
        found: list[tuple[CompiledCall, Any]] = []
        count = self._rows(shapes)
        for call in calls:
            if _types(call) != types:
                continue
            if call.spec.bind(shapes) is not None:
                found.append((call, None))
            elif self.takes.pieces and count is not None and not self.strict and self._fitted(call, shapes):
                found.append((call, count))
        wished = [name for least, name in self._by_rows if isinstance(count, int) and least <= count][-1:]
        rank = lambda candidate: (
            candidate[0].spec.name not in wished,
            candidate[0] in self.general,
            candidate[1] is not None,
        )
        return sorted(found, key=rank)

    # -------------------------------------------------------------------------------------- finding the path

    def _find_path(self, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> CallPath | None:
        """Return the path of a call; None for the original. Raises `WorkloadError` if there is none."""
        if any(isinstance(leaf, torch.fx.Proxy) for leaf in nested.leaves((args, kwargs))):
            raise untraceable("torch.fx")
        counter = [0]
        given_args, given_kwargs = numbered(args, counter), numbered(kwargs, counter)
        if any(tensor.layout != torch.strided or tensor.is_meta for tensor in tensors):
            return self._fall_back(args, kwargs, "a tensor is sparse, or has no data")
        structures = itertools.groupby(self._all_calls(), key=lambda call: call.spec.structure)
        for structure, calls in structures:
            order = self._binder.place(structure, given_args, given_kwargs)
            if order is None:
                continue
            path = self._path(list(calls), [tensors[i] for i in order])
            if path is not None:
                return path if order == list(range(len(tensors))) else _reordered(path, order)
        return self._fall_back(args, kwargs)

    def _fall_back(self, args: Any, kwargs: Any, why: str = "") -> None:
        """Return the path to the original; raises `WorkloadError` if there is none."""
        if self.original is None or self.strict:
            raise self._refused(args, kwargs, why)
        self._warn_once("original", "the original, since what was compiled takes no such call", args, kwargs)

    def _all_calls(self) -> list[CompiledCall]:
        return self.calls if self.strict else [*self.calls, *self.general]

    def _path(self, calls: Sequence[CompiledCall], tensors: list[torch.Tensor]) -> CallPath | None:
        """For tensors in the order of `calls`, which differ in their sizes only."""
        types, shapes = [_name(t.dtype) for t in tensors], [tuple(t.shape) for t in tensors]
        for call, rows in self._candidates(calls, types, shapes):
            if rows is not None:
                return self._in_pieces(call, rows, tensors)
            if call not in self.general:
                return self._with_layout(call, tensors)
            self._warn_once("general", "operator by operator, for want of a quicker compiled call", tensors)
            elsewhere = any(tensor.device.type != self._device.type for tensor in tensors)
            return self._with_layout(call, tensors) if elsewhere else call.run
        return None if self.strict else self._retyped(calls, types, tensors)

    def _with_layout(self, call: CompiledCall, tensors: list[torch.Tensor]) -> CallPath:
        """`call` for tensors that lie otherwise: each of those is copied, and back where the call changes it."""
        fixes = [_layout_fix(s, t, self._device) for s, t in zip(call.spec.tensors, tensors, strict=True)]
        if not any(fixes):
            return call.run
        home = tensors[0].device
        changed = [index for index in call.spec.mutates if fixes[index]]

        def path(given: list[torch.Tensor]) -> Any:
            placed = [fix(t) if fix else t for fix, t in zip(fixes, given, strict=True)]
            result = call.run(list(placed))
            for index in changed:
                given[index].copy_(placed[index])
            if home != self._device:
                result = nested.map_tensors(lambda t: t.to(home), result)
            return result

        return path

    def _retyped(
        self, calls: Sequence[CompiledCall], found: list[str], tensors: list[torch.Tensor]
    ) -> CallPath | None:
        wanted = _types(calls[0])
        changes = {i: b for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b}
        outputs = self._outputs_of(calls, found)
        if outputs is None or any(changes.keys() & call.spec.mutates for call in calls):
            return None
        targets = [getattr(torch, name) for name in wanted]
        inner = self._path(calls, [t.to(d) for t, d in zip(tensors, targets, strict=True)])
        if inner is None:
            return None
        self._warn_once(
            "types", f"tensors brought to {', '.join(sorted({wanted[i] for i in changes}))} first", tensors
        )
        types = [getattr(torch, name) for name in outputs]

        def path(given: list[torch.Tensor]) -> Any:
            leaves, spec = nested.flatten(inner([t.to(d) for t, d in zip(given, targets, strict=True)]))
            remaining = iter(types)
            leaves = [t.to(next(remaining)) if isinstance(t, torch.Tensor) else t for t in leaves]
            return nested.unflatten(leaves, spec)

        return path

    def _outputs_of(self, calls: Sequence[CompiledCall], types: Sequence[str]) -> tuple[str, ...] | None:
        """The types that the original answers with when its inputs have these; None where it was not seen to."""
        changes = {i: b for i, (a, b) in enumerate(zip(_types(calls[0]), types, strict=True)) if a != b}
        return (
            next((s.outputs for s in self.takes.substitutes if s.types == changes), None) if changes else None
        )

    def _in_pieces(self, call: CompiledCall, rows: int, tensors: list[torch.Tensor]) -> CallPath:
        B = call.spec.tensors[self.takes.batched[0]].shape[0]
        assert isinstance(B, int)
        self._warn_once("pieces", f"{rows} rows by compiled calls of {B}", tensors)
        return Pieces(functools.partial(self._run_with_layout, call), self.takes.batched, B)

    def _rows(self, shapes: Sequence[tuple[Any, ...]]) -> Any:
        """Return a call's batch size; None if it has none, or several."""
        batched = self.takes.batched
        if not (batched and all(i < len(shapes) and shapes[i] for i in batched)):
            return None
        rows = shapes[batched[0]][0]
        return rows if all(shapes[i][0] == rows for i in batched) else None

    def _fitted(self, call: CompiledCall, shapes: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]] | None:
        """Return the shapes with the batch size that `call` is compiled for; None if it is not compiled for these.

        Not for one that changes its inputs: it would change a piece, or one piece twice.
        """
        wanted, batched = [s.shape for s in call.spec.tensors], self.takes.batched
        sizes = {wanted[i][0] for i in batched if wanted[i]}
        if call.spec.mutates or len(sizes) != 1 or not isinstance(B := sizes.pop(), int):
            return None
        fitted = [(B, *shape[1:]) if i in batched else shape for i, shape in enumerate(shapes)]
        return fitted if call.spec.bind(fitted) is not None else None

    def _run_with_layout(self, call: CompiledCall, tensors: list[torch.Tensor]) -> Any:
        return self._with_layout(call, tensors)(tensors)

    # ------------------------------------------------------------------------------------------- other calls

    def _run_unusual(self, args: Any, kwargs: Any) -> Any:
        """A call with something else than plain tensors and values in it."""
        leaves = nested.leaves((args, kwargs))
        if torch.compiler.is_exporting():
            raise untraceable("torch.export")
        if self.takes.arrays and any(is_array(leaf) for leaf in leaves):
            args, kwargs = nested.map_leaves(lambda v: _tensor_of(v) if is_array(v) else v, (args, kwargs))
            return self(*args, **kwargs)
        if any(isinstance(leaf, torch.Tensor) and type(leaf).__name__ == "FakeTensor" for leaf in leaves):
            raise untraceable("a tracer")
        if self.original is None or self.strict:
            raise self._refused(args, kwargs)
        self._warn_once("odd", "the original, since what was compiled takes plain tensors", args, kwargs)
        return self.by_original(args, kwargs)

    def by_original(self, args: Any, kwargs: Any) -> Any:
        """Return the original's answer; raises `WorkloadError` without an original."""
        if self.original is None or self.strict:
            raise self._refused(args, kwargs)
        with torch.no_grad():
            return self.original(*args, **kwargs)

    def _warn_once(self, path: str, how: str, *call: Any) -> None:
        if path not in self._warned:
            self._warned.add(path)
            say_slower(how, signature(call, {}))

    def _refused(self, args: Any, kwargs: Any, why: str = "") -> WorkloadError:
        return WorkloadError(
            "this model was compiled for other calls",
            found=f"{signature(args, kwargs)}; {why}" if why else signature(args, kwargs),
            allowed="; ".join(dict.fromkeys(text_of(call.spec) for call in self._all_calls())) or "none",
            next="optimize with a list of inputs that has every shape; or tw.load(DIR, original=MODEL), "
            "which takes what is left",
        )


def _sized(spec: TensorSpec, sizes: Mapping[str, int], rows: Any = None) -> OutputLayout:
    shape: list[Any] = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
    if rows is not None:
        shape[0] = rows
    return shape, spec.strides(shape), getattr(torch, spec.dtype)


def _types(call: CompiledCall) -> list[str]:
    return [tensor.dtype for tensor in call.spec.tensors]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor_of(array: Any) -> torch.Tensor:
    """Shares the array's memory where torch can."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Check whether two of the tensors share an element; tensors that lie in one another's gaps count as sharing."""
    spans = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    spans.sort()
    return any(first[1] > second[0] for first, second in itertools.pairwise(spans))


def _reordered(path: CallPath, order: Sequence[int]) -> CallPath:
    return lambda tensors: path([tensors[i] for i in order])


def _layout_fix(
    spec: Any, tensor: torch.Tensor, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that brings tensors like this one into a compiled call's layout, or None if they have it
    already.
    """
    wanted = spec.strides(tensor.shape)
    apart = tensor.numel() and any(
        a != b and size > 1 for a, b, size in zip(tensor.stride(), wanted, tensor.shape, strict=True)
    )
    if apart or tensor.is_neg() or tensor.device.type != device.type:
        return lambda t: torch.empty_strided(t.shape, wanted, dtype=t.dtype, device=device).copy_(t)
    return torch.resolve_conj if tensor.is_complex() else None  # a conjugate looks like what it is of
