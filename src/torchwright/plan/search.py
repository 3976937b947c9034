"""The search: try a technique, keep it only if it pays and stays within the budget, and say why.

baseline → refuse what cannot run or cannot pay → greedy over phases (retreating layer by layer where a
quantization overshoots) → drop what no longer contributes → best against the original once more
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchwright.errors import RefusedTechnique, TorchwrightError
from torchwright.facts import Budget, Event, Interval, Measurement, Rung, Step
from torchwright.measure.clock import paired_speedup
from torchwright.plan.apply import DISCOVERED
from torchwright.plan.trial import Candidate, Context, TrialFailed, TrialProcess, start_candidate
from torchwright.techniques.base import Phase, Technique, from_step, in_order, techniques

MIN_GAIN = 1.01
"""A step must gain one per cent, and its whole interval must lie above 1."""
TURN_SECONDS = 0.02
"""A turn of timing repeats a short call until it has taken this long."""
ROUNDS = (7, 25)
"""Fewest and most paired turns of one comparison."""
COMPARE_SECONDS = 5.0
FINISH_SHARE = 0.06
"""Share of the time budget kept back for the last comparison; it may overrun by as much again, and no more."""
IMPLAUSIBLE = 0.05
"""A metric that gets better by more than this was not made faster: it was changed (a mask that leaks, say)."""
CONTRIBUTES = 1.3
"""A step with at least this marginal speed-up is not questioned by the drop-one pass."""
RETREAT_SHARES = (0.1, 0.3)
"""Shares of the modules, most sensitive first, that a quantization over budget leaves alone, one after another."""
COMPANY = 0.7
"""A step that was this much of a gain alone, or better, is tried again together with one that needs it."""
HOPELESS = 20
"""A drop of so many budgets is not mended by leaving some layers alone."""

Watch = Callable[[Event], None]


class NoTime(TrialFailed):
    """A comparison that was not begun, or broken off; every process in it lives on."""


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

    def run(self) -> Outcome:
        """The whole search.

        Raises `ModelError` or `WorkloadError` when the original cannot be run or judged, `RefusedTechnique` when a
        technique asked for by name cannot run.
        """
        self._start = self.context.clock()
        self.context.deadline = self._start + self.budget.time_seconds * (1 - FINISH_SHARE)
        self._last_moment = self._start + self.budget.time_seconds * (1 + FINISH_SHARE) + 2
        self._tell("baseline", "measuring the original")
        self._measure_baseline()
        try:
            queue = self._queue()
            while queue:
                queue = self._try(queue.pop(0), queue)
            self._drop_one()
            return self._finish()
        except TrialFailed as failure:
            self._close_all()
            raise TorchwrightError(
                "the original stopped working in the middle of the search", found=failure.reason
            ) from failure
        except BaseException:
            self._close_all()
            raise

    # -- baseline ------------------------------------------------------------------------------------------------

    def _measure_baseline(self) -> None:
        try:
            self._baseline = self._best = start_candidate(self.context, (), ())
        except TrialFailed as failure:
            raise self._baseline_error(failure) from failure
        try:
            process = self._baseline.process
            self._baseline.turn()
            answer = process.ask("memory")
            self._baseline.memory = answer["peak"]
            self._reference = process.ask("observe")
            self._baseline.quality = process.ask("compare", reference=self._reference, itself=True)
            self._description = process.ask("describe")
            self._repeats: dict[str, int] = self._description["repeats"]
        except TrialFailed as failure:
            self._baseline.close()
            raise self._baseline_error(failure) from failure
        except BaseException:
            self._baseline.close()
            raise
        self._kernel = "float32"

    def _baseline_error(self, failure: TrialFailed) -> TorchwrightError:
        if failure.timed_out:
            return TorchwrightError(
                "the time budget ended before the original was measured",
                found=f"{self.budget.time_seconds:.0f} s",
                next="a larger --time-budget",
            )
        return TorchwrightError(
            "the original model cannot be run",
            found=failure.reason,
            next="run it on its inputs in plain PyTorch first",
        )

    # -- what to try ---------------------------------------------------------------------------------------------

    def _queue(self) -> list[Step]:
        """Steps to try, in the order of their phases; those refused outright become rows at once."""
        asked = {step.name: step for step in self.wanted}
        queue: list[Step] = []
        for step in self.wanted:
            reason = self._blanket_refusal(step)
            if reason:
                raise RefusedTechnique(
                    f"{step} was asked for and cannot run here",
                    found=reason,
                    next="`torchwright doctor` says more",
                )
            queue.append(step)
        refused: set[tuple[str, str]] = set()
        variants: list[tuple[Step, str | None]] = self._description["variants"]
        for step, reason in [] if self.only else variants:
            if step.name in asked or step.name in self.without:
                continue
            if reason is None:
                queue.append(step)
            elif (step.name, reason) not in refused:
                refused.add((step.name, reason))
                self._refuse(step, reason)
        return in_search_order(queue)

    def _blanket_refusal(self, step: Step) -> str | None:
        cls = techniques.get(step.name)
        for known, reason in self._description["variants"]:
            if known.name == step.name and reason and known.options == step.options:
                return reason
        return cls.available(self._description["device"])

    def _try(self, step: Step, queue: list[Step]) -> list[Step]:
        """Try one step on top of the best recipe; returns what is left to try."""
        technique = from_step(step)
        if self._tried_already(step):
            return queue
        have = self._have()
        if technique.gives and technique.gives <= have and step not in self.wanted:
            self._refuse(step, f"the model is {' and '.join(sorted(technique.gives))} already")
            return queue
        steps, swapped = self._with(technique, step)
        if steps is None and not self._comes_later(technique, queue):
            steps = self._in_company(technique, step)
        if steps is None:
            return self._postpone(step, technique, queue)
        reason = self._cannot_pay(technique) or self._no_time(technique, *steps)
        if reason:
            self._refuse(step, reason)
            return queue
        kept = self._attempt(step, steps, swapped)
        if kept and "compiled" in technique.gives:
            return [*self._second_chances(), *queue]
        return queue

    def _tried_already(self, step: Step) -> bool:
        """A later variant of a technique is tried only when the earlier ones were not kept."""
        return step.name in {kept.name for kept in self._best.steps} and step not in self.wanted

    def _with(self, technique: Technique, step: Step) -> tuple[tuple[Step, ...] | None, tuple[Step, ...]]:
        """The best recipe with `step`, in place of kept steps that took away what it needs."""
        missing = technique.needs - self._have()
        if not missing:
            return in_order([*self._best.steps, step]), ()
        swapped = tuple(kept for kept in self._best.steps if from_step(kept).removes & missing)
        restored = frozenset[str]().union(*(from_step(kept).removes for kept in swapped))
        if missing - restored or "compiled" in missing or any(kept in self.wanted for kept in swapped):
            return None, ()
        rest = [kept for kept in self._best.steps if kept not in swapped]
        return in_order([*rest, step]), swapped

    def _comes_later(self, technique: Technique, queue: list[Step]) -> bool:
        """Whether steps still to be tried give what this one needs."""
        return technique.needs - self._have() <= {name for other in queue for name in from_step(other).gives}

    def _in_company(self, technique: Technique, step: Step) -> tuple[Step, ...] | None:
        """The best recipe with `step` and a step dropped before that gives what it needs.

        A change of the model and the compiler that fuses it are worth more together than what each is worth alone:
        compiled bfloat16 convolutions may gain nothing over eager ones, and compiled 8-bit ones twice as much.
        """
        missing = technique.needs - self._have()
        for rung in self.rungs:
            other = from_step(rung.step)
            near = rung.status == "dropped" and rung.speedup is not None and rung.speedup.high > COMPANY
            if (
                near
                and technique.phase < other.phase
                and missing <= other.gives
                and other.needs <= self._have()
            ):
                return in_order([*self._best.steps, rung.step, step])
        return None

    def _postpone(self, step: Step, technique: Technique, queue: list[Step]) -> list[Step]:
        """Wait for a later step to give what this one needs, or refuse it when none will."""
        missing = technique.needs - self._have()
        if self._comes_later(technique, queue):
            position = min(i for i, other in enumerate(queue) if from_step(other).gives & missing)
            return [*queue[: position + 1], step, *queue[position + 1 :]]
        if step in self.wanted:
            raise RefusedTechnique(f"{step} was asked for and cannot run here", found=_lacks(missing))
        self._refuse(step, _lacks(missing))
        return queue

    def _cannot_pay(self, technique: Technique) -> str | None:
        """The micro-benchmark's verdict: the most that faster linear layers can save, against the noise."""
        times: dict[str, float] = self._description["kernel_seconds"]
        kernel = technique.kernel
        if (
            kernel is None
            or kernel not in times
            or self._kernel not in times
            or self.budget.objective == "memory"
        ):
            return None
        if "linear" not in technique.needs:
            return None
        saving = times[self._kernel] - times[kernel]
        if saving > 0.02 * self._best_seconds():
            return None
        return (
            f"{kernel} kernels need {_ms(times[kernel])} for this model's linear layers where {self._kernel} needs "
            f"{_ms(times[self._kernel])}: nothing to gain"
        )

    def _no_time(self, technique: Technique, *steps: Step) -> str | None:
        expected = self._expected_seconds(technique, *map(from_step, steps))
        left = self.context.remaining()
        if expected <= left:
            return None
        return f"not tried: it would need about {expected:.0f} s and the time budget has {max(left, 0):.0f} s left"

    def _expected_seconds(self, *all_of_them: Technique) -> float:
        """What a trial of these steps on the best will take, from those of its kind so far."""
        given = frozenset[str]().union(*(technique.gives for technique in all_of_them))
        compiled = "compiled" in self._best.properties | given
        past = [rung.compile_seconds for rung in self.rungs if rung.compile_seconds and compiled]
        return max(past, default=0.0) * 1.1 + 4.0 if past else 4.0

    def _second_chances(self) -> list[Step]:
        """Steps dropped for speed before the model was compiled: fusion can change the verdict."""
        again = [
            rung.step
            for rung in self.rungs
            if rung.status == "dropped"
            and rung.speedup is not None
            and "compiled" not in from_step(rung.step).gives
        ]
        self.rungs = [rung for rung in self.rungs if rung.step not in again]
        return in_search_order(again)

    # -- one trial -----------------------------------------------------------------------------------------------

    def _attempt(
        self, step: Step, steps: tuple[Step, ...], swapped: tuple[Step, ...], *, retreats: bool = True
    ) -> bool:
        """Run one trial and record its verdict; True when the step, or a milder form of it, was kept."""
        self._tell("trying", str(step))
        started = self.context.clock()
        try:
            candidate = start_candidate(self.context, steps, list(self._repeats))
        except TrialFailed as failure:
            return self._failed(step, failure, started)
        except TorchwrightError as refusal:
            if step in self.wanted:
                raise
            self._refuse(step, refusal.found or refusal.summary)
            return False
        try:
            return self._judge(step, candidate, swapped, retreats)
        except TrialFailed as failure:
            candidate.close()
            return self._failed(step, failure, started)
        except TorchwrightError as refusal:
            candidate.close()
            self._refuse(step, refusal.found or refusal.summary)
            return False
        except BaseException:
            candidate.close()
            raise

    def _judge(self, step: Step, candidate: Candidate, swapped: tuple[Step, ...], retreats: bool) -> bool:
        candidate.settle(self._reference)
        assert candidate.quality is not None
        if candidate.quality.drop_high > self.budget.max_drop:
            reason = (
                f"{candidate.quality.metric} drops by {candidate.quality.drop:.2%} (up to "
                f"{candidate.quality.drop_high:.2%}), the budget is {self.budget.max_drop:.2%}"
            )
            self._record(step, candidate, None, "dropped", reason)
            candidate.close()
            return retreats and self._retreat(step, candidate, swapped)
        if candidate.quality.drop < -max(IMPLAUSIBLE, 2 * self.budget.max_drop):
            reason = (
                f"{candidate.quality.metric} improves by {-candidate.quality.drop:.2%}: not the same function"
            )
            self._record(step, candidate, None, "dropped", reason)
            candidate.close()
            return False
        comparison = self._compare(candidate)
        verdict = self._worth(candidate, comparison)
        if verdict is not None:
            self._record(step, candidate, comparison, "dropped", verdict)
            candidate.close()
            return False
        reason = f"{comparison.marginal.value:.2f}x faster"
        if self.budget.objective == "memory":
            reason = f"{_mb(self._best.memory - candidate.memory)} less memory"
        if swapped:
            reason += f", in place of {', '.join(map(str, swapped))}"
            self.rungs = [
                replace(rung, kept=False, status="removed", reason=f"{rung.reason}; then replaced by {step}")
                if rung.kept and rung.step in swapped
                else rung
                for rung in self.rungs
            ]
        company = [other for other in candidate.steps if other != step and other not in self._best.steps]
        self.rungs = [
            replace(rung, kept=True, status="kept", reason=f"{rung.reason}; kept for {step}")
            if rung.step in company and rung.status == "dropped"
            else rung
            for rung in self.rungs
        ]
        self._record(step, candidate, comparison, "kept", reason)
        self._promote(candidate, comparison)
        return True

    def _retreat(self, step: Step, failed: Candidate, swapped: tuple[Step, ...]) -> bool:
        """Leave the most sensitive modules alone, a few more each time, until the metric is in budget."""
        technique = from_step(step)
        assert failed.quality is not None
        hopeless = failed.quality.drop > HOPELESS * max(self.budget.max_drop, 1e-9)
        if hopeless or technique.retreat(()) is None or self._no_time(technique):
            return False
        try:
            with TrialProcess(self.context) as process:
                ranking = process.ask("sensitivity", steps=(*self._ground(technique, failed.steps), step))
        except (TrialFailed, TorchwrightError) as failure:
            self.notes.append(f"{step}: no retreat, its layers could not be ranked ({failure})")
            return False
        for share in RETREAT_SHARES:
            names = tuple(name for name, _ in ranking[: max(1, round(share * len(ranking)))])
            milder = technique.retreat(names)
            assert milder is not None
            if len(names) >= len(ranking) or self._no_time(technique):
                return False
            smaller = milder.step()
            rest = [kept for kept in failed.steps if kept != step]
            self._tell(
                "trying", f"{step.name} without the {len(names)} most sensitive of {len(ranking)} modules"
            )
            if self._attempt(smaller, in_order([*rest, smaller]), swapped, retreats=False):
                return True
            if self.rungs[-1].speedup is not None:
                return False  # within the budget now, and still not faster
        return False

    @staticmethod
    def _ground(technique: Technique, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Those of `steps` that make the model into what `technique` changes."""
        return tuple(
            step
            for step in steps
            if from_step(step).gives & technique.needs - {"compiled"} and step.name != technique.name
        )

    def _worth(self, candidate: Candidate, comparison: Comparison) -> str | None:
        """Why a candidate within the budget is not kept, or None."""
        if self.budget.objective == "memory":
            if comparison.total.high < 1.0:
                return f"slower than the original ({comparison.total})"
            if candidate.memory > 0.99 * self._best.memory:
                return (
                    f"{_mb(candidate.memory)} peak memory where the best so far has {_mb(self._best.memory)}"
                )
            return None
        gain = comparison.marginal
        if gain.low <= 1.0 or gain.value < MIN_GAIN:
            return f"{gain}: no gain outside the noise" if gain.high > 1.0 else f"{gain}: slower"
        return None

    def _compare(self, candidate: Candidate, *, final: bool = False) -> Comparison:
        """Time the candidate, the best so far and the original in turn."""
        contestants = [self._baseline, candidate]
        if self._best is not self._baseline and self._best is not candidate:
            contestants.insert(1, self._best)
        rows: list[list[float]] = []
        begun = self.context.clock()
        seconds = min(COMPARE_SECONDS, FINISH_SHARE * self.budget.time_seconds / 2) * (1.6 if final else 1)
        one_round = sum(_turn_seconds(contestant) for contestant in contestants)
        # A request that overruns the deadline ends its process, and here that may be the original's or the best
        # recipe's: rounds are begun while the time lasts, and have the time that is kept back to end in.
        deadline, self.context.deadline = self.context.deadline, self._last_moment
        try:
            while len(rows) < ROUNDS[1]:
                if self.context.clock() + one_round > deadline:
                    if len(rows) < 3:
                        raise NoTime("the time budget ended before it was timed", timed_out=True)
                    break
                rows.append([self._objective(contestant.turn()) for contestant in contestants])
                spent = self.context.clock() - begun
                one_round = spent / len(rows)
                if len(rows) >= ROUNDS[0] and spent > seconds:
                    break
                if len(rows) >= 3 and spent > seconds and (spent > 2 * seconds or _is_clear(rows)):
                    break
        finally:
            self.context.deadline = deadline
        for contestant in contestants:
            del contestant.turns[: -len(rows)]
        columns = list(zip(*rows, strict=True))
        best = columns[1] if len(contestants) == 3 else columns[0]
        return Comparison(
            marginal=paired_speedup(best, columns[-1]), total=paired_speedup(columns[0], columns[-1])
        )

    def _objective(self, turn: dict[str, float]) -> float:
        return sum(turn[name] * repeat for name, repeat in self._repeats.items())

    # -- the end -------------------------------------------------------------------------------------------------

    def _drop_one(self) -> None:
        """Remove steps that no longer contribute; those whose own gain was large are taken at their word."""
        for rung in [rung for rung in self.rungs if rung.kept]:
            if len(self._best.steps) < 2 or (rung.speedup and rung.speedup.value >= CONTRIBUTES):
                continue
            rest = tuple(step for step in self._best.steps if step != rung.step)
            needed = from_step(rung.step).gives & frozenset[str]().union(*(from_step(s).needs for s in rest))
            if needed or rung.step in self.wanted or rung.step not in self._best.steps:
                continue
            if self._no_time(from_step(rung.step)):
                self.notes.append(f"drop-one pass: no time left to try the recipe without {rung.step}")
                continue
            self._tell("trying", f"the recipe without {rung.step}")
            try:
                candidate = start_candidate(self.context, rest, list(self._repeats))
            except (TrialFailed, TorchwrightError) as failure:
                self.notes.append(f"drop-one pass: the recipe without {rung.step} failed ({failure})")
                continue
            try:
                candidate.settle(self._reference)
                comparison = self._compare(candidate)
            except (TrialFailed, TorchwrightError) as failure:
                candidate.close()
                self.notes.append(f"drop-one pass: the recipe without {rung.step} failed ({failure})")
                continue
            except BaseException:
                candidate.close()
                raise
            if self._still_contributes(candidate, comparison):
                candidate.close()
                continue
            reason = f"without it the recipe is as good ({comparison.marginal})"
            self.rungs = [
                replace(r, kept=False, status="removed", reason=reason) if r is rung else r
                for r in self.rungs
            ]
            self._promote(candidate, comparison)

    def _still_contributes(self, candidate: Candidate, comparison: Comparison) -> bool:
        assert candidate.quality is not None
        if candidate.quality.drop_high > self.budget.max_drop:
            return True
        if self.budget.objective == "memory":
            return candidate.memory > self._best.memory
        return comparison.marginal.value < 1.0

    def _finish(self) -> Outcome:
        self._tell("stage", "best against the original once more")
        self.context.deadline = self._last_moment
        comparison = None if self._best is self._baseline else self._last_comparison()
        if comparison is None:
            while len(self._baseline.turns) < ROUNDS[0] and self._time_for_a_turn(self._baseline):
                self._baseline.turn()
        if self._best is self._baseline:
            self.notes.append("nothing was both faster and within the accuracy budget: this is the original")
        else:
            self._baseline.close()
        one = Interval(value=1.0, low=1.0, high=1.0)
        baseline = self._baseline.measurement(self._repeats)
        return Outcome(
            best=self._best,
            baseline=baseline,
            final=baseline if self._best is self._baseline else self._best.measurement(self._repeats),
            speedup=one if comparison is None else comparison.total,
            rungs=tuple(self.rungs),
            description=self._description,
            seconds=self.context.clock() - self._start,
            notes=tuple(self.notes),
        )

    def _last_comparison(self) -> Comparison | None:
        """The best against the original once more; None, and the original is the best, where it did not hold."""
        try:
            comparison = self._compare(self._best, final=True)
        except NoTime:
            comparison = self._proven
            self.notes.append(
                "no time was left for a last comparison: the speed-up is that of the trial itself"
            )
        except TrialFailed as failure:
            self._give_up(f"the recipe failed in the last comparison ({failure.reason})", failure.reason)
            return None
        total = comparison.total
        if total.high < 1.0 if self.budget.objective == "memory" else total.value <= 1.0:
            self._give_up(
                f"the recipe was {total} in the last comparison", "slower than the original at the end"
            )
            return None
        return comparison

    def _give_up(self, note: str, reason: str) -> None:
        """Return to the original."""
        self.notes.append(f"{note}: the original is returned")
        self.rungs = [
            replace(rung, kept=False, status="removed", reason=reason) if rung.kept else rung
            for rung in self.rungs
        ]
        self._best.close()
        self._best = self._baseline

    def _time_for_a_turn(self, candidate: Candidate) -> bool:
        return self.context.remaining() > 1.5 * _turn_seconds(candidate)

    # -- small things --------------------------------------------------------------------------------------------

    def _promote(self, candidate: Candidate, comparison: Comparison) -> None:
        if self._best is not self._baseline:
            self._best.close()
        self._best, self._proven = candidate, comparison
        kernels = [from_step(step).kernel for step in candidate.steps]
        self._kernel = next((kernel for kernel in reversed(kernels) if kernel), "float32")

    def _have(self) -> frozenset[str]:
        """Properties of the best so far; those found by running the original hold for every recipe of it."""
        described: frozenset[str] = self._description["properties"]
        return (self._best.properties | described & DISCOVERED) if self._best.steps else described

    def _best_seconds(self) -> float:
        turns = self._best.turns or [self._best.turn()]
        return statistics.median(self._objective(turn) for turn in turns)

    def _failed(self, step: Step, failure: TrialFailed, started: float) -> bool:
        reason = failure.reason
        if failure.timed_out:
            reason = f"stopped after {self.context.clock() - started:.0f} s, when the time budget ended"
        self._add(Rung(step=step, kept=False, status="failed", reason=reason))
        return False

    def _refuse(self, step: Step, reason: str) -> None:
        self._add(Rung(step=step, kept=False, status="refused", reason=reason))

    def _record(
        self, step: Step, candidate: Candidate, comparison: Comparison | None, status: Any, reason: str
    ) -> None:
        compiled = candidate.prepare_seconds if candidate.engine != "eager" else None
        payback = None
        if comparison and compiled:
            saved = self._objective_median(self._baseline) - self._objective_median(candidate)
            payback = compiled / saved if saved > 0 else None
        self._add(
            Rung(
                step=step,
                kept=status == "kept",
                status=status,
                reason=reason,
                speedup=comparison.marginal if comparison else None,
                total_speedup=comparison.total if comparison else None,
                memory_bytes=candidate.memory,
                memory_change_bytes=candidate.memory - self._best.memory,
                quality=candidate.quality,
                compile_seconds=compiled,
                payback_calls=payback,
                coverage=candidate.coverage,
            )
        )

    def _objective_median(self, candidate: Candidate) -> float:
        return statistics.median(self._objective(turn) for turn in candidate.turns)

    def _add(self, rung: Rung) -> None:
        self.rungs.append(rung)
        self._tell("rung", f"{rung.step}: {rung.status}, {rung.reason}", rung)

    def _tell(self, kind: Any, text: str, rung: Rung | None = None) -> None:
        best = next((r.total_speedup for r in reversed(self.rungs) if r.kept), None)
        self.watch(
            Event(
                kind=kind,
                text=text,
                elapsed=self.context.clock() - self._start,
                time_budget=self.budget.time_seconds,
                rung=rung,
                best=best,
            )
        )

    def _close_all(self) -> None:
        self._best.close()
        if self._baseline is not self._best:
            self._baseline.close()


def in_search_order(steps: Sequence[Step]) -> list[Step]:
    """Weights come after compilation: what a quantized layer is worth depends on the code around it.

    The process's own settings come first. They change no number and no code, and what large activations cost without
    them (page faults, twice the time of an 8-bit ResNet-50) would hide what every other step is worth.
    """
    order = [
        Phase.PROCESS,
        Phase.GRAPH,
        Phase.DTYPE,
        Phase.ATTENTION,
        Phase.CACHE,
        Phase.COMPILE,
        Phase.WEIGHTS,
        Phase.RUNTIME,
    ]
    return sorted(steps, key=lambda step: order.index(techniques.get(step.name).phase))


def _is_clear(rows: Sequence[Sequence[float]]) -> bool:
    """Whether a few rounds already say which of the last two contestants is faster, and by more than a tenth."""
    ratios = [row[-2] / row[-1] for row in rows]
    return min(ratios) > 1.1 or max(ratios) < 0.9


def _turn_seconds(candidate: Candidate) -> float:
    """What a turn will take at most, from the last one: a call not counted, then `TURN_SECONDS` or one call."""
    last = candidate.turns[-1] if candidate.turns else {}
    return sum(seconds + max(seconds, TURN_SECONDS) for seconds in last.values())


def _lacks(missing: frozenset[str]) -> str:
    return f"the model has no: {', '.join(sorted(missing)).replace('_', ' ')}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _mb(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"
