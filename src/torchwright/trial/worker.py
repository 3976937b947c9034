# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""The other end of a trial: a fresh process that builds the model, applies steps, compiles, times and judges.

Forked by `fork_server`, or started as `python -m torchwright.trial.worker FD PARENT`; requests and answers are tuples
over the socket FD, whose other end only the search holds.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchwright.errors import ModelError, TorchwrightError
from torchwright.process.orphans import be_killed_first, die_with_parent
from torchwright.trial.values import Memory, Opened, Prepared

if TYPE_CHECKING:
    from torchwright.engines.describe import Description

TURN_SECONDS = 0.02
"""A turn of timing repeats a short call until it has taken this long."""
TURN_CALLS = 64
LONG_SECONDS = 0.1
"""A call this long warms its own caches: none is made before it that is not counted."""
VERY_LONG_SECONDS = 2.0
"""A call this long is warm after the first."""


class Session:
    """One trial's state; every public method is a request."""

    def __init__(self) -> None:
        self.target: Any = None
        self.run: Any = None
        self.runner: Any = None
        self.calls: dict[str, int] = {}
        self.once: dict[str, float] = {}
        self.changing: set[str] = set()
        """Calls that change their inputs in place."""
        self._waited = 0.0
        self._trouble: BaseException | None = None

    def unpack(self, workload: str, path: list[str]) -> None:
        """Unpack the workload that our own parent process wrote; what goes wrong in it is said by `init`."""
        sys.path[:] = path
        from torchwright.trial import travel

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
        workload: str | None = None,
        path: list[str] | None = None,
    ) -> None:
        """Get the workload, where it is not here already, and the device ready.

        This process ends by being killed: what native code leaves among temporary files, unpacked packages above all,
        lies in `scratch`. Python's own stay where they were, and below them what torch compiles and keeps.
        """
        import torch

        from torchwright.devices import get_device

        tempfile.gettempdir()  # it remembers its answer
        os.environ["TMPDIR"] = scratch
        if workload is not None:
            self.unpack(workload, path or sys.path)
        if self._trouble is not None:
            raise self._trouble
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        self.seed = seed
        self.device, self.workload.device = get_device(device), device
        self.threads = threads

    def describe(self, *, names: tuple[str, ...] | None = None) -> Description:
        """What can be tried on the original here: properties, variants with refusals, kernel times, operations."""
        from torchwright.engines.describe import describe_target

        self._build()
        return describe_target(self.target, names)

    def prepare(self, *, steps: tuple[Any, ...], folder: str | None = None) -> Prepared:
        """Apply steps and make the first answers. With `folder`, compile ahead of time into it and stop there."""
        import torch

        from torchwright.devices.allocator import apply_allocator
        from torchwright.engines.apply import apply_steps, weight_bytes
        from torchwright.engines.eager import EagerRunner
        from torchwright.engines.runner import JitRunner, build_packages

        start = time.perf_counter()
        self._build()
        apply_steps(self.target, steps)
        self.workload = self.target.workload
        graphs = self.workload.graphs(self.target.compute_dtype)
        settings = self.target.settings
        apply_allocator(settings.allocator)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        calls: list[Any] = []
        if settings.engine == "aot":
            assert folder is not None
            calls = build_packages(self.target, Path(folder), graphs)
        elif not steps:
            self.run = self.workload.original_run(self.target.model)
        else:
            model = self.target.model
            self.runner = JitRunner(model, settings) if settings.engine == "jit" else EagerRunner(model)
            self.run = self.workload.front(self.runner)
        if self.run:
            self._warm_up()
        if isinstance(self.runner, JitRunner):
            self.runner.check_compiled()
        return Prepared(
            seconds=time.perf_counter() - start,
            engine=settings.engine,
            dtype=str(self.target.compute_dtype).removeprefix("torch."),
            threads=settings.threads,
            allocator=settings.allocator,
            coverage=tuple(self.target.coverage),
            weight_bytes=weight_bytes(self.target.model),
            properties=frozenset(self.target.properties),
            calls=tuple(calls),
        )

    def load(self, *, steps: tuple[Any, ...], folder: str, prepared: Prepared) -> None:
        """Load what another process compiled; this one then has only what an artifact's user has."""
        import torch

        from torchwright.devices.allocator import apply_allocator
        from torchwright.engines.apply import reshaped
        from torchwright.engines.door import Door
        from torchwright.engines.package import Package

        apply_allocator(prepared.allocator)
        if prepared.threads:
            torch.set_num_threads(prepared.threads)
        self.dtype = getattr(torch, prepared.dtype)
        self.workload = reshaped(self.workload, steps)
        self.runner = Door(
            [Package(Path(folder) / f"package-{i}.pt2", spec) for i, spec in enumerate(prepared.calls)],
            strict=True,
            device=self.device.name,
        )
        self.run = self.workload.front(self.runner.run)
        self._warm_up()

    def load_artifact(self, *, path: str, trust: bool, process: bool = True) -> Opened:
        """Load an artifact as its user would, who has the model at hand where the artifact needs it."""
        import torch

        from torchwright.artifact.folder import open_artifact
        from torchwright.artifact.load import call_as_user, load

        start = time.perf_counter()
        manifest = open_artifact(Path(path))[1]
        own = None if manifest.self_contained else self.workload.build()
        loaded = load(path, model=own, trust=trust, process=process)
        self.dtype = getattr(torch, manifest.dtype)
        self.run = call_as_user(loaded, self.device.name)
        self._warm_up()
        return Opened(seconds=time.perf_counter() - start, how=loaded.how, notices=tuple(loaded.notices))

    def beside(self) -> None:
        """Have the original here, too, to be asked by `original`."""
        import torch

        other = Session()
        other.workload, other.device, other.seed, other.dtype = (
            self.workload,
            self.device,
            self.seed,
            torch.float32,
        )
        model = self.workload.build().to(self.device.name)
        other.run = self.workload.original_run(model)
        other._warm_up()
        self._original = other

    def original(self, *, request: str, arguments: dict[str, Any]) -> Any:
        """What the original in this process answers to a request."""
        return getattr(self._original, request)(**arguments)

    def keep_memory(self) -> None:
        """Run the original in a process that keeps freed memory, as the recipe's does."""
        from torchwright.devices.allocator import apply_allocator

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
        """What the original takes beside its example, and the recipe's model in all its forms."""
        from torchwright.engines.apply import apply_steps
        from torchwright.engines.takes import probe
        from torchwright.trial.forms import build_forms

        self._build()
        takes = probe(self.target.model, self.workload.cases(self._dtype())[0])
        apply_steps(self.target, steps)
        cases = self.target.workload.graphs(self._dtype())
        return takes, build_forms(
            self.target,
            cases,
            takes,
            Path(folder),
            packages=packages,
            rows_seconds=rows_seconds,
            general_seconds=general_seconds,
        )

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
        """How the artifact answers other calls than the example's best."""
        from torchwright.devices.allocator import apply_allocator
        from torchwright.engines.program import read_programs
        from torchwright.trial.forms import check_graphs, choose

        apply_allocator(allocator)
        self._build()
        model, case = self.target.model, self.workload.cases(self._dtype())[0]
        if not compiled:
            return check_graphs(model, case, takes, forms, read_programs(Path(folder), trust=True))
        return choose(model, case, takes, forms, Path(folder), seconds=seconds, threads=threads)

    def one_row(
        self, *, steps: tuple[Any, ...], takes: Any, folder: str, seconds: float
    ) -> tuple[Any, str | None]:
        """Compile the recipe's model for one row: what it takes, or None and the reason."""
        from torchwright.engines.apply import apply_steps
        from torchwright.trial.forms import build_one_row

        self._build()
        apply_steps(self.target, steps)
        (case,) = self.target.workload.graphs(self._dtype())
        return build_one_row(self.target, case, takes, Path(folder), seconds)

    def resize(self, *, batched: tuple[int, ...], rows: int | None) -> None:
        """Time another number of rows than the example's from now on; None is the example's again."""
        from torchwright.engines.takes import with_rows

        cases = self._fresh_cases()
        self._made = cases if rows is None else [with_rows(case, batched, rows) for case in cases]
        self._warm_up()

    def observe(self, *, unseen: bool = False) -> Any:
        """What the metric sees of this model, also on data that the search has not seen; None without such data."""
        import torch

        workload = self.workload.unseen() if unseen else self.workload
        if workload is None:
            return None

        torch.manual_seed(self.seed)
        run = self.run
        if self.target is not None and self.target.settings.engine != "aot" and self._is_original:
            adapted = self.workload.adapt(self.target.model)
            self.workload.check_adapted(self.target.model, adapted)
            run = lambda case: adapted(*case.args, **case.kwargs)
        with torch.inference_mode():
            return workload.observe(run, self._dtype())

    def compare(self, *, reference: Any, itself: bool = False, unseen: bool = False) -> Any:
        """The metric of this model beside the original's; `itself` says that this is the original."""
        workload = (unseen and self.workload.unseen()) or self.workload
        quality = workload.compare(reference, reference if itself else self.observe(unseen=unseen))
        return replace(quality, unseen=unseen)

    def sensitivity(self, *, steps: tuple[Any, ...]) -> list[tuple[str, float]]:
        """Modules that `steps` would change, most sensitive first, with the error each causes by itself."""
        from torchwright.engines.sensitivity import rank_modules

        self._build()
        return rank_modules(self.target, steps)

    def time(self) -> dict[str, float]:
        """One turn: median-free seconds per call of every case; before short ones a call that is not counted."""
        import torch

        from torchwright.measure.clock import Waiting

        seconds = {}
        cases = self._cases()
        earlier, begun = Waiting.now(), time.perf_counter()
        with torch.inference_mode():
            for case in cases:
                if self.once[case.name] < LONG_SECONDS:
                    self.run(self._given(case))
                    self.device.synchronize()
                calls = self.calls[case.name]
                given = [self._given(case) for _ in range(calls)]
                self.device.synchronize()
                start = time.perf_counter()
                for one in given:
                    self.run(one)
                self.device.synchronize()
                seconds[case.name] = (time.perf_counter() - start) / calls
        self._waited = Waiting.now().since(earlier) / (time.perf_counter() - begun)
        return seconds

    def waited(self) -> float:
        """The share of the last turn that a thread of this process, ready to run, waited for a core: others ran."""
        return self._waited

    def package(self, *, folder: str) -> tuple[Any, ...]:
        """Compile ahead of time what ran by torch.compile, for those who load it; what each call takes.

        Raises `RefusedTechnique` where it does not export.
        """
        from torchwright.engines.runner import build_packages

        return tuple(build_packages(self.target, Path(folder), self.workload.graphs(self._dtype())))

    def save_native(self, *, folder: str) -> bool:
        """Keep the native decoder's packed weights."""
        self.target.model.save(Path(folder))
        return True

    def save_cache(self, *, folder: str) -> bool:
        """Keep what torch.compile compiled in this process; False where nothing can be kept."""
        import torch

        from torchwright.artifact.folder import GRAPH_CACHE, MACHINE_CODE
        from torchwright.engines.machine_code import keep_machine_code

        graphs = torch.compiler.save_cache_artifacts()
        if graphs is not None:
            (Path(folder) / GRAPH_CACHE).write_bytes(graphs[0])
        code = keep_machine_code(Path(folder) / MACHINE_CODE)
        return code or graphs is not None

    def self_test(self, *, path: str) -> bool:
        """Keep the first case's inputs and outputs; False where they are nothing that a file can keep."""
        import torch

        from torchwright.artifact.tree import write_tree
        from torchwright.workloads.accuracy import flatten

        case = self._fresh_cases()[0]
        try:
            with torch.inference_mode():
                inputs = {"name": case.name, "args": case.args, "kwargs": case.kwargs}
                kept = torch.utils._pytree.tree_map(_clone, inputs)
                torch.manual_seed(self.seed)
                write_tree(Path(path), {**kept, "seed": self.seed, "output": flatten(self.run(case))})
        except TypeError:
            return False
        return True

    def memory(self) -> Memory:
        """Peak memory of this process while it answers every case once, and recompilations so far."""
        import torch

        from torchwright.engines.runner import JitRunner

        gc.collect()
        self.device.reset_peak_memory()
        with torch.inference_mode():
            for case in self._cases():
                self.run(self._given(case))
        recompiles = JitRunner.recompiles() if isinstance(self.runner, JitRunner) else 0
        return Memory(peak=self.device.peak_memory_bytes(), recompiles=recompiles)

    @property
    def _is_original(self) -> bool:
        return not self.target.coverage

    def _build(self) -> None:
        from torchwright.engines.apply import make_target

        if self.target is None:
            self.target = make_target(self.workload, self.device.facts())

    def _dtype(self) -> Any:
        return self.target.compute_dtype if self.target is not None else self.dtype

    def _cases(self) -> list[Any]:
        if not hasattr(self, "_made"):
            self._made = self.workload.cases(self._dtype())
        return self._made

    def _fresh_cases(self) -> list[Any]:
        return self.workload.cases(self._dtype())

    def _run_first(self, case: Any) -> None:
        """The first call, on inputs of its own, to see whether it changes them."""
        from torchwright.workloads.base import changed_tensors

        if case.fixed:  # what it writes into is a cache, the same at every call
            self.run(case)
            return
        self.changing.add(case.name)
        given = self._given(case)
        self.run(given)
        if not changed_tensors((case.args, case.kwargs), (given.args, given.kwargs)):
            self.changing.remove(case.name)

    def _given(self, case: Any) -> Any:
        """The call, with fresh inputs where it changes those that it is given."""
        from torchwright.workloads.base import own_tensors

        if case.name not in self.changing:
            return case
        args, kwargs = own_tensors((case.args, case.kwargs))
        return replace(case, args=args, kwargs=kwargs)

    def _warm_up(self) -> None:
        import torch

        with torch.inference_mode():
            for case in self._cases():
                try:
                    start = time.perf_counter()
                    self._run_first(case)
                    self.device.synchronize()
                    if time.perf_counter() - start < VERY_LONG_SECONDS:
                        self.run(self._given(case))
                        self.device.synchronize()
                except TorchwrightError:
                    raise
                except Exception as error:
                    if self.target is None or self.target.coverage:
                        raise
                    raise ModelError(
                        f"the model fails on its own inputs (call '{case.name}')",
                        found=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}",
                        next="call the model on these inputs yourself first",
                    ) from error
                given = self._given(case)
                self.device.synchronize()
                start = time.perf_counter()
                self.run(given)
                self.device.synchronize()
                once = time.perf_counter() - start
                self.once[case.name] = once
                self.calls[case.name] = max(1, min(TURN_CALLS, round(TURN_SECONDS / max(once, 1e-6))))


def _clone(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


def _failed(error: BaseException) -> tuple[str, tuple[str, str, str]]:
    """The answer for an error that is the trial's: its type, its first line, and where it came from."""
    line = str(error).strip().splitlines()
    text = "".join(traceback.format_exception(error))
    return "failed", (type(error).__name__, line[0][:300] if line else "", text)


def work(session: Session, connection: int, parent: int) -> None:
    """Answer requests until the other end hangs up or the process `parent`, that started this one, ends."""
    die_with_parent(parent)
    be_killed_first()
    serve(session, Connection(connection))


def serve(session: Session, connection: Connection) -> None:
    """Answer requests until the other end hangs up."""
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("ok", getattr(session, method)(**arguments))
        except TorchwrightError as error:
            answer = ("refused", error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # nothing that another trial would do better
            answer = ("refused", error) if full else _failed(error)
        except BaseException as error:
            answer = _failed(error)
        # Plain pickle, not Connection.send: torch's reductions would pass tensors by shared memory of two processes
        # that have no common ancestor to authenticate them.
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    work(Session(), int(sys.argv[1]), int(sys.argv[2]))
