# pyright: basic, reportAttributeAccessIssue=false
"""The state of a trial's process and its requests. Only requests that need the compiler import it."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchwright.core.errors import RefusedTechnique
from torchwright.hardware.measure.page_faults import page_fault_seconds
from torchwright.optimization.engines.base import Engine, engines
from torchwright.optimization.trial.values import Memory, OpenedArtifact, Prepared

if TYPE_CHECKING:
    from torchwright.core.records import Ranked
    from torchwright.optimization.engines.describe import Description
    from torchwright.optimization.profile.values import Breaks, Recording
    from torchwright.optimization.trial.timed import TimedCalls


def joined(first: Any, more: Any) -> Any:
    """Return the observations on two samples as those on both: rows after rows, batches after batches."""
    if isinstance(first, dict):
        return {name: joined(value, more[name]) for name, value in first.items()}
    if isinstance(first, list):
        return [*first, *more]
    import torch

    return torch.cat([first, more])


def _bytes(observed: Any) -> int:
    from torchwright.core import nested

    return sum(tensor.nbytes for tensor in nested.tensors(observed))


class TrialSession:
    """One trial's state; every public method is a request."""

    calls: TimedCalls
    kept_bytes: int = 64 * 2**20
    """Largest observations that are kept, for more of the data to be added; of larger ones the sample runs again."""

    def __init__(self) -> None:
        self.target: Any = None
        self.run: Any = None
        self.engine: Engine | None = None
        """None where an artifact was loaded."""
        self._trouble: BaseException | None = None
        self._shown: list[Any] = []
        self._observed: dict[bool, tuple[Any, Any]] = {}
        """Held out or not → what ran, and its observations on the sample, which `further` goes on from."""

    def unpack(self, workload: str, path: list[str]) -> None:
        """Unpack the workload that our own parent process wrote; what goes wrong in it is said by `init`."""
        sys.path[:] = path
        from torchwright.optimization.trial import travel

        try:
            self.workload = travel.unpack(Path(workload))
        except BaseException as error:
            self._trouble = error

    def init(
        self,
        *,
        device: str,
        threads: int,
        seed: int,
        scratch: str,
        any_threads: bool = False,
        workload: str | None = None,
        path: list[str] | None = None,
    ) -> None:
        """Get the workload, where it is not here already, and the device ready.

        This process ends by being killed: what native code leaves among temporary files, unpacked packages above all,
        lies in `scratch`. Python's own stay where they were, and below them what torch compiles and keeps. With
        `any_threads` code is compiled for as many threads as its process has at the call.
        """
        import torch

        from torchwright.hardware.devices import get_device

        tempfile.gettempdir()  # it remembers its answer
        os.environ["TMPDIR"] = scratch
        if workload is not None:
            self.unpack(workload, path or sys.path)
        if self._trouble is not None:
            raise self._trouble
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        if any_threads:
            import torch._inductor.config

            torch._inductor.config.cpp.dynamic_threads = True
        self.seed = seed
        self.device, self.workload.device = get_device(device), device
        self.device.start()
        self.threads = threads

    def refusals(self, *, steps: tuple[Any, ...], given: frozenset[str]) -> list[tuple[Any, str | None]]:
        """Return each of `steps` with the reason why it cannot run on the original, or None."""
        from torchwright.optimization.engines.apply import refusal

        self._build()
        return [(step, refusal(self.target, step, given)) for step in steps]

    def describe(self, *, names: tuple[str, ...] | None = None) -> Description:
        """Describe the original: properties, variants with refusals, kernel times, operations."""
        from torchwright.optimization.engines.describe import describe_target

        self._build()
        return describe_target(self.target, names)

    def prepare(
        self,
        *,
        steps: tuple[Any, ...],
        folder: str | None = None,
        conversions: str | None = None,
        compiled: bool = True,
    ) -> Prepared:
        """Apply steps and make the first answers; an engine that is `apart` compiles into `folder` and stops there.

        In `conversions` it finds, and leaves, what trials may share. Without `compiled` what the steps make of the
        model is run eagerly, and rounds as their engine would.
        """
        import torch

        from torchwright.hardware.devices.allocator import apply_allocator
        from torchwright.optimization.engines.apply import apply_steps, weight_bytes
        from torchwright.optimization.techniques.base import conversion_of, from_step

        start = time.perf_counter()
        self._build()
        if conversions and (name := conversion_of(steps)):
            self.target.conversion = Path(conversions) / name
        apply_steps(self.target, steps)
        self.workload = self.target.workload
        settings = self.target.settings
        if not compiled:
            settings.engine = "eager"
            for step in steps:
                from_step(step).emulate(self.target)
        apply_allocator(settings.allocator)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        engine = engines.get(settings.engine).available("the recipe", RefusedTechnique)
        self.engine = engine.prepare(self.target, Path(folder) if folder and engine.apart else None)
        if not engine.apart:
            if steps:
                self.run = self.workload.front(self.engine, self.workload.describe())
            else:
                self.run = self.workload.original_run(self.target.model)
            self._make_calls()
            self.engine.check()
            if steps and settings.engine == "jit" and self.calls.changing:
                self._check_inputs(self._changed_eagerly())
        return Prepared(
            seconds=time.perf_counter() - start + self.target.spared,
            engine=settings.engine,
            dtype=str(self.target.compute_dtype).removeprefix("torch."),
            threads=settings.threads,
            allocator=settings.allocator,
            coverage=tuple(self.target.coverage),
            weight_bytes=weight_bytes(self.target.model),
            properties=frozenset(self.target.properties),
            repeats={case.name: case.repeat for case in self._cases()},
            parts={case.name: case.part for case in self._cases() if case.part},
            calls=self.engine.calls,
            converted=self.target.converted,
            spared=self.target.spared,
        )

    def load(self, *, steps: tuple[Any, ...], folder: str, prepared: Prepared) -> None:
        """Load what another process compiled; this one then has only what an artifact's user has."""
        import torch

        from torchwright.hardware.devices.allocator import apply_allocator
        from torchwright.optimization.engines.apply import reshaped

        apply_allocator(prepared.allocator)
        if prepared.threads:
            torch.set_num_threads(prepared.threads)
        self.dtype = getattr(torch, prepared.dtype)
        self.workload = reshaped(self.workload, steps)
        engine = engines.get(prepared.engine)
        self.engine = engine.opened(Path(folder), prepared.calls, self.device.name)
        self.run = self.workload.front(self.engine, self.workload.describe())
        self._make_calls()
        self._check_inputs(frozenset(call.name for call in prepared.calls if call.mutates))

    def load_artifact(self, *, path: str, trust: bool, process: bool = True) -> OpenedArtifact:
        """Load an artifact as its user would, who has the model if the artifact needs it.

        From then on the workload is asked as the artifact's steps ask it.
        """
        import torch

        from torchwright.optimization.artifact.folder import open_artifact
        from torchwright.optimization.artifact.load import call_as_user, load
        from torchwright.optimization.engines.apply import reshaped

        start = time.perf_counter()
        recipe, manifest = open_artifact(Path(path))
        own = self.workload.build() if manifest.measured_on_module and self.workload.has_model else None
        loaded = load(path, model=own, trust=trust, process=process)
        self.dtype = getattr(torch, manifest.dtype)
        self._as_asked, self.workload = self.workload, reshaped(self.workload, recipe.steps)
        self.run = call_as_user(loaded, self.device.name)
        self._make_calls()
        return OpenedArtifact(
            seconds=time.perf_counter() - start, how=loaded.how, notices=tuple(loaded.notices)
        )

    def beside(self) -> None:
        """Have the original here, too, to be asked by `original`."""
        import torch

        other = TrialSession()
        other.workload, other.device, other.seed, other.dtype = (
            self._as_asked,
            self.device,
            self.seed,
            torch.float32,
        )
        model = other.workload.build().to(self.device.name)
        other.run = other.workload.original_run(model)
        other._make_calls()
        self._original = other

    def original(self, *, request: str, arguments: dict[str, Any]) -> Any:
        """Return the answer of the original in this process to a request."""
        return getattr(self._original, request)(**arguments)

    def keep_memory(self) -> None:
        """Run the original in a process that keeps freed memory, as the recipe's does."""
        from torchwright.hardware.devices.allocator import apply_allocator

        apply_allocator("retain")

    def forms(
        self,
        *,
        steps: tuple[Any, ...],
        folder: str,
        packages: bool,
        rows_seconds: float | None,
        general_seconds: float,
    ) -> tuple[Any, Any]:
        """Return the inputs that the original takes in addition to its example, and the recipe's model in all forms."""
        from torchwright.optimization.engines.apply import apply_steps
        from torchwright.optimization.engines.dispatch.input_capabilities import probe
        from torchwright.optimization.trial.batch_variants import build_batch_variants

        self._build()
        takes = probe(self.target.model, self.workload.cases(self._dtype())[0])
        apply_steps(self.target, steps)
        cases = self.target.workload.graphs(self._dtype())
        return takes, build_batch_variants(
            self.target,
            cases,
            takes,
            Path(folder),
            packages=packages,
            rows_seconds=rows_seconds,
            general_seconds=general_seconds,
        )

    def takes(self) -> Any:
        """Return the inputs that the original takes in addition to its example."""
        from torchwright.optimization.engines.dispatch.input_capabilities import probe

        self._build()
        return probe(self.target.model, self.workload.cases(self._dtype())[0])

    def choose_forms(
        self,
        *,
        takes: Any,
        forms: Any,
        folder: str,
        compiled: bool,
        seconds: float,
        threads: int | None,
        allocator: str | None,
    ) -> Any:
        """Choose how the artifact answers calls other than the example's."""
        from torchwright.hardware.devices.allocator import apply_allocator
        from torchwright.optimization.engines.compiled.program import read_programs
        from torchwright.optimization.trial.batch_variants import check_graphs, choose_variants

        apply_allocator(allocator)
        self._build()
        model, case = self.target.model, self.workload.cases(self._dtype())[0]
        if not compiled:
            return check_graphs(model, case, takes, forms, read_programs(Path(folder), trust=True))
        return choose_variants(model, case, takes, forms, Path(folder), seconds=seconds, threads=threads)

    def one_row(
        self, *, steps: tuple[Any, ...], takes: Any, folder: str, seconds: float
    ) -> tuple[Any, str | None]:
        """Compile the recipe's model for one row: what it takes, or None and the reason."""
        from torchwright.optimization.engines.apply import apply_steps
        from torchwright.optimization.trial.batch_variants import build_batch_of_one

        self._build()
        apply_steps(self.target, steps)
        (case,) = self.target.workload.graphs(self._dtype())
        return build_batch_of_one(self.target, case, takes, Path(folder), seconds)

    def resize(self, *, batched: tuple[int, ...], rows: int | None) -> None:
        """Time another batch size than the example's from now on; None restores the example's."""
        from torchwright.optimization.engines.dispatch.input_capabilities import with_rows

        cases = self._cases()
        self._make_calls(cases if rows is None else [with_rows(case, batched, rows) for case in cases])

    def observe(self, *, unseen: bool = False, varied: bool = False, further: bool = False) -> Any:
        """Return observations for the metric, or None without the data that are asked for.

        `unseen` asks for held-out data, `varied` for other values than those that calibrate, `further` for more data.
        """
        import torch

        from torchwright.workloads.base import blaming

        workload = self._judged_by(unseen=unseen, varied=varied, further=further)
        if workload is None:
            return None

        ran, first = self._observed.pop(unseen, (None, None)) if further else (None, None)
        first = first if ran is self.run else None
        sampled = self.workload.sampled()
        if first is not None and sampled is not None:
            workload = workload.judged_by(workload.sample[sampled[0] :])
        torch.manual_seed(self.seed)
        run, blamed = self.run, nullcontext()
        if self._is_original:
            blamed = blaming(type(workload), "observe")
            adapted = self.workload.adapt(self.target.model)
            self.workload.check_adapted(self.target.model, adapted)
            run = lambda case: adapted(*case.args, **case.kwargs)
        with torch.inference_mode(), blamed:
            found = workload.observe(run, self._dtype())
        if first is not None:
            return joined(first, found)
        if not (varied or further) and _bytes(found) <= self.kept_bytes:
            self._observed[unseen] = self.run, found
        return found

    def further_times(self, *, unseen: bool) -> float:
        """Return how many times the sample `further` takes to be observed, 0 where there is no more of the data."""
        sampled = self.workload.sampled()
        workload = self._judged_by(unseen=unseen, varied=False, further=True)
        if sampled is None or workload is None:
            return 0.0
        return len(workload.sample) / sampled[0] - (unseen in self._observed)

    def _judged_by(self, *, unseen: bool, varied: bool, further: bool) -> Any:
        """Return the workload with the data that were asked for, None without such data."""
        workload = self.workload.unseen() if unseen else self.workload.varied() if varied else self.workload
        return workload.further() if further and workload is not None else workload

    def compare(
        self,
        *,
        reference: Any,
        itself: bool = False,
        unseen: bool = False,
        varied: bool = False,
        further: bool = False,
        show: bool = False,
    ) -> Any:
        """Return this model's metric against the original's; `itself` means that this is the original.

        With `show` the workload's pictures of the two are kept for `pictures`.
        """
        from torchwright.workloads.base import blaming

        workload = self._judged_by(unseen=unseen, varied=varied, further=further) or self.workload
        found = reference if itself else self.observe(unseen=unseen, varied=varied, further=further)
        # A candidate's outputs may be what it fails on; with the original's own the fault is the workload's.
        with blaming(type(workload), "compare") if itself else nullcontext():
            quality = workload.compare(reference, found)
        with blaming(type(workload), "side_by_side"):
            self._shown = workload.side_by_side(reference, found) if show else []
        return replace(quality, unseen=unseen)

    def compare_others(self, *, reference: Any, most: float) -> tuple[Any, bool]:
        """The metric of what answers other sizes than the examples', asked for these, and whether it was widened, as
        it is where it loses more than `most`.

        None where what answers the examples answers all.
        """
        assert self.engine is not None
        own, widened = self.run, False
        try:
            while others := self.engine.others():
                self.run = self.workload.front(others, self.workload.describe())
                quality = self.compare(reference=reference)
                if quality.drop_high <= most or widened or not self.engine.widen_others():
                    return quality, widened
                widened = True
        finally:
            self.run = own
        return None, widened

    def widen_others(self) -> bool:
        """Have calls of other sizes be rounded less; False where nothing more can be."""
        assert self.engine is not None
        return self.engine.widen_others()

    def pictures(self) -> list[Any]:
        """Return the pictures of the last `compare`."""
        return self._shown

    def sensitivity(self, *, steps: tuple[Any, ...]) -> list[Ranked]:
        """Modules that `steps` would change, most sensitive first, with the error each causes by itself."""
        from torchwright.optimization.engines.sensitivity import rank_modules

        self._build()
        return rank_modules(self.target, steps)

    def warm_seconds(self) -> dict[str, float]:
        """Return the seconds of each case's call behind the first ones, measured once."""
        return self.calls.once

    def time(self) -> dict[str, float]:
        """One turn: seconds a call of every case."""
        return self.calls.turn()

    def mean_seconds(self, *, threads: int) -> float:
        """Mean seconds of a pass on so many threads."""
        return self.calls.mean_seconds(threads)

    def use_threads(self, *, threads: int) -> None:
        """Make calls on so many threads from now on."""
        import torch

        torch.set_num_threads(threads)

    def waited(self) -> float:
        """The share of the last turn that a thread of this process, ready to run, waited for a core: others ran."""
        return self.calls.waited

    def profile(self, *, named: bool, trace: str | None = None) -> Recording:
        """Record where the time of the calls goes; `named` means that kernels were compiled with their names."""
        from torchwright.optimization.profile.recording import record

        file = Path(trace) if trace else None
        return record(self.run, self._cases(), self.device.facts(), named=named, trace=file)

    def profile_artifact(
        self, *, path: str, trust: bool, trace: str | None = None
    ) -> tuple[OpenedArtifact, Recording]:
        """Load an artifact as its user would, and where the time of its calls goes."""
        from torchwright.optimization.engines.compiled.package import Package
        from torchwright.optimization.profile.recording import labelled

        with labelled(Package, "run"):
            return self.load_artifact(path=path, trust=trust), self.profile(named=False, trace=trace)

    def breaks(self) -> Breaks:
        """Return the graph breaks of the original as its user calls it, and those that can be rewritten."""
        from torchwright.optimization.profile.breaks import find_breaks
        from torchwright.optimization.techniques.shared.whole import judged

        self._build()
        found = find_breaks(self.target.model, self.workload.original_run, self._cases())
        if not found.found:
            return found
        return judged(found, self.workload.adapt(self.target.model), self._cases())

    def package(self, *, engine: str, folder: str) -> tuple[Any, ...]:
        """Compile by an engine that is `apart` what ran by another, for those who load it; what each call takes.

        Raises `RefusedTechnique` where it cannot.
        """
        return engines.get(engine).prepare(self.target, Path(folder)).calls

    def keep(self, *, folder: str) -> str | None:
        """Let the engine write its files for an artifact in `folder`; return notes for the recipe."""
        assert self.engine is not None
        return self.engine.keep(Path(folder))

    def self_test(self, *, path: str) -> bool:
        """Keep the first case's inputs and outputs; False where they are nothing that a file can keep."""
        import torch

        from torchwright.core import nested
        from torchwright.optimization.artifact.tree import write_tree
        from torchwright.workloads.accuracy import flatten

        case = self._cases()[0]
        try:
            with torch.inference_mode():
                inputs = {"name": case.name, "args": case.args, "kwargs": case.kwargs, "fixed": case.fixed}
                kept = nested.map_tensors(torch.clone, inputs)
                torch.manual_seed(self.seed)
                write_tree(Path(path), {**kept, "seed": self.seed, "output": flatten(self.run(case))})
        except TypeError:
            return False
        return True

    def memory(self) -> Memory:
        """Peak memory of this process while it answers every case once, what fresh pages cost it, and recompilations so
        far."""
        gc.collect()
        self.device.reset_peak_memory()
        faults = self.calls.each_once()
        recompiles = self.engine.recompiles() if self.engine is not None else 0
        peak = self.device.peak_memory_bytes()
        faulting = {name: count * page_fault_seconds() for name, count in faults.items()}
        return Memory(peak=peak, recompiles=recompiles, faulting=faulting)

    @property
    def _is_original(self) -> bool:
        return self.target is not None and not self.target.coverage

    def _build(self) -> None:
        from torchwright.optimization.engines.apply import make_target

        if self.target is None:
            self.target = make_target(self.workload, self.device.facts())

    def _dtype(self) -> Any:
        return self.target.compute_dtype if self.target is not None else self.dtype

    def _cases(self) -> list[Any]:
        return self.workload.cases(self._dtype())

    def _changed_eagerly(self) -> frozenset[str]:
        """Return the calls that change their inputs where PyTorch runs the changed model operator by operator."""
        import torch

        from torchwright.optimization.trial.timed import TimedCalls

        with torch.compiler.set_stance("force_eager"):
            run = self.workload.original_run(self.target.model)
            return TimedCalls(run, self._cases(), self.device).changing

    def _check_inputs(self, may_change: frozenset[str]) -> None:
        """Raise `RefusedTechnique` where other calls change their inputs: these are the caller's."""
        if changed := sorted(self.calls.changing - may_change):
            raise RefusedTechnique(
                "the compiled model writes into its inputs",
                found=f"the inputs of {', '.join(changed)} are other numbers after the call",
                allowed="changes that the model itself makes",
                next="please report it with the model: its caller's tensors would be overwritten",
            )

    def _make_calls(self, cases: list[Any] | None = None) -> None:
        """Make the workload's calls, or these, and time them from now on."""
        from torchwright.optimization.trial.timed import TimedCalls

        self.calls = TimedCalls(self.run, cases or self._cases(), self.device, original=self._is_original)
