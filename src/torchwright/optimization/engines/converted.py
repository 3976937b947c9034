# pyright: basic
"""Third-party engines: the exported graph is converted into a file of the library's format, plain data, which it
runs.

Each of the workload's calls has one file, with the dynamic dimensions that its case declares. A model with one call
has a dynamic batch size instead, if the model allows it. The file runs at the example's sizes and, once a call asks
for them, at others.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from torchwright.core.errors import ArtifactError, RefusedTechnique, first_line
from torchwright.core.process.forks import never_freed, reopen_in_child
from torchwright.optimization.engines.base import Engine, Kept, Ready, ShippingForm
from torchwright.optimization.engines.compiled.graphs import GraphCall, Later, graph_in
from torchwright.optimization.engines.compiled.packaging import changed, described
from torchwright.optimization.engines.compiled.program import (
    FreeSizes,
    drop_constant_results,
    dynamic_shapes,
    export_one,
    write_programs,
)
from torchwright.optimization.engines.conversion import shared
from torchwright.optimization.engines.dispatch.call import parameters_of, written
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher, CompiledCall
from torchwright.optimization.engines.dispatch.guards import Check, Fallback, guards_of
from torchwright.optimization.engines.dispatch.input_capabilities import (
    perhaps_batched,
    tensors_of,
    with_rows,
    with_tensors,
)
from torchwright.optimization.engines.dispatch.results import arranged, call_result
from torchwright.optimization.engines.dispatch.spec import SIZE, TENSOR, CallSpec, InputCapabilities
from torchwright.optimization.engines.rewrites.attention_graph import attention_as_in_pytorch
from torchwright.optimization.engines.rewrites.floor_division import exact_division
from torchwright.optimization.engines.rewrites.inner_nan import flag_nan, nan_makers, wide_casts
from torchwright.optimization.engines.rewrites.real_constants import real_constants
from torchwright.optimization.engines.rewrites.whole_slices import remove_whole_slices
from torchwright.optimization.engines.safety.graph_check import structure
from torchwright.optimization.techniques.shared.engine import uninstalled
from torchwright.workloads.accuracy import flatten, relative_error
from torchwright.workloads.base import Case

if TYPE_CHECKING:
    from torchwright.optimization.techniques.base import Target

FORWARD = "forward"
CALL, FALLBACK = "call-", "fallback-"
"""The library's files, and folders with the graphs in PyTorch's own operators, for calls outside the number domain."""
OTHERS = ", other sizes"
"""The suffix of a call with dynamic shapes, after the one at the example's sizes."""
ROUNDING = 1e-3
"""Error that other sizes may add to the conversion's own."""
TYPES = frozenset(["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"])
"""That NumPy has, by which tensors are handed over."""
Infer = Callable[[list[Any]], list[Any]]
"""From arrays to arrays of their own; several threads may call at once."""


class Converted(Engine):
    """An engine that runs files of another library, which contain no code."""

    apart: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]]
    """The required package; `torchwright[NAME]` installs it."""

    dispatcher: CallDispatcher

    def __init__(self, calls: tuple[CallSpec, ...], folder: Path) -> None:
        self.calls, self.folder = calls, folder

    @classmethod
    @abstractmethod
    def convert(cls, program: ExportedProgram, spec: CallSpec, file: Path, target: Target) -> None:
        """Write the graph to `file`, whose extension is the engine's: inputs and results in the order of `spec`,
        without those that are not tensors. Raises any exception if it cannot."""

    @classmethod
    def write(cls, program: ExportedProgram, spec: CallSpec, file: Path, target: Target) -> None:
        """`convert`, of the graph in forms that the library has, and computes as PyTorch does. `finish` comes next."""
        with torch.no_grad():
            drop_constant_results(program)
            real_constants(program)
            remove_whole_slices(program)
            exact_division(program)
            attention_as_in_pytorch(program)
            cls.convert(program, spec, file, target)

    @classmethod
    def finish(cls, spec: CallSpec, file: Path, target: Target) -> None:
        """Make of what `convert` wrote, in this trial or in one before, what the target's options ask for. Files are
        replaced, never changed: others may have them, too."""

    @classmethod
    @abstractmethod
    def reader(cls, file: Path, spec: CallSpec) -> Callable[[int], Infer]:
        """Open a file, which may be untrusted, to run on this many threads. Raises `ArtifactError`."""

    @classmethod
    def unavailable(cls) -> str | None:
        return uninstalled(cls.name, cls.libraries)

    # ------------------------------------------------------------------------------------------------ prepare

    @classmethod
    def prepare(cls, target: Target, folder: Path | None = None) -> Self:
        if folder is not None:
            return cls(cls._written(target, folder), folder)
        passing = tempfile.TemporaryDirectory()
        engine = cls(cls._written(target, Path(passing.name)), Path(passing.name))
        takes = InputCapabilities(parameters=parameters_of(target.model.forward))
        calls = cls._opened(engine.folder, engine.calls, at_once=True)
        engine.dispatcher = CallDispatcher(calls, takes=takes, original=target.model)
        passing.cleanup()
        return engine

    @classmethod
    def _written(cls, target: Target, folder: Path) -> tuple[CallSpec, ...]:
        """Convert every call: first at the examples' sizes, then with dynamic shapes."""
        cases = target.workload.graphs(target.compute_dtype)

        def convert() -> tuple[CallSpec, ...]:
            only = len(cases) == 1
            return tuple(cls._call(target, case, _file(folder, i), only=only) for i, case in enumerate(cases))

        calls = shared(target, folder, convert)
        for index, spec in enumerate(calls):
            with cls._refusing():
                cls.finish(spec, _file(folder, index), target)
        fixed = (
            _at_example(spec, case) if spec.sizes else spec for case, spec in zip(cases, calls, strict=True)
        )
        free = (replace(spec, name=spec.name + OTHERS) for spec in calls if spec.sizes)
        return *fixed, *free

    @classmethod
    def _call(cls, target: Target, case: Case, file: Path, *, only: bool) -> CallSpec:
        """Converted with free sizes, where it has some and answers others as the model does; or at its own."""
        graph = _free_sizes(target, case, only=only)
        if graph is not None:
            try:
                spec = cls._one(target, case, graph, file)
                if not spec.sizes or (spec := cls._checked(target, case, spec, file)):
                    return spec
            except RefusedTechnique:
                if case.dynamic is None:
                    raise
        return cls._one(target, case, _graph(target, case), file)

    @classmethod
    def _one(
        cls, target: Target, case: Case, graph: tuple[ExportedProgram, CallSpec], file: Path
    ) -> CallSpec:
        program, spec = graph
        spec = replace(spec, guards=guards_of(program, tensors_of(case), cls.domain))
        _write_fallback(file.parent / file.name.replace(CALL, FALLBACK), program)
        with torch.no_grad():
            makers = nan_makers(program)
            bits = cls.domain.integer_bits
            if bits < 64:
                makers += wide_casts(program)
            if makers and not _answers_nan(target.model, case):
                # A result that is added for the flag is not one of the call.
                results = spec.results or (TENSOR,) * len(program.graph_signature.output_specs)
                spec = replace(spec, results=results, nan=flag_nan(program, makers, bits))
        with cls._refusing():
            cls.write(program, spec, file, target)
        return spec

    @classmethod
    @contextmanager
    def _refusing(cls) -> Generator[None]:
        """Turn the library's own errors about unsupported models into `RefusedTechnique`."""
        try:
            yield
        except RefusedTechnique:
            raise
        except Exception as error:
            raise RefusedTechnique(
                f"{cls.how} cannot take this model",
                found=_reason(error),
                next="torchwright's own engines take it",
            ) from error

    @classmethod
    def _checked(cls, target: Target, case: Case, spec: CallSpec, file: Path) -> CallSpec | None:
        """Return `spec` with the smallest batch size that is answered as the model does, or unchanged if the owner
        declares the dynamic dimensions; None if other batch sizes are wrong."""
        call = ConvertedCall(spec, cls.reader(file, spec))
        if case.dynamic is not None:
            other = _resized(case, spec)
            return spec if other and _alike(target.model, call, other, case) else None
        batched = [index for index, tensor in enumerate(spec.tensors) if _free(tensor.shape)]
        example = len(tensors_of(case)[batched[0]])
        converted = with_rows(case, batched, max(example, 2))

        def right(rows: int) -> bool:
            return _alike(target.model, call, with_rows(case, batched, rows), converted)

        if not right(2 if example == 3 else 3):
            return None
        least = 1 if right(1) else 2
        if example < least:
            return None
        return replace(spec, sizes={name: (least, most) for name, (_, most) in spec.sizes.items()})

    # -------------------------------------------------------------------------------------------------- run

    @classmethod
    def opened(cls, folder: Path, calls: tuple[CallSpec, ...], device: str) -> Self:
        engine = cls(calls, folder)
        engine.dispatcher = CallDispatcher(cls._opened(folder, calls), strict=True, device=device)
        return engine

    @classmethod
    def _opened(cls, folder: Path, calls: Sequence[CallSpec], *, at_once: bool = False) -> list[CompiledCall]:
        found: list[CompiledCall] = []
        for spec, place in zip(calls, _places(calls), strict=True):
            file = _file(folder, place)
            start = _later(cls.reader, file, spec) if spec.sizes and not at_once else cls.reader(file, spec)
            found.append(ConvertedCall(spec, start, None if at_once else _graph_in(_fallback(folder, place))))
        return found

    def __call__(self, case: Case) -> Any:
        return self.dispatcher.run(case)

    def others(self) -> Self | None:
        free = [
            call.at_any_size()
            for call in self.dispatcher.calls
            if isinstance(call, ConvertedCall) and call.spec.sizes
        ]
        if not free:
            return None
        names = {call.spec.name for call in free}
        given = [
            call for call in self.dispatcher.calls if not call.spec.sizes and call.spec.name not in names
        ]
        engine = type(self)(self.calls, self.folder)
        engine.dispatcher = CallDispatcher([*free, *given], strict=True)
        return engine

    # ------------------------------------------------------------------------------------------ keep and load

    @classmethod
    def ways(cls, own: ShippingForm) -> dict[ShippingForm, str]:
        return {"native": cls.name}

    def keep(self, folder: Path) -> str | None:
        (folder / self.name).mkdir()
        graphs = [_fallback(self.folder, index) for index in self._indices()]
        for file in (*self._files(), *(graph for graph in graphs if graph.is_dir())):
            copy = shutil.copytree if file.is_dir() else shutil.copy2
            copy(file, folder / self.name / file.name)

    def _files(self) -> list[Path]:
        """Return the folder of the converted files; temporary files lie there, too."""
        return [_file(self.folder, index) for index in self._indices()]

    def _indices(self) -> range:
        return range(sum(not spec.sizes for spec in self.calls))

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        if not kept.trusted:  # neither library promises to withstand a file that was made to harm it
            raise ArtifactError(
                f"{kept.path} holds a graph that {cls.how} would read",
                found="it was not built by this user on this machine",
                next="trust=True, or --trust, loads it all the same",
            )
        dispatcher = kept.dispatcher(cls._opened(kept.path / cls.name, kept.calls))
        return Ready(how=cls.how, run=dispatcher.run, dispatcher=dispatcher)

    @classmethod
    def load_fallback(cls, kept: Kept) -> Ready | None:
        folder, places = kept.path / cls.name, _places(kept.calls)
        graphs = [_fallback(folder, place) for place in places]
        if not all(
            graph.is_dir() for graph in graphs
        ):  # no file could keep the graph, or an older version wrote it
            return None
        dispatcher = kept.dispatcher(
            [
                Later(spec, functools.partial(graph_in, graph, FORWARD, trust=kept.trusted))
                for spec, graph in zip(kept.calls, graphs, strict=True)
            ]
        )
        return Ready(how="graphs, uncompiled", run=dispatcher.run, dispatcher=dispatcher)


class ConvertedCall:
    """One converted graph behind a dispatcher. It uses as many threads as PyTorch has at the call."""

    def __init__(
        self, spec: CallSpec, start: Callable[[int], Infer], fallback: Callable[[], GraphCall] | None = None
    ) -> None:
        self.spec, self._start, self._make_fallback = spec, start, fallback
        self._check, self._fallback = Check(spec.guards), Fallback(fallback)
        self._by_threads: dict[int, Infer] = {}
        self._one_at_a_time = threading.Lock()
        self.build = call_result(structure(spec.nesting), (), spec.results)
        reopen_in_child(self)

    def after_fork(self) -> None:
        """Start the library anew at the next call: its threads were the parent's."""
        never_freed(self._by_threads)
        self._by_threads, self._one_at_a_time = {}, threading.Lock()

    def at_any_size(self) -> ConvertedCall:
        """The same, called as the one at the example's sizes; its file is read anew."""
        return ConvertedCall(
            replace(self.spec, name=self.spec.name.removesuffix(OTHERS)), self._start, self._make_fallback
        )

    def run(self, tensors: list[torch.Tensor]) -> Any:
        threads = torch.get_num_threads()
        infer = self._by_threads.get(threads) or self._started(threads)
        given = [tensor.detach().contiguous().numpy() for tensor in tensors]
        try:
            found, why = self._check.guarded(given, lambda: infer(given))
        except Exception as error:  # of the library: graphs that it compiles may fail when they run
            raise ArtifactError("the converted graph fails on this call", found=first_line(error)) from error
        if found is None or why is not None:
            return self._fallback.run(tensors, str(why))
        if self.spec.nan is not None and _is_nan(found, self.spec.nan):
            return self._fallback.run(
                tensors, "NaN, or an integer that the engine does not hold, arises inside"
            )
        return self.build(self._leaves([torch.from_numpy(array) for array in found]))

    def _started(self, threads: int) -> Infer:
        with self._one_at_a_time:
            if threads not in self._by_threads:
                self._by_threads[threads] = self._start(threads)
        return self._by_threads[threads]

    def _leaves(self, outputs: list[torch.Tensor]) -> list[Any]:
        """The results' leaves: tensors with the types and layouts of the original's, and room for constants."""
        results = self.spec.results or (TENSOR,) * len(outputs)
        wanted = sum(kind in (TENSOR, SIZE) for kind in results)
        known = results.count(TENSOR) if self.spec.outputs is None else len(self.spec.outputs)
        if not outputs or len(outputs) < wanted or results.count(TENSOR) != known:
            raise ArtifactError(
                "the converted graph has other results than the call", found=f"{len(outputs)}"
            )
        specs = iter(self.spec.outputs or ())
        remaining = iter(outputs)
        leaves: list[Any] = []
        for kind in results:
            if kind == TENSOR and self.spec.outputs is not None:
                spec = next(specs)
                tensor = next(remaining).to(getattr(torch, spec.dtype))
                plain = spec.order == tuple(range(tensor.dim()))
                leaves.append(tensor if plain else arranged(tensor, spec.order))
            else:
                leaves.append(next(remaining) if kind in (TENSOR, SIZE) else None)
        return leaves


def _is_nan(arrays: list[Any], place: int) -> bool:
    return 0 <= place < len(arrays) and bool(arrays[place].size) and math.isnan(arrays[place].flat[0])


def _answers_nan(model: Callable[..., Any], case: Case) -> bool:
    """The example's answer was compared: what is NaN in it is computed rightly, or the engine is not kept."""
    answer = flatten(model(*case.args, **case.kwargs))
    return any(bool(tensor.isnan().any()) for tensor in answer if tensor.is_floating_point())


def _places(calls: Sequence[CallSpec]) -> list[int]:
    """The number of each call's file: one with free sizes shares that of the call at the example's."""
    indices = {spec.name + OTHERS: index for index, spec in enumerate(calls)}
    # The only call's was called otherwise once.
    return [indices.get(spec.name, 0) if spec.sizes else index for index, spec in enumerate(calls)]


def _later(
    reader: Callable[[Path, CallSpec], Callable[[int], Infer]], file: Path, spec: CallSpec
) -> Callable[[int], Infer]:
    """A reader that reads when it is first asked to run."""
    return lambda threads: reader(file, spec)(threads)


def _write_fallback(folder: Path, program: ExportedProgram) -> None:
    """Keep a graph before the library's converter changes it; nothing where no file can keep it."""
    folder.mkdir(exist_ok=True)
    try:
        write_programs(folder, {FORWARD: program})
    except RefusedTechnique:
        shutil.rmtree(folder)


def _graph_in(folder: Path) -> Callable[[], GraphCall] | None:
    """The graph in PyTorch's operators, read when it is first needed; None where an older artifact has none."""
    if not folder.is_dir():
        return None

    return lambda: graph_in(folder, FORWARD)


def _file(folder: Path, index: int) -> Path:
    return folder / f"{CALL}{index}"


def _fallback(folder: Path, index: int) -> Path:
    return folder / f"{FALLBACK}{index}"


def handed_over(name: str, program: ExportedProgram) -> CallSpec:
    """Return the graph's inputs and results. Raises `RefusedTechnique` for values that arrays and plain data cannot
    hold.
    """
    spec = described(name, program)
    if written(program):
        raise RefusedTechnique(
            "a converted graph gives answers and changes nothing",
            found="a model that changes its inputs or buffers in place",
        )
    types = {tensor.dtype for tensor in (*spec.tensors, *(spec.outputs or ()))}
    if not types <= TYPES:
        raise RefusedTechnique(
            "tensors are handed over as NumPy's arrays",
            found=", ".join(sorted(types - TYPES)),
            allowed=", ".join(sorted(TYPES)),
        )
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    try:
        nesting = structure(pytree.treespec_dumps(out_spec))
    except Exception as error:  # a class of the model's own
        raise RefusedTechnique("the form of its results cannot be kept", found=first_line(error)) from error
    return replace(spec, nesting=nesting)


def _graph(target: Target, case: Case) -> tuple[ExportedProgram, CallSpec]:
    """The call's graph at its own sizes."""
    program = changed(export_one(target.model, case, None), target.settings)
    return program, handed_over(case.name, program)


def _free_sizes(target: Target, case: Case, *, only: bool) -> tuple[ExportedProgram, CallSpec] | None:
    """Return the graph with the call's dynamic dimensions or, for the `only` call, a dynamic batch size; None
    without dynamic dimensions, or if the model does not allow them."""
    if case.dynamic is not None:
        return _exported(target, case, dynamic_shapes(target.model, case))
    tensors = tensors_of(case)
    batched = next(iter(perhaps_batched(tensors)), ())
    if not batched or not only:
        return None
    several = with_rows(case, batched, max(2, len(tensors[batched[0]])))
    found = _exported(target, several, FreeSizes(rows=batched))
    return found if found and any(_free(tensor.shape) for tensor in found[1].tensors) else None


def _exported(target: Target, case: Case, sizes: Any) -> tuple[ExportedProgram, CallSpec] | None:
    try:
        program = changed(export_one(target.model, case, sizes), target.settings)
        return program, handed_over(case.name, program)
    except RefusedTechnique:
        return None


def _resized(case: Case, spec: CallSpec) -> Case | None:
    """Return the call with each dynamic size at about half; None if that is impossible for all."""
    tensors = tensors_of(case)
    sizes = spec.bind([tuple(tensor.shape) for tensor in tensors])
    if not sizes or not sizes.keys() <= spec.sizes.keys():
        return None
    others = {name: _other(size, *spec.sizes[name]) for name, size in sizes.items()}
    if others == sizes:
        return None
    made = []
    for tensor, taken in zip(tensors, spec.tensors, strict=True):
        for dim, name in enumerate(taken.shape):
            if isinstance(name, str):
                tensor = torch.cat([tensor, tensor], dim).narrow(dim, 0, others[name])
        made.append(tensor.contiguous())
    return with_tensors(case, made)


def _other(size: int, least: int, most: int | None) -> int:
    """Another size than this one, where there is one."""
    half = max(least, size // 2, 1)
    return half if half < size else size if most == size else size + 1


def _free(shape: tuple[int | str, ...]) -> bool:
    return bool(shape) and isinstance(shape[0], str)


def _at_example(spec: CallSpec, case: Case) -> CallSpec:
    """A call with free sizes, for the example's alone."""
    sizes = spec.bind([tuple(tensor.shape) for tensor in tensors_of(case)])
    assert sizes is not None

    def bound(tensors: Any) -> Any:
        return tuple(replace(t, shape=tuple(sizes.get(size, size) for size in t.shape)) for t in tensors)

    outputs = None if spec.outputs is None else bound(spec.outputs)
    return replace(spec, tensors=bound(spec.tensors), sizes={}, outputs=outputs)


def _alike(model: Callable[..., Any], call: ConvertedCall, other: Case, converted: Case) -> bool:
    """Check that a converted graph answers another call as the model does, up to rounding or twice its error at the
    sizes of its conversion."""
    error = _error(model, call, other)
    return error <= ROUNDING or error <= 2 * _error(model, call, converted) < float("inf")


def _error(model: Callable[..., Any], call: ConvertedCall, case: Case) -> float:
    """Between the model's answer and the converted graph's."""
    try:
        with torch.no_grad():
            wanted = flatten(model(*case.args, **case.kwargs))
        return relative_error(wanted, flatten(call.run(tensors_of(case)))).value
    except Exception:  # of the other library, or of a model that does not take this batch size
        return float("inf")


def _reason(error: Exception) -> str:
    """The line of a message that names what is not known, where there is one, and its first otherwise."""
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    named = [
        line for line in lines if line.startswith("--") or "not supported" in line or "No conversion" in line
    ]
    return (named or lines or [type(error).__name__])[0][:300]
