# pyright: basic
"""Loading an artifact: the fastest way to run it that this machine and the caller's trust allow."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.engines.eager import EagerRunner
from torchwright.engines.machine_code import restore_machine_code
from torchwright.engines.package import AotRunner, signature
from torchwright.errors import ArtifactError, RefusedTechnique, TorchwrightError
from torchwright.facts import Fingerprint, Recipe
from torchwright.paths import file_digest
from torchwright.plan import artifact
from torchwright.plan.artifact import Manifest
from torchwright.plan.fingerprint import fingerprint_here
from torchwright.process import folders
from torchwright.workloads.base import Case, Run, from_anywhere
from torchwright.workloads.encoding import Encoder, TextModel
from torchwright.workloads.generation import Generator, Geometry
from torchwright.workloads.rows import Batcher, Layout

SAME_MACHINE_ERROR = 1e-2
OTHER_MACHINE_ERROR = 0.1
"""Largest relative error of the self-test's output: the same code rounds alike, other code and other ISAs do not."""


@dataclass(kw_only=True)
class Loaded:
    """An artifact that is ready to run."""

    model: Any
    """A `LoadedDecoder` or `Generator` for a language model, an `OptimizedModule` for any other."""
    recipe: Recipe
    run: Run
    how: str
    """What runs: `native decoder`, `ahead-of-time package`, `recompiled graphs`, `graphs, uncompiled`, `torch.compile`,
    `eager`."""
    notices: list[str] = field(default_factory=list)


class OptimizedModule(nn.Module):
    """Called like the original; runs what the recipe made of it, without gradients."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._run(Case(name="forward", args=args, kwargs=kwargs))


def on_threads(run: Run, threads: int | None) -> Run:
    """`run` with its own number of intra-op threads; the caller's own is restored after every call."""
    if threads is None:
        return run

    def call(case: Case) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return run(case)
        finally:
            torch.set_num_threads(before)

    return call


def load(path: str | Path, *, model: nn.Module | None = None, trust: bool = False) -> Loaded:
    """Load an artifact and prove it on its self-test.

    `model` replays the recipe on the caller's own module, for artifacts that hold none. `trust` loads compiled code
    that somebody else built.

    Raises `ArtifactError` for an artifact that is damaged, newer, not self-contained, or that fails its self-test.
    """
    path = Path(path)
    with artifact.checked_meanwhile(path) as (recipe, manifest, checked):
        loader = _Loader(path, recipe, manifest, trust)
        if manifest.engine != "native":  # whose files are plain data, read while they are checked
            checked()
        run, how, tolerance = loader.best(model)
    run = on_threads(run, manifest.threads)
    if recipe.workload.get("layout"):
        run = Batcher(run, Layout.from_dict(recipe.workload["layout"]))
    device = loader.here.device.kind
    _self_test(path, from_anywhere(run, device), tolerance)
    return Loaded(
        model=loader.answers or as_model(run, recipe.workload, manifest, path / artifact.MODEL, device),
        recipe=recipe,
        run=run,
        how=how,
        notices=loader.notices,
    )


def as_model(run: Run, workload: dict[str, Any], manifest: Manifest, folder: Path, device: str) -> Any:
    """What a user calls: a `Generator`, `Encoder` or `TextModel` for models that read text, else an `OptimizedModule`.

    It takes tensors from anywhere; `run` takes them on `device`.
    """
    if "geometry" in workload:
        geometry = Geometry.from_dict(workload["geometry"])
        return Generator(run, geometry, getattr(torch, manifest.dtype), folder, device)
    module = OptimizedModule(from_anywhere(run, device))
    if not workload.get("layout"):
        return module
    layout = Layout.from_dict(workload["layout"])
    if workload["kind"] == "encoder":
        return Encoder(lambda case: module(*case.args), layout, folder, device)
    return TextModel(lambda case: module(**case.kwargs), layout, folder, list(workload["inputs"]), device)


class _Loader:
    """Tries the ways to run an artifact, fastest first."""

    def __init__(self, path: Path, recipe: Recipe, manifest: Manifest, trust: bool) -> None:
        self.path, self.recipe, self.manifest = path, recipe, manifest
        self.notices: list[str] = []
        self.answers: Any = None
        """What the user calls, where it is not made from `run`."""
        self.here = fingerprint_here(recipe.fingerprint.device.kind, measured=False)
        self.foreign = artifact.same_machine(recipe.fingerprint, self.here)
        self.allowed = trust or artifact.is_own(path)

    def best(self, model: nn.Module | None) -> tuple[Run, str, float]:
        for step in self.recipe.steps:
            if step.name == "allocator":
                from torchwright.devices.allocator import apply_allocator

                apply_allocator(str(step.options.get("kind", "retain")))
        if self.manifest.engine == "native":
            return self._native(), "native decoder", OTHER_MACHINE_ERROR
        if model is not None:
            return self._replay(model), "the recipe on the caller's model", OTHER_MACHINE_ERROR
        if self.manifest.engine == "aot":
            reason = self._refuse_native()
            if reason is None:
                return (
                    self._packages(self.path / artifact.NATIVE),
                    "ahead-of-time package",
                    SAME_MACHINE_ERROR,
                )
            self.notices.append(f"compiled code left aside: {reason}; compiling afresh")
        if (self.path / "programs.json").is_file():
            return self._graphs()
        if not self.manifest.self_contained:
            raise ArtifactError(
                f"{self.path} holds no model: torch.export could not take {self.recipe.workload.get('model')}",
                next="pass your own: tw.load(DIR, model=fresh_module) replays the recipe on it",
            )
        return self._rebuild()

    def _native(self) -> Run:
        from torchwright.decoder.native import NativeModel

        native = NativeModel.load(self.path, self.path / artifact.MODEL, self.here.device.kind)
        native.loaded.threads = self.manifest.threads
        self.answers = native.loaded
        return EagerRunner(native)

    def _refuse_native(self) -> str | None:
        if self.foreign:
            return self.foreign
        if not self.allowed:
            return "it was not built by this user on this machine (trust, or --trust, loads it all the same)"
        return None

    def _packages(self, folder: Path) -> AotRunner:
        names = self.manifest.cases
        packages = {name: folder / f"package-{index}.pt2" for index, name in enumerate(names)}
        try:
            return AotRunner(packages, dict(self.manifest.signatures))
        except RuntimeError as error:
            raise ArtifactError(
                f"the compiled code in {folder} cannot be loaded", found=str(error).splitlines()[0]
            ) from error

    def _graphs(self) -> tuple[Run, str, float]:
        from torchwright.engines.program import read_programs
        from torchwright.measure.toolchain import compiler_fault

        if self.manifest.engine != "eager":
            fault = compiler_fault(self.here.device)
            if fault is None:
                return self._packages(self._recompiled()), "recompiled graphs", OTHER_MACHINE_ERROR
            self.notices.append(f"running uncompiled: {fault}")
        programs = read_programs(self.path)
        modules = {name: program.module() for name, program in programs.items()}
        return GraphRunner(modules, dict(self.manifest.signatures)), "graphs, uncompiled", OTHER_MACHINE_ERROR

    def _recompiled(self) -> Path:
        """A folder in the user's cache with this artifact's graphs compiled for this machine."""
        from torchwright.engines.program import compile_program, read_programs

        key = hashlib.sha256(
            f"{file_digest(self.path / artifact.MANIFEST)}{_code_key(self.here)}".encode()
        ).hexdigest()[:24]
        folder = artifact.cache_folder() / "compiled" / key
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = f"{key}.unfinished-"
        folders.sweep(folder.parent, unfinished)
        temporary = folders.make(folder.parent, unfinished)
        try:
            programs = read_programs(self.path)
            settings = inductor_settings(self.recipe)
            for index, name in enumerate(self.manifest.cases):
                compile_program(programs[name], temporary.path / f"package-{index}.pt2", settings)
            temporary.path.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            temporary.remove()
        return folder

    def _rebuild(self) -> tuple[Run, str, float]:
        from torchwright.plan.apply import apply_steps, make_target
        from torchwright.workloads.detect import from_description

        folder = self.path / artifact.MODEL
        workload = from_description(self.recipe.workload, folder if folder.is_dir() else None)
        target = make_target(workload, self.here.device)
        apply_steps(target, self.recipe.steps)
        if not self.recipe.steps:
            target.model = workload.adapt(target.model)
        return self._run_target(target)

    def _replay(self, model: nn.Module) -> Run:
        from torchwright.plan.apply import apply_steps, make_target
        from torchwright.plan.tree import read_tree
        from torchwright.workloads.module import ModuleWorkload

        has_inputs = (self.path / "selftest.json").is_file()  # of a class of their own they cannot be kept
        kept = read_tree(self.path / "selftest") if has_inputs else {"args": (), "kwargs": {}}
        workload = ModuleWorkload(model, kept["args"] or kept["kwargs"])
        target = make_target(workload, self.here.device)
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
        return self._run_target(target)[0]

    def _run_target(self, target: Any) -> tuple[Run, str, float]:
        from torchwright.engines.runner import JitRunner

        if target.settings.engine == "eager":
            return EagerRunner(target.model), "eager", OTHER_MACHINE_ERROR
        self._restore_cache()
        return JitRunner(target.model, target.settings), "torch.compile", OTHER_MACHINE_ERROR

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


class GraphRunner:
    """Runs exported graphs operator by operator."""

    def __init__(self, modules: Mapping[str, nn.Module], signatures: dict[str, str]) -> None:
        self._modules = modules
        self._by_shape = {text: name for name, text in signatures.items()}

    def __call__(self, case: Case) -> Any:
        name = case.name if case.fixed else self._by_shape.get(signature(case.args, case.kwargs))
        if name is None:
            raise TorchwrightError(
                "this artifact was exported for other inputs",
                found=signature(case.args, case.kwargs),
                allowed="; ".join(self._by_shape),
                next="optimize with a list of inputs that has every shape",
            )
        return self._modules[name](*case.args, **case.kwargs)


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
    from torchwright.plan.tree import read_tree
    from torchwright.workloads.accuracy import flatten, relative_error

    if not (path / "selftest.json").is_file():
        return
    kept = read_tree(path / "selftest")
    case = Case(
        name=kept["name"],
        args=kept["args"],
        kwargs=kept["kwargs"],
        fixed=kept["name"] in ("prefill", "decode"),
    )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(kept.get("seed", 0))
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
