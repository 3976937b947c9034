# pyright: basic
"""Verification of the artifact: what ships is loaded in a fresh process and measured as its user calls it.

The forms that a recipe may ship in are written one after another, until one holds against the original. Each is a whole
artifact in the search's scratch folder. The original is timed in the same process; where the recipe changes the whole
process, it has a fresh one of its own. Neither is forked, because the heap of a long-lived process would distort the
measurement: glibc raises the size from which it maps memory.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchwright.core.errors import TorchwrightError
from torchwright.core.records import Interval, ProcessGain, Recipe, RowsTime, Step
from torchwright.hardware.measure.clock import Rounds, paired_speedup
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.engines.base import ShippingForm
from torchwright.optimization.proof.forms import Contents, ways, write_contents
from torchwright.optimization.proof.recipe import domain_notes
from torchwright.optimization.proof.settle import ShippingAttempt, settle
from torchwright.optimization.search import estimate, judging
from torchwright.optimization.search.compare import (
    FEWEST_ROUNDS,
    ROUNDS,
    limit_seconds,
    one_round,
    turn_seconds,
)
from torchwright.optimization.search.estimate import LEAST_SECONDS
from torchwright.optimization.search.finish import outcome_now
from torchwright.optimization.search.state import LATE_SHARE, PATIENCE, Outcome, Search
from torchwright.optimization.trial import client as trial
from torchwright.optimization.trial.client import Candidate, TrialFailed
from torchwright.report import view
from torchwright.report.pictures import PictureRow
from torchwright.workloads.base import Workload

Provisional = Callable[[Outcome], Recipe]
Turns = Callable[[Search, Candidate, Candidate, float], tuple[list[float], list[float]]]
"""Seconds of two processes that are timed in turn for about so many seconds."""


@dataclass(kw_only=True)
class VerifiedArtifact:
    """The shipped form and its measurements."""

    recipe: Recipe
    folder: Path
    """A whole artifact but for its last recipe and report."""
    manifest: dict[str, Any]
    pictures: tuple[PictureRow, ...] = ()


class OriginalInProcess:
    """The original in the artifact's own process, asked as if it had one to itself.

    The growth of a process's heap decides whether large activations fault their pages in at every call: the same module
    takes 13 or 32 ms. In one process both have the same heap.
    """

    def __init__(self, process: Any) -> None:
        self._process = process

    def ask(self, method: str, **arguments: Any) -> Any:
        return self._process.ask("original", request=method, arguments=arguments)

    def close(self) -> None:
        """It ends with the artifact's."""


@dataclass(kw_only=True)
class _Shipping:
    """The forms as they are made."""

    search: Search
    workload: Workload
    scratch: Path
    provisional: Provisional
    made: dict[ShippingForm, tuple[Path, Contents]] = field(default_factory=dict)
    how: dict[ShippingForm, str] = field(default_factory=dict)
    rows: tuple[RowsTime, ...] = ()
    pictures: tuple[PictureRow, ...] = ()
    loading: float = 0.0
    """When the last fresh process was started."""

    def form(self, name: ShippingForm) -> ShippingAttempt:
        return ShippingAttempt(
            name=name,
            start=lambda: self._start(name),
            prove=lambda candidate: self._measure_further(name, candidate),
            again=lambda: self._load_again(name),
        )

    def write(self, name: ShippingForm) -> None:
        """The whole artifact in one form."""
        search = self.search
        folder, work = self.scratch / f"as-{name}", self.scratch / f"for-{name}"
        folder.mkdir()
        work.mkdir()
        graphs = self.made.get("graphs") if name == "module" else None
        contents = write_contents(folder, work, search, self.workload, name, graphs)
        search.notes += contents.notes
        self.made[name] = folder, contents

    def _start(self, name: ShippingForm) -> Candidate:
        search = self.search
        _extend_deadline(search)
        self.write(name)
        # Of a slow model the writing takes its time, and what it has made is worth a proof all the same.
        _extend_deadline(search)
        folder, contents = self.made[name]
        artifact.finish(folder, self.provisional(outcome_now(search)), contents.manifest)
        candidate = self._with_the_original(folder)
        self.how[name] = candidate.how
        return candidate

    def _load_again(self, name: ShippingForm) -> Candidate | None:
        """Load a form in one more fresh process, which is expected to take what the last one took."""
        search = self.search
        shares = self.workload.called_as_is() and not _settles_process(search.best.steps)
        took = search.context.clock() - self.loading
        if not shares or took + estimate.figures_seconds(search) > _time_left(search):
            return None
        return self._with_the_original(self.made[name][0])

    def _with_the_original(self, folder: Path) -> Candidate:
        self.loading = self.search.context.clock()
        candidate = self.loaded(folder)
        if beside := original_in_process(candidate.process, self.workload, self.search.best.steps):
            candidate.original = replace(self.search.baseline, process=beside, turns=[])
        return candidate

    def _measure_further(self, name: ShippingForm, candidate: Candidate) -> None:
        """The speed-up at other numbers of rows, then the metric, whose own tensors would change the timing."""
        self.rows = _other_rows(self.search, candidate, self.made[name][1])
        unseen = self.search.last_reference is not None
        judging.measure(self.search, candidate, unseen=unseen, show=bool(self.search.best.steps))
        self.pictures = tuple(candidate.process.ask("pictures"))
        if self.search.over_budget(candidate):
            assert candidate.quality is not None
            raise TrialFailed(f"its loss was up to {candidate.quality.drop_high:.2%} once loaded")

    def loaded(self, folder: Path, *, process: bool = True) -> Candidate:
        """The artifact, loaded as its user would in a process that has seen nothing else."""
        best, context = self.search.best, replace(self.search.context, fork=False)
        steps = [step for step in best.steps if process or step.name != "allocator"]
        worker = trial.TrialProcess(context, trial.environment_of(steps))
        try:
            opened = worker.ask("load_artifact", path=str(folder), trust=True, process=process)
        except BaseException:
            worker.close()
            raise
        return replace(
            best,
            process=worker,
            folder=None,
            turns=[],
            quality=None,
            memory=0,
            how=opened.how,
        )


def verify_artifact(
    search: Search, workload: Workload, scratch: Path, provisional: Provisional
) -> VerifiedArtifact:
    """Write and prove the recipe's forms; the original's where none holds. Closes every process."""
    shipping = _Shipping(search=search, workload=workload, scratch=scratch, provisional=provisional)
    forms: list[ShippingAttempt] = []
    if search.best is not search.baseline:
        _extend_deadline(search)
        if _settles_process(search.best.steps) or not workload.called_as_is():
            _fresh_original(search)
        forms = [shipping.form(name) for name in ways(search.best, workload)]
    else:
        _time_original(search)
    outcome, form, candidate = settle(search, forms) if forms else (outcome_now(search), None, None)
    if form is None:
        *_, name = ways(search.best, workload)
        for failed in (name, "graphs"):  # of a recipe that did not hold
            _discard_form(shipping, failed)
        shipping.rows, shipping.pictures = (), ()
        shipping.write(name)
    else:
        name = form.name
    folder, contents = shipping.made[name]
    search.notes += domain_notes(contents.manifest, outcome.final.cases)
    if outcome.speedup.disturbed:
        search.notes.append(disturbance_note(outcome.speedup, workload))
    gain = None if candidate is None else _process_gain(shipping, candidate, folder)
    if candidate is not None:
        candidate.close()
    search.close_all()
    _note_overrun(search)
    recipe = replace(
        provisional(replace(outcome, notes=tuple(search.notes))),
        runs_as=shipping.how.get(name, view.OWN_MODULE if name == "module" else ""),
        rows=shipping.rows,
        process=gain,
        holds_graph=name == "module" and contents.manifest["self_contained"],
    )
    return VerifiedArtifact(
        recipe=recipe, folder=folder, manifest=contents.manifest, pictures=shipping.pictures
    )


def _time_original(search: Search) -> None:
    """Take as many turns of the original as a comparison does, where trials took fewer and time is left."""
    with suppress(TrialFailed):  # its process may be lost: the turns of the search are enough
        while len(search.baseline.turns) < ROUNDS[0] and turn_seconds(search.baseline) < _time_left(search):
            search.baseline.turn()


def _note_overrun(search: Search) -> None:
    """Say by how much the artifact is later than the time budget, and than what it was stretched by, and why."""
    late = search.context.clock() - search.end
    if late > LATE_SHARE * search.budget.time_seconds:
        load = search.context.load()
        why = f"machine busy: {load}" if load.slowdown > 1.0 else "it is written and proved all the same"
        search.notes.append(f"the artifact took {late:.0f} s longer than the time budget: {why}")


def _extend_deadline(search: Search) -> None:
    """Give what comes next its time; on a busy machine it takes longer."""
    ready = estimate.afresh_seconds(search, search.best.steps)
    expected = 2 * ready + estimate.fresh_process_seconds(search) + estimate.figures_seconds(search)
    seconds = PATIENCE * max(LEAST_SECONDS, expected) * search.context.load().slowdown
    search.context.deadline = search.last_moment = search.context.clock() + seconds


def disturbance_note(speedup: Interval, workload: Workload) -> str:
    """Return the note of a comparison that a busy machine disturbed, with the command that measures again."""
    again = "`torchwright verify` measures" if workload.made_again() else "optimizing once more measures"
    return f"the machine was disturbed while the artifact was timed ({speedup}): {again} again"


def _discard_form(shipping: _Shipping, name: ShippingForm) -> None:
    """Make room for a form that was tried with a recipe that did not hold."""
    shipping.made.pop(name, None)
    shipping.how.pop(name, None)
    for folder in (shipping.scratch / f"as-{name}", shipping.scratch / f"for-{name}"):
        shutil.rmtree(folder, ignore_errors=True)


def original_in_process(process: Any, workload: Workload, steps: Sequence[Step]) -> OriginalInProcess | None:
    """The original, brought into the process that has loaded an artifact of these steps, where the two can share it."""
    if not workload.called_as_is() or _settles_process(steps):
        return None
    process.ask("beside")
    return OriginalInProcess(process)


def _settles_process(steps: Sequence[Step]) -> bool:
    """Check whether the recipe changes its whole process, and so cannot share it with the original."""
    return any(step.name == "allocator" for step in steps)


def _fresh_original(search: Search) -> None:
    """Start the original in a process that has done nothing before; the search's own stays where that fails."""
    old = search.baseline
    try:
        fresh = trial.start_candidate(replace(search.context, fork=False), (), essential=True)
        fresh.quality, fresh.memory, fresh.recompiles = old.quality, old.memory, old.recompiles
        fresh.turn()
    except TrialFailed as failure:
        search.notes.append(f"the original was not timed in a fresh process ({failure.reason})")
        return
    if search.best is old:
        search.best = fresh
    search.baseline = fresh
    old.close()


def _other_rows(
    search: Search, candidate: Candidate, contents: Contents, turns: Turns | None = None
) -> tuple[RowsTime, ...]:
    """The speed-up at one row, half of the example's and twice as many, in the same two processes."""
    takes = contents.manifest.get("takes")
    if takes is None or not takes.batched or len(search.baseline.prepared.repeats) != 1:
        return ()
    example = contents.manifest["calls"][0].tensors[takes.batched[0]].shape[0]
    if not isinstance(example, int):  # the caller has said which sizes vary
        return ()
    if _is_late(search, "other numbers of rows were"):
        return ()
    found = []
    for rows in sorted({1, example // 2, 2 * example} - {0, example}):
        needed = FEWEST_ROUNDS * (turn_seconds(search.baseline) + turn_seconds(candidate)) * rows / example
        # The judgement comes after: without it nothing ships.
        if _is_late(search, f"{rows} rows were", needed + search.settle_seconds):
            break
        try:
            original = candidate.original or search.baseline
            for contender in (original, candidate):
                contender.process.ask("resize", batched=takes.batched, rows=rows)
            before, after = (turns or _turns)(search, original, candidate, limit_seconds(search) / 2)
        except (TrialFailed, TorchwrightError) as failure:
            search.notes.append(f"{rows} rows were not timed ({failure})")
            break
        seconds = sorted(after)[len(after) // 2]
        found.append(RowsTime(rows=rows, seconds=seconds, speedup=paired_speedup(before, after)))
    return tuple(found)


def _process_gain(shipping: _Shipping, candidate: Candidate, folder: Path) -> ProcessGain | None:
    """Measure the gain of process-wide steps separately."""
    search = shipping.search
    if not _settles_process(search.best.steps) or _is_late(search, "the recipe without its allocator was"):
        return None
    others: list[Candidate] = []
    try:
        others.append(shipping.loaded(folder, process=False))
        others.append(trial.start_candidate(replace(search.context, fork=False), ()))
        others[1].process.ask("keep_memory")
        for contender in (search.baseline, candidate):
            contender.process.ask("resize", batched=(), rows=None)
        without = _pair(search, search.baseline, others[0])
        both = _pair(search, others[1], candidate)
    except (TrialFailed, TorchwrightError) as failure:
        search.notes.append(f"without its allocator the recipe was not timed ({failure})")
        return None
    finally:
        for other in others:
            other.close()
    return ProcessGain(without=without, both=both)


def _time_left(search: Search) -> float:
    """Seconds until the time budget is spent, or until the proof must have ended where that comes first."""
    return min(search.end - search.context.clock(), search.context.remaining())


def _is_late(search: Search, what: str, needed: float = 0.0) -> bool:
    """Check whether the time budget is spent, or would be after `needed` seconds.

    Figures that are only reported are then not measured."""
    if needed <= _time_left(search):
        return False
    search.notes.append(f"{what} not timed: the time budget was spent")
    return True


def _pair(search: Search, one: Candidate, other: Candidate) -> Interval:
    return paired_speedup(*_turns(search, one, other, limit_seconds(search)))


def _turns(
    search: Search, one: Candidate, other: Candidate, seconds: float
) -> tuple[list[float], list[float]]:
    begun, rounds = time.monotonic(), Rounds[tuple[float, float]](enough=ROUNDS[0])
    while len(rounds.all) < ROUNDS[1]:
        spent = time.monotonic() - begun
        if len(rounds.all) >= (ROUNDS[0] if spent < 2 * seconds else FEWEST_ROUNDS) and spent > seconds:
            break
        (before, after), waited = one_round([one, other], first=len(rounds.all) % 2)
        rounds.add((one.seconds(before), other.seconds(after)), waited)
    return [row[0] for row in rounds.counted], [row[1] for row in rounds.counted]
