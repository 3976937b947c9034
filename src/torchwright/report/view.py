"""Figures that a report derives from a recipe: rows, ratios, tokens per second. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchwright.core.records import CaseTime, Interval, Quality, Ranked, Recipe, RowsTime, Step, StepResult
from torchwright.report import wording

WORST_SAID = 3
"""Layers that a sentence names."""
UNTRIED_ROWS = 6
"""Untried steps with a row of their own: more would stand between the ones that ran."""
OWN_MODULE = "the recipe on the caller's model"
"""`Recipe.runs_as` of what holds no model."""


@dataclass(frozen=True, kw_only=True)
class CasePair:
    """One kind of call before and after. Seconds of one call; `tokens` is what one call yields, or None.

    A pass made the call `repeat` times, and makes it `repeat_after` times.
    """

    name: str
    before: float
    after: float
    speedup: float | None
    repeat: int
    repeat_after: int
    tokens: int | None = None

    @property
    def often(self) -> str:
        """Calls per pass, before and after if these differ; empty if the pass calls once."""
        if self.repeat != self.repeat_after:
            return f"{self.repeat:,} → {self.repeat_after:,}"
        return "" if self.repeat == 1 else f"{self.repeat:,}"

    def rate(self, seconds: float) -> float | None:
        """Tokens per second when one call takes `seconds`."""
        return self.tokens / seconds if self.tokens and seconds > 0 else None


@dataclass(frozen=True, kw_only=True)
class WaterfallStage:
    """One step in the course of the search, in seconds of the objective.

    `start` is the best recipe's time when the step was tried; `end` is the time with it, or None where nothing was
    measured.
    """

    number: int
    rung: StepResult
    start: float
    end: float | None


def case_pairs(recipe: Recipe) -> list[CasePair]:
    """The calls that both the original and the final model were timed on.

    Where there is one kind alone it is what the headline is about, and has the headline's ratio.
    """
    after = {case.name: case for case in recipe.final.cases}
    alone = recipe.speedup if len(recipe.baseline.cases) == 1 else None
    return [
        CasePair(
            name=wording.clean(case.name),
            before=case.seconds,
            after=after[case.name].seconds,
            speedup=alone.value if alone is not None else _ratio(case.seconds, after[case.name].seconds),
            repeat=case.repeat,
            repeat_after=after[case.name].repeat,
            tokens=_tokens(case, recipe),
        )
        for case in recipe.baseline.cases
        if case.name in after
    ]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Seconds of a pass that calls of one part take, before and after, and what they are of all."""

    name: str
    seconds: float
    seconds_after: float
    before: float
    after: float

    @property
    def speedup(self) -> float | None:
        return _ratio(self.seconds, self.seconds_after)


def shares(recipe: Recipe) -> list[Share]:
    """Each part that calls are made of, such as a pipeline's components, the largest before first.

    Calls of one part in several shapes ("decoder" and "decoder 2") are added up; empty if there is only one part.
    """
    before, after = (_seconds_by_part(cases) for cases in (recipe.baseline.cases, recipe.final.cases))
    totals = sum(before.values()), sum(after.values())
    if len(before) < 2 or not all(totals):
        return []
    found = [
        Share(
            name=wording.clean(name),
            seconds=seconds,
            seconds_after=after.get(name, 0.0),
            before=seconds / totals[0],
            after=after.get(name, 0.0) / totals[1],
        )
        for name, seconds in before.items()
    ]
    return sorted(found, key=lambda each: each.before, reverse=True)


def _seconds_by_part(cases: Sequence[CaseTime]) -> dict[str, float]:
    names, found = {case.name for case in cases}, dict[str, float]()
    for case in cases:
        base, _, number = case.name.rpartition(" ")
        part = base if number.isdecimal() and base in names else case.name
        found[part] = found.get(part, 0.0) + case.seconds * case.repeat
    return found


@dataclass(frozen=True, kw_only=True)
class LayerRanking:
    """The layers that one technique hurts, worst first, and which of them it skipped."""

    rung: StepResult
    rows: tuple[tuple[Ranked, bool], ...]
    """Each layer, and whether it was skipped."""
    more: int
    """Layers that are not shown."""

    @property
    def left(self) -> int:
        return sum(left for _, left in self.rows)

    @property
    def heading(self) -> str:
        """The sentence that says how many layers were skipped."""
        other = "" if self.rung.kept else f", and the step was {self.rung.status} all the same"
        worst = "the worst" if self.left == 1 else f"the {self.left} worst"
        were = "was" if self.left == 1 else "were"
        return f"{self.rung.step.name}: {worst} of {self.rung.ranked} layers {were} left alone{other}"

    @property
    def said(self) -> str:
        """The worst of them, in one sentence."""
        worst = [
            f"{wording.clean(each.name)} {wording.percent(each.error)}"
            for each, left in self.rows[:WORST_SAID]
            if left
        ]
        of = "all that comes out" if self.rows[0][0].whole else "the layer's own output"
        return f"{self.heading} ({', '.join(worst)}{', …' * (self.left > len(worst))} of {of}, by itself)"


def rankings(recipe: Recipe) -> list[LayerRanking]:
    """Return the layer ranking of each technique that skipped layers, from its last row."""
    last = {rung.step.name: rung for rung in recipe.rungs if rung.ranking}
    return [
        LayerRanking(
            rung=rung,
            rows=tuple((each, each.name in _left_alone(rung.step)) for each in rung.ranking),
            more=rung.ranked - len(rung.ranking),
        )
        for rung in last.values()
    ]


def _left_alone(step: Step) -> list[Any]:
    """Return every listed option; the ranking says which are names of layers."""
    lists: list[Any] = [value for value in step.options.values() if isinstance(value, list | tuple)]
    return [name for listed in lists for name in listed]


def is_total(pair: CasePair, recipe: Recipe) -> bool:
    """Check whether a line for `pair` would only repeat the total."""
    return len(recipe.baseline.cases) == 1 and pair.repeat == 1 and pair.tokens is None


def stages(recipe: Recipe) -> list[WaterfallStage]:
    """Return the numbered steps with the times before and after; kept ones lead from original to final."""
    base = best = recipe.baseline.seconds
    result: list[WaterfallStage] = []
    for number, rung in numbered(recipe):
        # A kept step stands where it was measured against the original. One that was not kept is compared with the
        # best recipe of its moment only.
        own, total = _divide(best, rung.speedup), _divide(base, rung.total_speedup)
        end = (total if total is not None else own) if rung.kept else (own if own is not None else total)
        result.append(WaterfallStage(number=number, rung=rung, start=best, end=end))
        if rung.kept and total is not None:  # a gain in serving does not shorten the workload's pass
            best = total
    return result


def folded(recipe: Recipe) -> list[StepResult]:
    """Return the rows that one line counts: refused steps, and untried ones where they are many."""
    refused, untried = (
        [rung for rung in recipe.rungs if rung.status == status] for status in ("refused", "untried")
    )
    return [*refused, *(untried if len(untried) > UNTRIED_ROWS else [])]


def numbered(recipe: Recipe) -> list[tuple[int, StepResult]]:
    """Return the rows that are not folded, numbered from 1 in the order in which they were tried."""
    apart = folded(recipe)
    return list(enumerate((rung for rung in recipe.rungs if rung not in apart), start=1))


def fold(rungs: Sequence[StepResult]) -> str:
    """Return the line that counts rows without their names; `more` has the names of untried steps."""
    refused = {rung.step.name for rung in rungs if rung.status == "refused"}
    parts = [does_not_apply(len(refused))] if refused else []
    for status in ("untried", "skipped", "dropped", "failed", "inconclusive", "removed"):
        count = sum(rung.status == status for rung in rungs)
        parts += [f"{count} {status}"] if count else []
    return "; ".join(parts)


def does_not_apply(count: int) -> str:
    """Return how many techniques were refused, by the model or by a bound on what they can gain."""
    return (
        f"{count} techniques do not apply or cannot pay"
        if count > 1
        else "1 technique does not apply or cannot pay"
    )


def kept(recipe: Recipe) -> list[StepResult]:
    return [rung for rung in recipe.rungs if rung.kept]


def undecided(recipe: Recipe) -> list[StepResult]:
    """Return the rows without a measurement, or with too few on a busy machine."""
    return [rung for rung in recipe.rungs if rung.undecided]


def verdict(recipe: Recipe) -> Literal["faster", "original", "inconclusive"]:
    """Return whether a recipe was found, no step pays, or the search is undecided."""
    if kept(recipe):
        return "faster"
    return "inconclusive" if undecided(recipe) else "original"


def more(recipe: Recipe) -> tuple[str, str] | None:
    """Return the undecided steps and the command that continues the search, or None."""
    names = [str(rung.step) for rung in undecided(recipe)]
    if not names:
        return None
    seconds = 10 * math.ceil((recipe.budget.time_seconds + recipe.more_seconds) / 10)
    if recipe.command.endswith("(…)"):  # Python's
        command = f"time_budget={seconds}, resume=result"
    else:
        anew = re.sub(r" --resume\b| --time-budget[ =]\S+", "", recipe.command)
        command = f"{anew} --time-budget {seconds} --resume"
    busy = any(rung.status != "untried" for rung in undecided(recipe))
    lack = "time or a quiet machine" if busy else "time"
    return wording.clean(f"for lack of {lack}: {', '.join(names)}"), wording.clean(command)


def payback(rung: StepResult) -> str:
    """After how many calls a step has won back the time it took to prepare; nothing where its speed is not known."""
    return wording.calls(rung.payback_calls, rung.compile_seconds) if rung.speedup is not None else ""


def so_far(rung: StepResult) -> Interval | None:
    """Return the speed-up of the recipe up to a kept step over the original; None for a step that was not kept."""
    return rung.total_speedup if rung.kept else None


def reason(rung: StepResult) -> str:
    """Why a row ended as it did, and whether that is of an earlier search."""
    return f"(earlier search) {rung.reason}" if rung.earlier else rung.reason


def model_name(recipe: Recipe) -> str:
    """Return the model's name in the workload."""
    for key in ("name", "model"):
        value = recipe.workload.get(key)
        if isinstance(value, str) and value.strip():
            return wording.clean(value).rstrip("/").rsplit("/", 1)[-1]
    return "The model"


def machine(recipe: Recipe) -> str:
    """Device, threads and torch's version in one line."""
    at = recipe.fingerprint
    chosen = f"{at.threads} of {at.most_threads}" if at.most_threads else str(at.threads)
    threads = f"{chosen} thread" + ("s" if (at.most_threads or at.threads) != 1 else "")
    return wording.clean(f"{at.device.name}, {threads}, torch {at.torch}")


def _original_headline(recipe: Recipe) -> str:
    """The sentence for a search that decided about every step and kept none; what failed was not slower."""
    failed = sum(rung.status == "failed" for rung in recipe.rungs)
    if not failed:
        return "The original is already the fastest within the budget."
    if not any(rung.status in ("dropped", "removed") for rung in recipe.rungs):
        return f"Inconclusive: nothing was measured, for {failed} of {len(recipe.rungs)} steps failed."
    return f"Nothing faster was found within the budget, and {failed} of {len(recipe.rungs)} steps failed."


def headline(recipe: Recipe) -> str:
    """The result in one sentence."""
    name = model_name(recipe)
    # No name in these two: the sentence is about the machine and the budget as much as about the model.
    if verdict(recipe) == "original":
        return _original_headline(recipe)
    if verdict(recipe) == "inconclusive":
        left = f"{len(undecided(recipe))} of {len(recipe.rungs)}"
        if all(rung.status == "untried" for rung in undecided(recipe)):
            return f"Inconclusive: nothing faster was found, and the time budget left {left} steps untried."
        return f"Inconclusive: nothing faster was found, and a busy machine left {left} steps undecided."
    if recipe.budget.objective == "memory" and recipe.baseline.peak_memory_bytes > 0:
        less = 1 - recipe.final.peak_memory_bytes / recipe.baseline.peak_memory_bytes
        return f"{name} needs {100 * less:.0f}% less memory at {wording.ratio(recipe.speedup)} the speed."
    if recipe.speedup.disturbed:
        return f"{name} runs faster than the original; other programs hid how much: {recipe.speedup}."
    return f"{name} runs {wording.ratio(recipe.speedup)} as fast as the original."


def runs_as(recipe: Recipe) -> str:
    """Return what the speed-up was measured on; empty for older recipes, which do not say."""
    if not recipe.steps:
        return wording.clean(recipe.runs_as or "the original as it is").replace("the recipe", "the original")
    return wording.clean(recipe.runs_as)


def needs_module(recipe: Recipe, artifact: str | None = None) -> str | None:
    """Return how to load an artifact that was measured on the caller's module, or None. `artifact` is its folder."""
    if recipe.runs_as != OWN_MODULE:
        return None
    folder = "DIR" if artifact is None else repr(wording.clean(artifact))
    then = "replays the recipe on your own module" if recipe.steps else "takes your own module"
    if recipe.holds_graph:
        return f"the exported graph runs by tw.load({folder}); tw.load({folder}, model=…) {then}"
    return f"the artifact holds no model: tw.load({folder}, model=…) {then}"


def row_times(recipe: Recipe) -> list[RowsTime]:
    """Return the speed-up per batch size, including the example's if the workload states it."""
    if not recipe.rows:
        return []
    example = example_rows(recipe)
    if example is None or any(found.rows == example for found in recipe.rows):
        return sorted(recipe.rows, key=lambda found: found.rows)
    own = RowsTime(rows=example, seconds=recipe.final.seconds, speedup=recipe.speedup)
    return sorted((*recipe.rows, own), key=lambda found: found.rows)


def example_rows(recipe: Recipe) -> int | None:
    """The rows of the calls that the recipe was found on: the batch, or the first size of a module's first tensor."""
    batch = recipe.workload.get("batch")
    if type(batch) is int:
        return batch
    shapes: Any = recipe.workload.get("shapes")
    try:
        (call,) = shapes
        leaves: list[Any] = [*call["args"]]
        leaves += [leaf for given in call["kwargs"].values() for leaf in given]
        rows: Any = next(leaf[1] for leaf in leaves if type(leaf) in (list, tuple))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, StopIteration):
        return None  # a workload of another kind describes itself in its own way
    return rows if type(rows) is int else None


def rates(recipe: Recipe) -> list[str]:
    """Return the workload's rates that the lines of its calls do not show already."""
    pairs = case_pairs(recipe)
    said = {found for pair in pairs for found in (pair.after, pair.rate(pair.after)) if found is not None}
    return [
        f"{wording.rate_name(each.name)} {wording.rate(each.name, each.before)} → "
        f"{wording.rate(each.name, each.after)}"
        for each in recipe.rates
        if not any(math.isclose(each.after, found, rel_tol=1e-6) for found in said)
    ]


def process_gain(recipe: Recipe) -> str | None:
    """Return the speed-up without a step that changes the whole process, in one sentence."""
    gain = recipe.process
    if gain is None:
        return None
    return (
        f"{gain.without} is left without the allocator step, which changes the whole process; "
        f"{gain.both} against an original whose process keeps freed memory, too"
    )


def loss(recipe: Recipe) -> str:
    """Compare the final metric with the original's and the budget, in one sentence."""
    quality = recipe.final.quality
    budget = wording.percent(recipe.budget.max_drop)
    if quality is None:
        return f"no metric was measured (budget {budget})"
    metric = f"{quality.metric} {wording.number(quality.reference)} → {wording.number(quality.value)}"
    lost = f"loss {wording.percent(quality.drop)}, at most {wording.percent(quality.drop_high)}"
    seen = ", on data by which nothing was chosen" if quality.unseen else ""
    return wording.clean(f"{metric}: {lost} (budget {budget}){seen}")


def over_budget(quality: Quality | None, recipe: Recipe) -> bool:
    return quality is not None and quality.drop_high > recipe.budget.max_drop


def _ratio(before: float, after: float) -> float | None:
    return before / after if after > 0 else None


def _divide(seconds: float, by: Interval | None) -> float | None:
    return seconds / by.value if by is not None and by.value > 0 else None


def _tokens(case: CaseTime, recipe: Recipe) -> int | None:
    batch, prompt = recipe.workload.get("batch", 1), recipe.workload.get("prompt_tokens")
    if not isinstance(batch, int):
        return None
    if case.name == "prefill" and isinstance(prompt, int):
        return batch * prompt
    if case.name == "decode" and isinstance(recipe.workload.get("new_tokens"), int):
        return batch
    return None
