"""The state of one search: its request, and its findings so far."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torchwright.core.records import (
    RELATIVE_ERROR,
    Budget,
    Event,
    Interval,
    Measurement,
    Recipe,
    Step,
    StepResult,
)
from torchwright.optimization.engines.apply import DISCOVERED
from torchwright.optimization.engines.base import engines
from torchwright.optimization.engines.describe import Description
from torchwright.optimization.search.experience import TABLE, Experience, SearchRecord
from torchwright.optimization.techniques.base import from_step
from torchwright.optimization.trial.client import Candidate, Context
from torchwright.workloads.base import Workload

LATE_SHARE = 0.1
"""Share of the time budget by which what has begun may overrun it: a late result is worth more than none."""
DOUBTFUL = 0.4
"""Share of the budget from which on a loss is judged again, by other data or sizes: MPT lost 2.2 times as much."""
PATIENCE = 3.0
"""A multiple of its estimate at which work is given up: most estimates are low, and what is stopped yields nothing."""
COMPANY = 0.7
"""Other steps change a step's gain by no more than this: one slower alone is not tried with them, and one that gained
more is not questioned at the end."""

Watch = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The model to optimize and the bounds of the search."""

    workload: Workload
    budget: Budget
    device: str | None = None
    wanted: Sequence[Step] = ()
    only: bool = False
    without: frozenset[str] = frozenset()
    seed: int = 0
    resume: Path | None = None
    """The artifact of the search to continue."""
    experience: Path | None = TABLE
    """The table of recorded searches; without one the search is exhaustive."""
    command: str = ""

    def may_try(self, step: Step) -> bool:
        """Check whether the step's technique is not excluded."""
        named = not self.only or step.name in {wanted.name for wanted in self.wanted}
        return named and step.name not in self.without


@dataclass(kw_only=True)
class Outcome:
    """The outcome of the search. `best` is a live candidate; the caller closes it."""

    best: Candidate
    baseline: Measurement
    final: Measurement
    speedup: Interval
    rungs: tuple[StepResult, ...]
    description: Description
    seconds: float
    notes: tuple[str, ...]
    more_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate timed in turn with the best so far and with the original."""

    marginal: Interval
    total: Interval


ORIGINAL = Interval(value=1.0, low=1.0, high=1.0)
UNCHANGED = Comparison(marginal=ORIGINAL, total=ORIGINAL)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds that a trial of these steps took until it could be called, or until it was stopped."""

    steps: tuple[Step, ...]
    seconds: float
    """Seconds as if no earlier compilation or conversion had been reused."""
    conversion: float = 0.0
    """The part of `seconds` spent to convert or compile the model; the next trial of the same conversion saves it."""
    stopped: bool = False
    """The trial was not done by then."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A live candidate that nothing is built upon, and the comparison with which it was kept."""

    candidate: Candidate
    proven: Comparison


@dataclass(kw_only=True)
class Search:
    """One search over the techniques for one workload."""

    context: Context
    budget: Budget
    watch: Watch
    wanted: tuple[Step, ...] = ()
    """Asked for by name: tried with exactly these options, and an error where they cannot run. Variants stand in the
    place of a step that is open."""
    served: tuple[Step, ...] = ()
    """Asked for as well: steps that are tried on the finished artifact."""
    only: bool = False
    """Try nothing but `wanted`."""
    without: frozenset[str] = frozenset()
    earlier: Recipe | None = None
    """The checked findings of the search that is continued."""
    records: tuple[SearchRecord, ...] = ()
    """Other searches."""
    aside: Candidate | None = None
    """Our own recipe, while rivals are tried."""
    experience: Experience = field(default_factory=Experience)
    """The priors from recorded searches of similar models."""
    queue: list[Step] = field(default_factory=list[Step])
    """Steps whose turn has not come."""
    rungs: list[StepResult] = field(default_factory=list[StepResult])
    component_gains: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Step, as written → what each component of the model gained by it, where it has several."""
    notes: list[str] = field(default_factory=list[str])
    begun: float = field(init=False)
    """When the search began to measure the original."""
    start: float = field(init=False)
    """When the original was measured: the time budget starts then."""
    end: float = field(init=False)
    """When the user expects the artifact."""
    last_moment: float = field(init=False)
    """When even a comparison that has begun is broken off."""
    seconds: float = 0.0
    """Seconds of the search, without the last comparison."""
    more_seconds: float = 0.0
    """Expected seconds of trials of the untried rows."""
    baseline: Candidate = field(init=False)
    best: Candidate = field(init=False)
    proven: Comparison = UNCHANGED
    """The comparison with which the best was kept."""
    rival: Rival | None = None
    """The best recipe on a third-party engine, next to which our own recipe grows."""
    spent: list[Spent] = field(default_factory=list[Spent])
    """The time of every trial so far, the original's first."""
    import_seconds: float = 0.0
    """Seconds that a process without fork needs before its trial begins."""
    original_seconds: float = 0.0
    """Seconds that it took to measure and describe the original."""
    settle_seconds: float = 0.0
    """Seconds that it took to measure the original's metric and memory."""
    reference: Any = None
    """The original's observations for the metric."""
    last_reference: Any = None
    """The same on held-out data; None without such data."""
    further: dict[bool, Any] = field(default_factory=dict[bool, Any])
    """The same on more of the data, where a verdict needed them; True for held-out data."""
    description: Description = field(init=False)

    @cached_property
    def varied_reference(self) -> Any:
        """The original's observations on other values than those that calibrate, or None without such values."""
        return self.baseline.process.ask("observe", varied=True)

    def have(self) -> frozenset[str]:
        """Properties of the best so far; those found by running the original hold for every recipe."""
        described = self.description.properties
        return (self.best.prepared.properties | described & DISCOVERED) if self.best.steps else described

    def has_variant(self, step: Step) -> bool:
        """Check whether the best recipe has a step that this one would replace."""
        technique = from_step(step)
        return any(technique.replaces(from_step(kept)) for kept in self.best.steps)

    def over_budget(self, candidate: Candidate) -> bool:
        """Check whether the metric may have dropped by more than the budget allows."""
        return candidate.quality is not None and candidate.quality.drop_high > self.budget.max_drop

    def pass_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of a whole pass, the median of a candidate's turns."""
        turns = candidate.turns or [candidate.turn()]
        return statistics.median(candidate.seconds(turn) for turn in turns)

    def promote(self, candidate: Candidate, comparison: Comparison) -> None:
        """Make the candidate the best."""
        if self.best is not self.baseline:
            self.best.close()
        self.best, self.proven = candidate, comparison
        candidate.process.essential = True

    def kernel(self) -> str:
        """Return the kernel that the best recipe's linear layers run on."""
        kernels = [from_step(step).kernel for step in self.best.steps]
        return next((kernel for kernel in reversed(kernels) if kernel), "float32")

    @contextmanager
    def among_rivals(self) -> Generator[None]:
        """Within the block the best is the third-party recipe, or the original without one; a kept step replaces it."""
        own, proven, rival = self.best, self.proven, self.rival
        self.aside = own
        self.best = rival.candidate if rival else self.baseline
        self.proven = rival.proven if rival else UNCHANGED
        try:
            yield
        finally:
            if self.best is not self.baseline:
                self.rival = Rival(candidate=self.best, proven=self.proven)
            self.best, self.proven, self.aside = own, proven, None

    def tell(self, kind: Any, text: str, rung: StepResult | None = None) -> None:
        """Tell whoever watches."""
        best = next((r.total_speedup for r in reversed(self.rungs) if r.kept), None)
        self.watch(
            Event(
                kind=kind,
                text=text,
                elapsed=self.context.clock() - self.begun,
                time_budget=self.end - self.begun,
                rung=rung,
                best=best,
            )
        )

    def begin(self) -> None:
        """Begin to measure the original, which has no deadline."""
        self.begun = self.context.clock()
        self.end = self.begun + self.budget.time_seconds

    def start_budget(self) -> None:
        """Start the time budget: the original is measured, and so is the recipe that is continued."""
        self.start = self.context.clock()
        self.end = self.start + self.budget.time_seconds
        self.context.deadline = self.end
        self.last_moment = self.latest_end()

    def latest_end(self) -> float:
        """Return the end of what has begun when the time budget ends, and may overrun it."""
        return self.end + LATE_SHARE * self.budget.time_seconds

    def stretch(self, seconds: float) -> None:
        """Let the time budget end so much later."""
        self.end += seconds
        self.last_moment += seconds

    def spend(self, candidate: Candidate, seconds: float) -> None:
        """Remember what it took until a candidate could be called."""
        prepared = candidate.prepared
        spent = Spent(
            steps=candidate.steps,
            seconds=seconds + prepared.spared,
            conversion=prepared.converted + prepared.spared,
        )
        self.spent.append(spent)

    def add(self, rung: StepResult) -> None:
        """Add a row for a tried step; if a repeated trial measured nothing, the earlier figures stay."""
        before = next((row for row in self.rungs if row.step == rung.step and not row.kept), None)
        if before is not None and before.speedup is not None and rung.speedup is None:
            rung = replace(before, reason=f"{before.reason}; again: {rung.reason}")
        self.rungs = [row for row in self.rungs if row is not before]
        rung = replace(rung, ended_seconds=self.context.clock() - self.begun)
        self.rungs.append(rung)
        self.tell("rung", f"{rung.step}: {rung.status}, {rung.reason}", rung)

    def refuse(self, step: Step, reason: str, status: Any = "refused") -> None:
        """Add a row for a step of which nothing is measured."""
        self.add(StepResult(step=step, kept=False, status=status, reason=reason))

    def revise(
        self, where: Callable[[StepResult], bool], status: Any, reason: str, *, adds: bool = False
    ) -> None:
        """Change the verdict of rows; the reason takes the place of theirs, or `adds` to it."""
        self.rungs = [
            replace(
                rung,
                kept=status == "kept",
                status=status,
                reason=f"{rung.reason}; {reason}" if adds else reason,
            )
            if where(rung)
            else rung
            for rung in self.rungs
        ]

    def informed(self) -> Experience:
        """Experience with other models, in the light of what steps have lost here."""
        judged = [(str(rung.step), rung.quality) for rung in self.rungs if rung.quality is not None]
        return self.experience.given(
            {step: quality.drop_high for step, quality in judged if quality.metric == RELATIVE_ERROR}
        )

    def found_any(self) -> bool:
        """Check whether any step is kept."""
        return any(rung.kept for rung in self.rungs)

    def measured_any(self) -> bool:
        """Check whether this search has judged or timed a candidate."""
        return any(rung.quality or rung.speedup for rung in self.rungs if not rung.earlier)

    def reached(self) -> float:
        """Speed-up of what is kept so far, our own recipe's or the rival's."""
        return max(
            (rung.total_speedup.value for rung in self.rungs if rung.kept and rung.total_speedup), default=1.0
        )

    def questioned(self) -> list[StepResult]:
        """Return the kept rows that the ablation pass examines, the smallest gain first."""
        if len(self.best.steps) < 2:
            return []
        return sorted((rung for rung in self.rungs if self._is_questioned(rung)), key=_gain)

    def _is_questioned(self, rung: StepResult) -> bool:
        asked = rung.step in self.wanted
        if not rung.kept or asked or rung.step not in self.best.steps or _gain(rung) >= 1 / COMPANY:
            return False
        needs = frozenset[str]().union(*(from_step(step).required for step in self.without_step(rung.step)))
        return not from_step(rung.step).gives & needs

    def without_step(self, step: Step) -> tuple[Step, ...]:
        """The best recipe without one of its steps."""
        return tuple(other for other in self.best.steps if other != step)

    def record(
        self,
        step: Step,
        candidate: Candidate,
        comparison: Comparison | None,
        status: Any,
        reason: str,
        *,
        wrong: bool = False,
    ) -> None:
        """Add a row for a candidate, with its measurements."""
        if comparison:
            before, after = self.best.component_seconds(), candidate.component_seconds()
            gains = {name: before[name] / after[name] for name in before if after.get(name)}
            self.component_gains[str(step)] = gains
        compiles = engines.get(candidate.prepared.engine).compiles
        compiled = candidate.prepared.seconds if compiles else None
        payback = None
        if comparison and compiled:
            saved = self.pass_seconds(self.baseline) - self.pass_seconds(candidate)
            payback = compiled / saved if saved > 0 else None
        self.add(
            StepResult(
                step=step,
                kept=status == "kept",
                status=status,
                reason=reason,
                speedup=comparison.marginal if comparison else None,
                total_speedup=comparison.total if comparison else None,
                memory_bytes=candidate.memory,
                memory_change_bytes=candidate.memory - self.best.memory,
                quality=candidate.quality,
                compile_seconds=compiled,
                payback_calls=payback,
                coverage=candidate.prepared.coverage,
                wrong=wrong,
            )
        )

    def close_all(self) -> None:
        """End the processes of the original and the best."""
        self.best.close()
        if self.baseline is not self.best:
            self.baseline.close()
        if self.rival is not None:
            self.rival.candidate.close()


def _gain(rung: StepResult) -> float:
    return rung.speedup.value if rung.speedup else 1.0
