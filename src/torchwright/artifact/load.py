# pyright: basic
"""Loading an artifact: the fastest way to run it that this machine and the caller's trust allow."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchwright.artifact import folder as artifact
from torchwright.artifact.fingerprint import fingerprint_here
from torchwright.artifact.folder import GENERAL, ROWS, Manifest
from torchwright.devices.allocator import apply_allocator
from torchwright.engines.call import spec_of
from torchwright.engines.door import Call, Door
from torchwright.engines.eager import EagerRunner
from torchwright.engines.graphs import GraphCall, Later
from torchwright.engines.machine_code import restore_machine_code
from torchwright.engines.module import OptimizedModule
from torchwright.engines.package import Package
from torchwright.engines.spec import CallSpec, is_structure
from torchwright.errors import ArtifactError, RefusedTechnique, TorchwrightError, first_line
from torchwright.facts import Fingerprint, Interval, Recipe
from torchwright.kernels.cpu.threads import torch_threads
from torchwright.paths import file_digest
from torchwright.process import folders
from torchwright.workloads.base import Case, Run, fresh, from_anywhere
from torchwright.workloads.encoding import Encoder, TextModel
from torchwright.workloads.generation import Generator, Geometry
from torchwright.workloads.rows import Batcher, Layout

SAME_MACHINE_ERROR = 1e-2
OTHER_MACHINE_ERROR = 0.1
"""Largest relative error of the self-test's output: the same code rounds alike, other code and other ISAs do not."""
NewShape = Literal["run", "error"]


@dataclass(kw_only=True)
class Loaded:
    """An artifact that is ready to run."""

    model: Any
    """A `LoadedDecoder` or `Generator` for a language model, an `OptimizedModule` for any other."""
    recipe: Recipe
    run: Run
    how: str
    """What runs: `native decoder`, `ahead-of-time package`, `recompiled graphs`, `graphs, uncompiled`, `torch.compile`,
    `eager`, `the recipe on the caller's model`."""
    measured: Interval | None = None
    """The speed-up that was measured of what runs here; None where something else was measured."""
    notices: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class _Ready:
    """One way to run an artifact."""

    how: str
    run: Run
    door: Door | None = None
    """Takes calls as a user makes them."""
    answers: Any = None
    """What the user calls, where it is made from neither of these."""
    tolerance: float = OTHER_MACHINE_ERROR


def on_threads(run: Run, threads: int | None) -> Run:
    """`run` with its own number of intra-op threads; the caller's own is restored after every call."""
    if threads is None:
        return run

    def call(case: Case) -> Any:
        with torch_threads(threads):
            return run(case)

    return call


def load(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    original: nn.Module | None = None,
    trust: bool = False,
    process: bool = True,
    on_new_shape: NewShape = "run",
) -> Loaded:
    """Load an artifact and prove it on its self-test.

    `model` replays the recipe on the caller's own module, for artifacts that hold none. `original` answers calls that
    the artifact itself cannot: forms, sizes and types that nothing was compiled or exported for. `trust` loads
    compiled code, and runs code that the recipe names, that somebody else made. With `process=False` nothing that
    lasts is changed in this process: a recipe that keeps freed memory does without. `on_new_shape="error"` refuses
    every call that the compiled code does not take itself, instead of a slower way.

    Raises `ArtifactError` for an artifact that is damaged, newer, not self-contained, or that fails its self-test.
    """
    if on_new_shape not in ("run", "error"):
        raise TorchwrightError(f"on_new_shape={on_new_shape!r}", allowed="run, error")
    path = Path(path)
    try:
        return _load(path, model, original, trust, process, on_new_shape == "error")
    except (TorchwrightError, MemoryError):
        raise
    except Exception as error:
        if trust or artifact.is_own(path):
            raise
        raise ArtifactError(  # whatever a stranger's file makes this stumble over
            f"{path} cannot be loaded", found=f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _load(
    path: Path, model: nn.Module | None, original: nn.Module | None, trust: bool, process: bool, strict: bool
) -> Loaded:
    with artifact.checked_meanwhile(path) as (recipe, manifest, checked):
        _check_calls(path, manifest)
        loader = _Loader(path, recipe, manifest, trust, process, original, strict)
        if manifest.engine != "native":  # whose files are plain data, read while they are checked
            checked()
        ready = loader.best(model)
    device = loader.here.device.kind
    run = ready.run if ready.door is not None else on_threads(ready.run, manifest.threads)
    if recipe.workload.get("layout"):
        run = Batcher(run, Layout.from_dict(recipe.workload["layout"]))
    answers = ready.answers or as_model(
        run, ready.door, recipe.workload, manifest, path / artifact.MODEL, device
    )
    loaded = Loaded(
        model=answers,
        recipe=recipe,
        run=run,
        how=ready.how,
        measured=recipe.speedup if ready.how == recipe.runs_as else None,
        notices=loader.notices,
    )
    _self_test(path, call_as_user(loaded, device), ready.tolerance)
    return loaded


def call_as_user(loaded: Loaded, device: str) -> Run:
    """Makes a call as the user does, where that is a call of the model itself."""
    model = loaded.model
    if isinstance(model, OptimizedModule) or (isinstance(model, nn.Module) and not loaded.recipe.steps):
        return lambda case: model(*case.args, **case.kwargs)
    return from_anywhere(loaded.run, device)


def as_model(
    run: Run, door: Door | None, workload: dict[str, Any], manifest: Manifest, folder: Path, device: str
) -> Any:
    """What a user calls: a `Generator`, `Encoder` or `TextModel` for models that read text, else an `OptimizedModule`.

    It takes tensors from anywhere; `run` takes them on `device`.
    """
    if workload.get("geometry"):
        geometry = Geometry.from_dict(workload["geometry"])
        return Generator(run, geometry, getattr(torch, manifest.dtype), folder, device)
    if not workload.get("layout"):
        if door is None and isinstance(run, EagerRunner) and device == "cpu":
            return OptimizedModule(run.model, device)  # whose parameters record no gradients
        return OptimizedModule(door or _calling(run, device), device)
    call = _calling(run, device)
    layout = Layout.from_dict(workload["layout"])
    if workload["kind"] == "encoder":
        return Encoder(lambda case: call(*case.args), layout, folder, device)
    return TextModel(lambda case: call(**case.kwargs), layout, folder, list(workload["inputs"]), device)


def _calling(run: Run, device: str) -> Callable[..., Any]:
    run = from_anywhere(run, device)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return run(Case(name="forward", args=args, kwargs=kwargs))

    return call


def _check_calls(path: Path, manifest: Manifest) -> None:
    """Raise `ArtifactError` for a manifest whose calls are not calls."""
    for parameter in manifest.takes.parameters:
        if not parameter.name.isidentifier() or not hasattr(inspect.Parameter, parameter.kind):
            raise ArtifactError(f"{path} is damaged", found=f"the parameter {parameter.name[:80]!r}")
    for spec in (*manifest.calls, manifest.any_rows, manifest.one_row, manifest.any_sizes):
        if spec is not None and not (
            is_structure(spec.structure, len(spec.tensors)) and list(spec.structure) == ["tuple"]
        ):
            raise ArtifactError(f"{path} is damaged", found=f"the call {spec.name!r}", next="optimize again")


class _Loader:
    """Tries the ways to run an artifact, fastest first."""

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        manifest: Manifest,
        trust: bool,
        process: bool,
        original: nn.Module | None,
        strict: bool,
    ) -> None:
        self.path, self.recipe, self.manifest = path, recipe, manifest
        self.process, self.trust, self.strict = process, trust, strict
        self.notices: list[str] = []
        self.here = fingerprint_here(recipe.fingerprint.device.kind, measured=False)
        self.foreign = artifact.same_machine(recipe.fingerprint, self.here)
        self.allowed = trust or artifact.is_own(path)
        self._original = None if original is None else _later_called(original)

    def best(self, model: nn.Module | None) -> _Ready:
        self._settle_process()
        if self.manifest.engine == "native":
            return self._native()
        if model is not None:
            return self._replay(model)
        if self.manifest.engine == "aot":
            reason = self._refuse_native()
            if reason is None:
                return self._packages(self.path / artifact.NATIVE, None)
            self.notices.append(f"compiled code left aside: {reason}; compiling afresh")
        if (self.path / "programs.json").is_file():
            return self._graphs()
        if not self.manifest.self_contained:
            raise ArtifactError(
                f"{self.path} holds no model: its recipe is for a module of your own",
                found=f"{self.recipe.workload.get('model')}, at {self.recipe.speedup} of the original's speed",
                next="pass your own: tw.load(DIR, model=fresh_module) replays the recipe on it",
            )
        return self._rebuild()

    def _settle_process(self) -> None:
        """Change what the recipe changes of the whole process, unless the caller refuses it."""
        for step in self.recipe.steps:
            if step.name != "allocator":
                continue
            if not self.process:
                self.notices.append("process=False: this process goes on handing freed memory back")
                return
            apply_allocator(str(step.options.get("kind", "retain")))
            self.notices.append(
                "this process keeps freed memory from now on, as the recipe wants it; "
                "tw.load(…, process=False) does without"
            )

    def _native(self) -> _Ready:
        from torchwright.decoder.native import NativeModel

        native = NativeModel.load(self.path, self.path / artifact.MODEL, self.here.device.kind)
        native.loaded.threads = self.manifest.threads
        return _Ready(how="native decoder", run=EagerRunner(native), answers=native.loaded)

    def _refuse_native(self) -> str | None:
        if self.foreign:
            return self.foreign
        if not self.allowed:
            return "it was not built by this user on this machine (trust, or --trust, loads it all the same)"
        return None

    def _packages(self, folder: Path, programs: dict[str, Any] | None) -> _Ready:
        """Compiled calls: this artifact's own, or those that were compiled here of the given graphs."""
        manifest = self.manifest
        calls: list[Call] = []
        if programs is None and not manifest.calls:  # made by a version that kept no specifications
            from torchwright.engines.program import read_programs

            programs = read_programs(self.path, trust=self.allowed)
            how = "ahead-of-time package"
        else:
            how = "ahead-of-time package" if programs is None else "recompiled graphs"
        for name, file in _packages_of(manifest, programs):
            spec = self._spec(name, programs)
            calls.append(Package(folder / file, spec, manifest.layouts))
        door = self._door(calls)
        tolerance = SAME_MACHINE_ERROR if how == "ahead-of-time package" else OTHER_MACHINE_ERROR
        return _Ready(how=how, run=door.run, door=door, tolerance=tolerance)

    def _spec(self, name: str, programs: dict[str, Any] | None) -> CallSpec:
        """What a compiled call takes: from the manifest, which is signed, or from the graph that was compiled here."""
        manifest = self.manifest
        specs = (*manifest.calls, manifest.any_rows, manifest.one_row)
        kept = {spec.name: spec for spec in specs if spec is not None}
        if programs is None:
            return kept[name]
        spec = spec_of(name, programs[name])
        if name == ROWS and manifest.any_rows is not None:
            least = {size: bounds[0] for size, bounds in manifest.any_rows.sizes.items()}
            sizes = {
                size: (min(2, max(0, least.get(size, 2))), most) for size, (_, most) in spec.sizes.items()
            }
            spec = replace(spec, sizes=sizes)
        return spec

    def _door(self, calls: list[Call]) -> Door:
        from torchwright.engines.program import read_programs

        manifest, general = self.manifest, None
        if manifest.any_sizes is not None and not self.strict:
            spec = manifest.any_sizes
            general = Later(
                spec,
                lambda: GraphCall(
                    read_programs(self.path, trust=self.allowed)[GENERAL], spec, manifest.layouts
                ),
            )
        return Door(
            calls,
            takes=replace(
                manifest.takes, pieces=manifest.takes.pieces and manifest.rows in ("pieces", "both")
            ),
            by_rows=manifest.by_rows,
            general=general,
            original=self._original,
            device=self.here.device.kind,
            threads=manifest.threads,
            strict=self.strict,
        )

    def _graphs(self) -> _Ready:
        from torchwright.engines.program import read_programs
        from torchwright.measure.toolchain import compiler_fault

        programs = read_programs(self.path, trust=self.allowed)
        if self.manifest.engine != "eager":
            fault = compiler_fault(self.here.device)
            if fault is None:
                with self._recompiled(programs) as folder:
                    return self._packages(folder, programs)
            self.notices.append(f"running uncompiled: {fault}")
        names = [name for name in programs if name not in (ROWS, GENERAL)]
        calls = [
            GraphCall(programs[name], spec_of(name, programs[name]), self.manifest.layouts) for name in names
        ]
        door = self._door(list[Call](calls))
        return _Ready(how="graphs, uncompiled", run=door.run, door=door)

    @contextlib.contextmanager
    def _recompiled(self, programs: dict[str, Any]) -> Iterator[Path]:
        """A folder with this artifact's graphs compiled for this machine; in the user's cache, where that can be."""
        key = hashlib.sha256(
            f"{file_digest(self.path / artifact.MANIFEST)}{_code_key(self.here)}".encode()
        ).hexdigest()[:24]
        folder = artifact.cache_folder() / "compiled" / key
        if folder.is_dir():
            yield folder
            return
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished = f"{key}.unfinished-"
            folders.sweep(folder.parent, unfinished)
            temporary = folders.make(folder.parent, unfinished)
        except OSError as error:
            self.notices.append(f"what is compiled here cannot be kept for the next time ({error})")
            with folders.temporary() as passing:  # what is loaded of it is unpacked elsewhere
                self._compile(programs, passing)
                yield passing
            return
        try:
            self._compile(programs, temporary.path)
            with contextlib.suppress(OSError):  # another process may have been faster
                temporary.path.rename(folder)
            yield folder if folder.is_dir() else temporary.path
        finally:
            temporary.remove()

    def _compile(self, programs: dict[str, Any], folder: Path) -> None:
        from torchwright.engines.program import compile_program

        settings = inductor_settings(self.recipe)
        for name, file in _packages_of(self.manifest, programs):
            compile_program(programs[name], folder / file, settings)

    def _rebuild(self) -> _Ready:
        from torchwright.engines.apply import apply_steps, make_target
        from torchwright.workloads.detect import from_description

        folder = self.path / artifact.MODEL
        described = self.recipe.workload | {"eval_text": None}  # nothing is judged here
        workload = from_description(described, folder if folder.is_dir() else None, trust=self.allowed)
        target = make_target(workload, self.here.device)
        apply_steps(target, self.recipe.steps)
        if not self.recipe.steps:
            target.model = workload.adapt(target.model)
        return self._run_target(target)

    def _replay(self, model: nn.Module) -> _Ready:
        from torchwright.artifact.tree import read_self_test
        from torchwright.engines.apply import apply_steps, make_target
        from torchwright.workloads.module import ModuleWorkload

        has_inputs = (self.path / "selftest.json").is_file()  # of a class of their own they cannot be kept
        kept = read_self_test(self.path / "selftest") if has_inputs else {"args": (), "kwargs": {}}
        workload = ModuleWorkload(model, kept["args"] or kept["kwargs"])
        target = make_target(workload, self.here.device)
        if not self.recipe.steps:  # the original, with nothing around it that would cost a microsecond
            how = "the recipe on the caller's model"
            return _Ready(how=how, run=EagerRunner(target.model), answers=target.model)
        try:
            apply_steps(target, self.recipe.steps)
        except TypeError as error:
            if has_inputs:
                raise
            raise ArtifactError(
                "the recipe cannot be replayed without inputs, and the model's own are nothing that a file can keep",
                found=str(error),
                next="call result.model in the process that optimized it",
            ) from error
        except RefusedTechnique as error:
            raise ArtifactError(
                "the recipe cannot be replayed on this model", found=error.found or error.summary
            ) from error
        if target.settings.engine == "aot":
            target.settings.engine = (
                "jit"  # shapes of the caller's own model need not be those of the artifact
            )
        return replace(self._run_target(target), how="the recipe on the caller's model")

    def _run_target(self, target: Any) -> _Ready:
        from torchwright.engines.runner import JitRunner

        if target.settings.engine == "eager":
            return _Ready(how="eager", run=EagerRunner(target.model))
        self._restore_cache()
        return _Ready(how="torch.compile", run=JitRunner(target.model, target.settings))

    def _restore_cache(self) -> None:
        """Let torch.compile find what it compiled when the artifact was made."""
        graphs, code = (
            self.path / artifact.NATIVE / name for name in (artifact.GRAPH_CACHE, artifact.MACHINE_CODE)
        )
        if not graphs.is_file() and not code.is_file():
            return
        if (reason := self._refuse_native()) is not None:
            self.notices.append(f"compiled cache left aside: {reason}; compiling afresh")
            return
        if graphs.is_file():
            torch.compiler.load_cache_artifacts(graphs.read_bytes())
        if code.is_file():
            restore_machine_code(code)


def _packages_of(manifest: Manifest, programs: dict[str, Any] | None) -> list[tuple[str, str]]:
    """(name of the call, file of its package) of what is compiled, or of what of it can be compiled from `programs`."""
    names = [spec.name for spec in manifest.calls] or list(manifest.cases)
    found = artifact.packages(names, manifest.rows, manifest.one_row)
    return [(name, file) for name, file in found if programs is None or name in programs]


def _later_called(module: nn.Module) -> Callable[..., Any]:
    """A copy of the caller's module in eval mode, made when it is first called."""
    make = functools.cache(lambda: fresh(module))
    return lambda *args, **kwargs: make()(*args, **kwargs)


def inductor_settings(recipe: Recipe) -> dict[str, Any]:
    """The Inductor settings that a recipe's steps ask for, without a model at hand."""
    from torchwright.techniques.base import Target, from_step, in_order
    from torchwright.workloads.module import ModuleWorkload

    empty = nn.Identity()
    workload = ModuleWorkload(empty, (torch.zeros(1),))
    target = Target(model=empty, workload=workload, device=recipe.fingerprint.device, properties=set())
    for step in in_order(recipe.steps):
        technique = from_step(step)
        if technique.gives & {"compiled"} or (technique.needs & {"compiled"} and not technique.removes):
            technique.apply(target)
    return target.settings.inductor


def _self_test(path: Path, run: Run, tolerance: float) -> None:
    from torchwright.artifact.tree import read_self_test
    from torchwright.workloads.accuracy import flatten, relative_error

    if not (path / "selftest.json").is_file():
        return
    kept = read_self_test(path / "selftest")
    case = Case(
        name=kept["name"],
        args=kept["args"],
        kwargs=kept["kwargs"],
        fixed=kept["name"] in ("prefill", "decode"),
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(kept["seed"])
        got = flatten(run(case))
    worst = relative_error(flatten(kept["output"]), got).value
    if not worst <= tolerance:
        raise ArtifactError(
            f"{path} fails its self-test",
            found=f"its output is off by {worst:.2g} (relative)",
            allowed=f"{tolerance:g}",
            next="optimize again on this machine",
        )


def _code_key(here: Fingerprint) -> str:
    return f"{here.torch}|{here.device.name}|{sorted(here.device.isa)}|{here.threads}"
