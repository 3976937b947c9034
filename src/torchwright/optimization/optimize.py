"""One optimization from a workload to an artifact."""

from __future__ import annotations

import contextlib
import math
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from torchwright.core.errors import ArtifactError, TorchwrightError, WorkloadError
from torchwright.core.process import interrupts
from torchwright.core.quiet import errors_alone
from torchwright.core.records import Event, Recipe
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.fingerprint import fingerprint_here
from torchwright.optimization.proof.recipe import make_recipe
from torchwright.optimization.proof.served import try_served
from torchwright.optimization.proof.verify_artifact import verify_artifact
from torchwright.optimization.search import experience, resume
from torchwright.optimization.search.asked import check_asked
from torchwright.optimization.search.loop import run
from torchwright.optimization.search.state import Outcome, Request, Search, Watch
from torchwright.optimization.techniques.base import from_step, techniques
from torchwright.optimization.trial.client import HANG_SECONDS, Context, TrialFailed
from torchwright.optimization.trial.fork_server import can_fork
from torchwright.optimization.trial.travel import pack
from torchwright.report import html
from torchwright.workloads.detect import check_described

SCRATCH = ".trials"
"""The folder for compilations of trials, in the unfinished artifact."""


def optimize(request: Request, out: Path, watch: Watch) -> Recipe:
    """Search, then write the artifact `out`, whole or not at all.

    Raises what the search raises, and `WorkloadError` for a workload that cannot travel to another process. Raises
    `ArtifactError` for an `out` that is in the way, or an earlier search that cannot be continued.
    """
    budget = request.budget
    if budget.max_drop < 0 or budget.time_seconds <= 0:
        raise WorkloadError(f"a budget of {budget}", allowed="max_drop of 0 or more, time above 0 seconds")
    check_described(request.workload)
    device = get_device(request.device)
    check_asked(request, device)
    earlier = resume.read(request.resume, request, device.name) if request.resume else None
    for notice in request.workload.notices():
        watch(Event(kind="notice", text=notice, elapsed=0.0, time_budget=budget.time_seconds))
    _build_kernels(watch, request)
    served = tuple(step for step in request.wanted if from_step(step).served)
    threads = earlier.fingerprint.threads if earlier else torch.get_num_threads()
    with interrupts.deferred(), artifact.writing(out) as folder:
        scratch = folder / SCRATCH
        scratch.mkdir()
        context = Context(
            workload=pack(request.workload, scratch),
            device=device.name,
            threads=threads,
            any_threads=threads < torch.get_num_threads(),
            seed=request.seed,
            scratch=scratch,
            deadline=math.inf,  # until the original is measured
            hang_seconds=max(HANG_SECONDS, budget.time_seconds),
            fork=can_fork(device.name),
        )
        with context:
            search = Search(
                context=context,
                budget=budget,
                watch=watch,
                wanted=tuple(step for step in request.wanted if step not in served),
                served=served,
                only=request.only,
                without=request.without,
                earlier=earlier,
            )
            if request.experience is not None and budget.objective != "memory":
                _read_experience(search, request.experience)
            run(search)
            fingerprint = fingerprint_here(device.name, threads=context.threads)

            def provisional(outcome: Outcome) -> Recipe:
                return make_recipe(outcome, request.workload, budget, fingerprint, request.command)

            try:
                claimed = verify_artifact(search, request.workload, scratch, provisional)
            except TrialFailed as failure:
                raise TorchwrightError(
                    "the result could not be written", found=failure.reason, next="optimize again"
                ) from failure
            finally:
                search.close_all()
            properties = search.best.prepared.properties
            kept = try_served(search, request.workload, claimed.folder, properties)
        recipe, manifest = claimed.recipe, claimed.manifest
        recipe = replace(recipe, rungs=tuple(search.rungs), steps=(*recipe.steps, *kept))
        for name in (artifact.RECIPE, artifact.MANIFEST, artifact.SIGNATURE):
            (claimed.folder / name).unlink(missing_ok=True)
        for entry in claimed.folder.iterdir():
            entry.rename(folder / entry.name)
        shutil.rmtree(scratch)
        interrupts.check()
        (folder / artifact.REPORT).write_text(html.render(recipe, claimed.pictures), encoding="utf-8")
        unsigned = artifact.finish(folder, recipe, manifest)
        if unsigned:
            search.tell("notice", unsigned)
    return recipe


def _read_experience(search: Search, table: Path) -> None:
    """A table that cannot be read costs the search its order, no more."""
    try:
        search.records = experience.read(table)
    except ArtifactError as error:
        search.tell("notice", f"the search goes on without experience: {error.reason}")


def _build_kernels(watch: Watch, request: Request) -> None:
    """Compile the kernels where one of the techniques may need them; why they cannot be is each technique's to say."""
    needed = not request.only or any(techniques.get(step.name).own_kernels for step in request.wanted)
    if build.ready() or not needed:
        return
    text = "compiling the kernels, once for this version"
    watch(Event(kind="stage", text=text, elapsed=0.0, time_budget=request.budget.time_seconds))
    with errors_alone("torchwright.hardware.kernels"), contextlib.suppress(build.BuildError, OSError):
        build.library()
