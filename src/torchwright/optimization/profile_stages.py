# pyright: basic
"""A model's profile before and after each step of its recipe: the stages, each in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ArtifactError, TorchwrightError, WorkloadError
from torchwright.core.process import folders
from torchwright.core.records import Event, Recipe, Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.open_model import is_artifact, refuse_for_artifact
from torchwright.optimization.profile.trace import write_trace
from torchwright.optimization.profile.values import Breaks, Profile, ProfiledStage, Recording
from torchwright.optimization.rebuild import trials, workload_of
from torchwright.optimization.techniques.base import in_order, parse_step
from torchwright.optimization.trial.client import Context, TrialFailed, TrialProcess, start_candidate
from torchwright.workloads.base import Workload
from torchwright.workloads.detect import from_target, settings_of

Recorded = tuple[str, Recording, tuple[str, ...]]
"""The code that runs, the recording, and notices."""
ORIGINAL, ARTIFACT = "original", "artifact"
BUNDLED_NAME = "the bundled model"
DEVICE = "cpu"
"""A card's own times are not read."""
SECONDS = 1800.0
"""All stages together; each step's compilation is among it."""
KERNEL_NAMES = {"TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE": "1"}
"""Has Inductor compile kernels with names that the profiler sees."""


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """The profiled workload."""

    name: str
    workload: Workload
    steps: tuple[Step, ...]
    recipe: Recipe | None = None
    """The artifact's recipe."""
    lacking: str | None = None
    """The reason why there is no original; the workload then has only its calls."""


@dataclass(kw_only=True)
class _Asked:
    """The stages so far, and what it takes to make more."""

    context: Context
    traces: Path | None
    """The folder for the profiler's files, where they are wanted."""
    tell: Callable[[str], None]
    stages: list[ProfiledStage] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    recorded: list[tuple[str, Path]] = field(default_factory=list)
    """The profiler's files by the names of their stages."""

    def stage(self, name: str, run: Callable[[str | None], Recorded]) -> None:
        """One stage; one that fails is a stage, too, with its reason."""
        self.tell(f"profiling {name}")
        file = self.traces / f"{len(self.stages)}.json" if self.traces else None
        try:
            runs_as, recording, notes = run(str(file) if file else None)
        except (TrialFailed, TorchwrightError) as error:
            self.errors.append(error)
            self.stages.append(ProfiledStage(name=name, runs_as="", recording=None, failed=error.reason))
            return
        self.stages.append(ProfiledStage(name=name, runs_as=runs_as, recording=recording, notes=notes))
        if file is not None:
            self.recorded.append((name, file))


def profile(
    target: str | None,
    *,
    with_steps: Sequence[str] = (),
    settings: Sequence[str] = (),
    rungs: bool = False,
    trust: bool = False,
    trace: Path | None = None,
    page: Path | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    **options: Any,
) -> Profile:
    """Profile an original's calls: the model as it is, after each of `with_steps`, or as an artifact.

    Of an artifact with `rungs` each step of its recipe is applied again, with those before it. Kernels of steps that
    compile have names then. `options` and `settings` are the workload's own; an artifact has settled them. `trace` is
    the file for Perfetto; `page`, where the caller writes one, is looked at before anything is measured.

    Raises what `optimize` does for a model, `ArtifactError` as `load` does, and `TorchwrightError` where no stage could
    be profiled.
    """
    for file in filter(None, (trace, page)):
        _check_writable(file)
    begun = time.monotonic()

    def tell(text: str) -> None:
        on_event(Event(kind="stage", text=text, elapsed=time.monotonic() - begun, time_budget=SECONDS))

    steps = tuple(parse_step(text) for text in with_steps)
    subject = _subject(target, steps, rungs, trust, options | settings_of(settings))
    with (
        folders.temporary() as traces,
        trials(subject.name, subject.workload, DEVICE, subject.recipe, SECONDS) as context,
    ):
        asked = _Asked(context=context, traces=traces if trace else None, tell=tell)
        breaks = _original(asked, subject)
        for prefix in _prefixes(subject.steps):
            asked.stage(str(prefix[-1]), lambda file, prefix=prefix: _after(context, prefix, file))
        if subject.recipe is not None:
            asked.stage(ARTIFACT, lambda file: _artifact(context, subject.name, trust, file))
        if not any(stage.recording for stage in asked.stages):
            raise asked.errors[0]
        if trace is not None:
            write_trace(asked.recorded, trace)
        return Profile(
            target=subject.name,
            machine=get_device(DEVICE).facts(),
            disturbed=get_device(DEVICE).ceilings().disturbed,
            threads=context.threads,
            torch=torch.__version__,
            stages=_with_operations(asked.stages),
            breaks=breaks,
            trace=str(trace) if trace else None,
        )


def _subject(
    target: str | None, steps: tuple[Step, ...], rungs: bool, trust: bool, options: dict[str, Any]
) -> _Subject:
    """Return what `target` names; of an artifact its recipe's steps with `rungs`."""
    if not (target and is_artifact(target)):
        name = target or BUNDLED_NAME
        if rungs:
            raise WorkloadError(f"--rungs is not for {name}", next="--with TECHNIQUE for each step")
        return _Subject(name=name, workload=from_target(target, **options), steps=steps)
    refuse_for_artifact(target, **options, **{"with": "+".join(map(str, steps)) or None})
    recipe, manifest = artifact.open_artifact(Path(target))
    kind = recipe.fingerprint.device.kind
    if kind != DEVICE:
        raise ArtifactError(f"{target} is for {kind}", allowed="profiles of CPUs")
    workload, lacking = _workload(Path(target), recipe, trust, manifest.self_contained)
    steps = recipe.steps if rungs and lacking is None else ()
    return _Subject(name=target, workload=workload, steps=steps, recipe=recipe, lacking=lacking)


def _workload(path: Path, recipe: Recipe, trust: bool, self_contained: bool) -> tuple[Workload, str | None]:
    """Return an artifact's workload, and the reason if only its calls could be restored."""
    try:
        return workload_of(path, recipe, trust=trust), None
    except TorchwrightError as error:
        if not self_contained or not (path / "selftest.json").is_file():
            raise
        return workload_of(path, recipe, trust=trust, cases_only=True), error.reason


def _original(asked: _Asked, subject: _Subject) -> Breaks | None:
    """The stage of the model as it is, and where compiling it breaks off."""
    if subject.lacking is not None:
        asked.stages.append(ProfiledStage(name=ORIGINAL, runs_as="", recording=None, failed=subject.lacking))
        return None
    found: list[Breaks] = []

    def run(file: str | None) -> Recorded:
        with TrialProcess(asked.context) as process:
            process.ask("prepare", steps=())
            recording = process.ask("profile", named=False, trace=file)
            asked.tell("looking for graph breaks")
            try:
                found.append(process.ask("breaks"))
            except (TrialFailed, TorchwrightError) as error:
                found.append(Breaks(graphs=0, found=(), failed=error.reason))
        return "eager", recording, ()

    asked.stage(ORIGINAL, run)
    return found[0] if found else None


def _after(context: Context, steps: tuple[Step, ...], file: str | None) -> Recorded:
    with closing(start_candidate(context, steps, KERNEL_NAMES)) as candidate:
        recording = candidate.process.ask("profile", named=True, trace=file)
        return candidate.prepared.engine, recording, ()


def _artifact(context: Context, path: str, trust: bool, file: str | None) -> Recorded:
    with TrialProcess(context) as process:
        loaded, recording = process.ask("profile_artifact", path=path, trust=trust, trace=file)
        return loaded.how, recording, loaded.notices


def _with_operations(stages: Sequence[ProfiledStage]) -> tuple[ProfiledStage, ...]:
    """The stages, with the original's operations where compiled code hides its sizes: it computes the same."""
    first = stages[0].recording
    known = first.operations if first else None
    return tuple(
        replace(stage, recording=replace(stage.recording, operations=known))
        if stage.recording and stage.recording.operations is None
        else stage
        for stage in stages
    )


def _prefixes(steps: Sequence[Step]) -> Iterator[tuple[Step, ...]]:
    """The first step, the first two, … in the order in which they are applied."""
    ordered = tuple(in_order(steps))
    return (ordered[: count + 1] for count in range(len(ordered)))


def _check_writable(file: Path) -> None:
    """Refuse a place for a file before anything is measured."""
    if file.is_dir():
        raise TorchwrightError(
            f"{file} is a folder", allowed="the name of a file", next=f"-o {file}/trace.json"
        )
    if not file.resolve().parent.is_dir() or not os.access(file.resolve().parent, os.W_OK):
        raise TorchwrightError(
            f"{file} cannot be written", found=f"no folder {file.resolve().parent} to write in"
        )
