"""What one search was asked for, and what it knows so far."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchwright.facts import Budget, Event, Interval, Measurement, Rung, Step
from torchwright.plan.apply import DISCOVERED
from torchwright.plan.trial import Candidate, Context
from torchwright.techniques.base import Technique, from_step

FINISH_SHARE = 0.06
"""Share of the time budget at whose end nothing new is begun."""
FIRST_TRIAL_SECONDS = 4.0
"""What a trial is expected to take before there was one."""
OVERRUN_SHARE = 0.09
"""What a comparison that has begun may take beyond the time budget, and no more."""

Watch = Callable[[Event], None]


@dataclass(kw_only=True)
class Outcome:
    """What the search found. `best` is a live candidate; the caller closes it."""

    best: Candidate
    baseline: Measurement
    final: Measurement
    speedup: Interval
    rungs: tuple[Rung, ...]
    description: dict[str, Any]
    seconds: float
    notes: tuple[str, ...]


@dataclass(kw_only=True)
class Comparison:
    """A candidate timed in turn with the best so far and with the original."""

    marginal: Interval
    total: Interval


@dataclass(kw_only=True)
class Search:
    """One search over the techniques for one workload."""

    context: Context
    budget: Budget
    watch: Watch
    wanted: tuple[Step, ...] = ()
    """Asked for by name: tried with exactly these options, and an error where they cannot run."""
    only: bool = False
    """Try nothing but `wanted`."""
    without: frozenset[str] = frozenset()
    rungs: list[Rung] = field(default_factory=list[Rung])
    notes: list[str] = field(default_factory=list[str])
    start: float = field(init=False)
    last_moment: float = field(init=False)
    """When even a comparison that has begun is broken off."""
    seconds: float = 0.0
    """What the search took, without the last comparison."""
    baseline: Candidate = field(init=False)
    best: Candidate = field(init=False)
    proven: Comparison = field(init=False)
    """The comparison with which the best was kept."""
    kernel: str = "float32"
    """What the best's linear layers run on."""
    trial_seconds: list[float] = field(default_factory=list[float])
    """Of every trial that came to a verdict, without its compilation."""
    reference: Any = None
    """What the metric saw of the original."""
    description: dict[str, Any] = field(default_factory=dict[str, Any])
    repeats: dict[str, int] = field(default_factory=dict[str, int])

    def have(self) -> frozenset[str]:
        """Properties of the best so far; those found by running the original hold for every recipe of it."""
        described: frozenset[str] = self.description["properties"]
        return (self.best.properties | described & DISCOVERED) if self.best.steps else described

    def over_budget(self, candidate: Candidate) -> bool:
        """Whether the metric may have dropped by more than was allowed."""
        return candidate.quality is not None and candidate.quality.drop_high > self.budget.max_drop

    def objective(self, turn: dict[str, float]) -> float:
        """Seconds of the workload, from those of its calls."""
        return sum(turn[name] * repeat for name, repeat in self.repeats.items())

    def objective_median(self, candidate: Candidate) -> float:
        """Seconds of the workload, the median of a candidate's turns."""
        return statistics.median(self.objective(turn) for turn in candidate.turns)

    def best_seconds(self) -> float:
        """The same, of the best so far."""
        turns = self.best.turns or [self.best.turn()]
        return statistics.median(self.objective(turn) for turn in turns)

    def promote(self, candidate: Candidate, comparison: Comparison) -> None:
        """Make the candidate the best."""
        if self.best is not self.baseline:
            self.best.close()
        self.best, self.proven = candidate, comparison
        kernels = [from_step(step).kernel for step in candidate.steps]
        self.kernel = next((kernel for kernel in reversed(kernels) if kernel), "float32")

    def tell(self, kind: Any, text: str, rung: Rung | None = None) -> None:
        """Tell whoever watches."""
        best = next((r.total_speedup for r in reversed(self.rungs) if r.kept), None)
        self.watch(
            Event(
                kind=kind,
                text=text,
                elapsed=self.context.clock() - self.start,
                time_budget=self.budget.time_seconds,
                rung=rung,
                best=best,
            )
        )

    def add(self, rung: Rung) -> None:
        """A row for what was tried."""
        self.rungs.append(rung)
        self.tell("rung", f"{rung.step}: {rung.status}, {rung.reason}", rung)

    def refuse(self, step: Step, reason: str) -> None:
        """A row for a step that was not tried."""
        self.add(Rung(step=step, kept=False, status="refused", reason=reason))

    def record(
        self, step: Step, candidate: Candidate, comparison: Comparison | None, status: Any, reason: str
    ) -> None:
        """A row for a candidate, with what was measured of it."""
        compiled = candidate.prepare_seconds if candidate.engine != "eager" else None
        payback = None
        if comparison and compiled:
            saved = self.objective_median(self.baseline) - self.objective_median(candidate)
            payback = compiled / saved if saved > 0 else None
        self.add(
            Rung(
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
                coverage=candidate.coverage,
            )
        )

    def no_time(self, technique: Technique, *steps: Step) -> str | None:
        """Why the time that is left is not enough for a trial, or None."""
        expected = self.expected_seconds(technique, *map(from_step, steps))
        left = self.context.remaining()
        if expected <= left:
            return None
        return f"not tried: it would need about {expected:.0f} s and the time budget has {max(left, 0):.0f} s left"

    def expected_seconds(self, *all_of_them: Technique) -> float:
        """What a trial of these steps on the best will take, from those of its kind so far."""
        given = frozenset[str]().union(*(technique.gives for technique in all_of_them))
        compiled = "compiled" in self.best.properties | given
        past = [rung.compile_seconds for rung in self.rungs if rung.compile_seconds and compiled]
        return max(past, default=0.0) * 1.1 + min(self.trial_seconds, default=FIRST_TRIAL_SECONDS)

    def close_all(self) -> None:
        """End the processes of the original and the best."""
        self.best.close()
        if self.baseline is not self.best:
            self.baseline.close()
