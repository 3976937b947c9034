# pyright: basic
"""Loading an artifact: the fastest way to run it that this machine and the caller's trust allow."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchwright.core.cpu_load import affinity, cpu_quota, whole_cores
from torchwright.core.errors import ArtifactError, OldArtifact, TorchwrightError, first_line
from torchwright.core.process.replacing_folders import steady
from torchwright.core.records import Interval, Recipe
from torchwright.hardware.kernels.cpu.threads import torch_threads
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.folder import Manifest
from torchwright.optimization.artifact.strategies import ArtifactLoader
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.module import OptimizedModule
from torchwright.optimization.engines.dispatch.spec import NumberDomain, is_structure
from torchwright.optimization.engines.eager import Eager
from torchwright.workloads.base import Case, Optimized, Run, class_of, from_anywhere

NewShape = Literal["run", "error"]
ONE_SCALE = b"quantized_decomposed.choose_qparams"
"""The operator of the older `int8_dynamic`: one activation scale for all rows of a call."""


@dataclass(kw_only=True)
class Loaded:
    """An artifact that is ready to run."""

    model: Any
    """The object that answers (`Workload.answerer`), such as a `Generator` or an `Encoder`; a `LoadedDecoder` on the
    native decoder; else an `OptimizedModule`."""
    recipe: Recipe
    run: Run
    how: str
    """The code that runs: `native decoder`, `ahead-of-time package`, `recompiled graphs`, `graphs, uncompiled`,
    `torch.compile`, `eager`, `OpenVINO`, `ONNX Runtime`, `the recipe on the caller's model`."""
    measured: Interval | None = None
    """The speed-up that was measured of what runs here; None where something else was measured."""
    notices: list[str] = field(default_factory=list)


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

    `model` replays the recipe on the caller's own module, for artifacts that hold no model. `original` answers calls
    that the artifact itself cannot: forms, shapes and dtypes that nothing was compiled or exported for. `trust` loads
    compiled code, and runs code that the recipe names, that somebody else made. With `process=False` no lasting
    change is made to this process: a recipe that keeps freed memory does without. `on_new_shape="error"` refuses
    every call that the compiled code does not take itself, instead of a fallback.

    Raises `ArtifactError` for an artifact that is damaged, newer, not self-contained, or that fails its self-test.
    """
    if on_new_shape not in ("run", "error"):
        raise TorchwrightError(f"on_new_shape={on_new_shape!r}", allowed="run, error")
    path = Path(path)
    try:
        strict = on_new_shape == "error"
        return steady(path, lambda: _load(path, model, original, trust, process, strict))
    except (TorchwrightError, MemoryError):
        raise
    except Exception as error:
        if trust or artifact.is_own(path):
            raise
        raise ArtifactError(  # any failure on an untrusted file
            f"{path} cannot be loaded", found=f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _load(
    path: Path, model: nn.Module | None, original: nn.Module | None, trust: bool, process: bool, strict: bool
) -> Loaded:
    with artifact.checked_meanwhile(path) as (recipe, manifest, checked):
        _check_calls(path, manifest)
        loader = ArtifactLoader(
            path, recipe, manifest, trust=trust, process=process, original=original, strict=strict
        )
        if fault := outdated(path, recipe, manifest, loader.engine.domain):
            loader.say(fault)
            warnings.warn(f"{path}: {fault}", OldArtifact, stacklevel=4)
        if not loader.engine.whole:  # whose files are plain data, read while they are checked
            checked()
        ready = loader.best(model)
    device = loader.device
    threads = manifest.threads or torch.get_num_threads()
    if device == "cpu" and (notice := quota_notice(threads, cpu_quota())):
        loader.notices.append(notice)
    # A process that is pinned to fewer cores: more threads than these would wait for each other.
    measured = manifest.threads and min(manifest.threads, len(affinity()))
    run = ready.run if ready.dispatcher is not None else on_threads(ready.run, measured)
    run = class_of(recipe.workload).front(run, recipe.workload)
    answers = ready.answers or as_model(
        run, ready.dispatcher, recipe.workload, manifest, path / artifact.MODEL, device
    )
    loaded = Loaded(
        model=answers,
        recipe=recipe,
        run=run,
        how=ready.how,
        measured=recipe.speedup if ready.how == recipe.runs_as else None,
        notices=loader.notices,
    )
    _self_test(path, call_as_user(loaded, device), manifest, ready.tolerance)
    return loaded


def quota_notice(threads: int, quota: float | None) -> str | None:
    """Return what to do where a CPU quota grants fewer cores than there are threads; None where it does not."""
    if quota is None or threads <= quota:
        return None
    return (
        f"{threads} threads share a CPU quota of {quota:g} cores, and wait for each other: OMP_NUM_THREADS="
        f"{whole_cores(threads, quota)} or torch.set_num_threads({whole_cores(threads, quota)}) runs faster"
    )


def call_as_user(loaded: Loaded, device: str) -> Run:
    """Makes a call as the user does, where that is a call of the model itself."""
    model = loaded.model
    if isinstance(model, OptimizedModule) or (isinstance(model, nn.Module) and not loaded.recipe.steps):
        return lambda case: model(*case.args, **case.kwargs)
    return from_anywhere(loaded.run, device)


def as_model(
    run: Run,
    dispatcher: CallDispatcher | None,
    workload: dict[str, Any],
    manifest: Manifest,
    folder: Path,
    device: str,
) -> Any:
    """Return the user's interface: the workload's own `answerer`, or an `OptimizedModule` if it has none.

    It takes tensors from anywhere; `run` takes them on `device`.
    """
    calls = without_gradients(from_anywhere(run, device))
    optimized = Optimized(
        run=calls,
        description=workload,
        dtype=getattr(torch, manifest.dtype),
        device=device,
        folder=folder,
    )
    answerer = class_of(workload).answerer(optimized)
    if answerer is not None:
        return answerer
    if dispatcher is None and isinstance(run, Eager) and device == "cpu":
        return OptimizedModule(run.model, device)  # whose parameters record no gradients

    def call(*args: Any, **kwargs: Any) -> Any:
        return calls(Case(name="forward", args=args, kwargs=kwargs))

    return OptimizedModule(dispatcher or call, device)


def without_gradients(run: Run) -> Run:
    """`run`, of which nothing is recorded for gradients."""

    def call(case: Case) -> Any:
        with torch.no_grad():
            return run(case)

    return call


def _check_calls(path: Path, manifest: Manifest) -> None:
    """Raise `ArtifactError` for a manifest whose calls are not calls."""
    for parameter in manifest.takes.parameters:
        if not parameter.name.isidentifier() or not hasattr(inspect.Parameter, parameter.kind):
            raise ArtifactError(f"{path} is damaged", found=f"the parameter {parameter.name[:80]!r}")
    others = (manifest.any_rows, manifest.one_row, manifest.any_sizes, manifest.one_graph)
    for spec in (*manifest.calls, *others):
        if spec is not None and not (
            is_structure(spec.structure, len(spec.tensors)) and list(spec.structure) == ["tuple"]
        ):
            raise ArtifactError(f"{path} is damaged", found=f"the call {spec.name!r}", next="optimize again")


def _self_test(path: Path, run: Run, manifest: Manifest, tolerance: float) -> None:
    from torchwright.optimization.artifact.tree import read_self_test
    from torchwright.workloads.accuracy import flatten, relative_error

    if not (path / "selftest.json").is_file():
        return
    kept = read_self_test(path / "selftest")
    fixed = kept["fixed"]
    if fixed is None:  # made by a version that did not say
        fixed = kept["name"] in ([spec.name for spec in manifest.calls] or manifest.cases)
    case = Case(name=kept["name"], args=kept["args"], kwargs=kept["kwargs"], fixed=fixed)
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


def outdated(path: Path, recipe: Recipe, manifest: Manifest, domain: NumberDomain) -> str | None:
    """Return what an artifact computes wrongly and what to do, or None for one without a known fault.

    `domain` is that of its engine.
    """
    steps = {step.name for step in recipe.steps}
    faults: list[str] = []
    if "int8_dynamic" in steps and _holds(path / "programs.json", ONE_SCALE):
        faults.append("rows of a batch influence each other, since int8_dynamic has one scale per call")
    narrow = "int8_static" in steps or domain != NumberDomain()
    if narrow and manifest.calls and not any(spec.guards for spec in manifest.calls):
        faults.append(
            "calls are not checked for numbers that its engine computes differently, such as NaN or 64-bit integers"
        )
    if not faults:
        return None
    return f"made by an older version: {'; '.join(faults)}; optimize the model again"


def _holds(file: Path, text: bytes) -> bool:
    return file.is_file() and text in file.read_bytes()
