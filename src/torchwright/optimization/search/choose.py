"""The choice of the next step: which steps, on top of which recipe, and which are not worth a trial."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torchwright.core.records import Step, StepResult
from torchwright.optimization.search import components, estimate
from torchwright.optimization.search.components import HIDDEN
from torchwright.optimization.search.state import COMPANY, Search
from torchwright.optimization.techniques.base import (
    Phase,
    Technique,
    from_step,
    in_order,
)

GAINS = {
    Phase.PROCESS: 1.05,
    Phase.GRAPH: 1.1,
    Phase.DTYPE: 2.0,
    Phase.WEIGHTS: 1.5,
    Phase.ATTENTION: 1.1,
    Phase.CACHE: 1.1,
    Phase.COMPILE: 1.5,
    Phase.RUNTIME: 1.05,
}
"""Expected gain of a step where it pays; it decides only the order of trials."""
ENGINE_GAIN = 4.0
"""The same of one that runs the model on code of its own, in fewer bits as a rule."""
TOGETHER = 1.25
"""The gain that timed kernels must promise of a step that is tried with what it waits for: less may be lost in the
noise of a trial in which two steps differ."""
SMALL_GAIN = 1.05
"""The same of a step that was measured before, is another variant of a kept one, or must round too much."""


def first_queue(search: Search, left: Sequence[Step] = ()) -> list[Step]:
    """Steps to try, those among them that an earlier search has `left`; those refused outright become rows at once."""
    search.wanted = _closed(search)
    queue = _asked_for(search) + _variants(search)
    variants = [step for step, _ in search.description.variants]
    queue += [step for step in left if step not in variants and step not in queue]
    return queue + _open_again(search, queue)


def _closed(search: Search) -> tuple[Step, ...]:
    """Return the requested steps; a step with open options stands for all its variants that can run."""
    found: list[Step] = []
    for step in search.wanted:
        proposed = [
            each for each, reason in search.description.variants if each.name == step.name and reason is None
        ]
        found += proposed if from_step(step).is_open and proposed else [step]
    return tuple(found)


def _asked_for(search: Search) -> list[Step]:
    """Steps asked for by name; one that has a row already is tried again where that can change the verdict."""
    settled = [rung.step for rung in search.rungs if _is_settled(rung)]
    return [step for step in search.wanted if step not in settled]


def _variants(search: Search) -> list[Step]:
    """Return the variants of the other techniques that have no row yet."""
    asked, have_rows = {step.name for step in search.wanted}, [rung.step for rung in search.rungs]
    queue: list[Step] = []
    refused: set[tuple[str, str]] = set()
    for step, reason in () if search.only else search.description.variants:
        if step.name in asked or step.name in search.without:
            continue
        if reason is None:
            if step not in have_rows:
                queue.append(step)
        elif (step.name, reason) not in refused:
            refused.add((step.name, reason))
            search.refuse(step, reason)
    return queue


def _open_again(search: Search, queue: Sequence[Step]) -> list[Step]:
    """Return the steps that an earlier search refused and that may be able to run once the queue is tried."""
    promised = frozenset[str]().union(*(from_step(step).gives for step in queue)) - search.have()
    refused = [rung.step for rung in search.rungs if rung.earlier and rung.status == "refused"]
    return [step for step in refused if step not in queue and from_step(step).required & promised]


def _is_settled(rung: StepResult) -> bool:
    """Check whether a row's verdict also holds for a step that is requested by name."""
    if rung.status == "dropped":
        return rung.speedup is None or rung.speedup.high <= 1.0
    return rung.kept


def take(search: Search, queue: list[Step]) -> list[Step]:
    """Remove the next step from the queue: a requested one, else the best by `_rank` of those that fit the time.

    If the time is too short for the whole queue, a step that waits for this one may come before it: both are tried at
    once, so that the model is compiled once less.
    """
    waiting = [step for step in queue if waits(search, step, queue)]
    ready = [step for step in queue if step not in waiting] or queue

    def place(step: Step) -> tuple[bool, bool, float]:
        steps = plan(search, step)
        wanted = step in search.wanted and not search.has_variant(step)
        rank = max([_rank(search, step, steps), *_ranks_with(search, step, waiting)])
        return wanted, estimate.no_time(search, steps) is None, rank

    chosen = max(ready, key=place)
    found = [*_worth_both(search, chosen, waiting, queue), chosen]
    for step in found:
        queue.remove(step)
    return found


def _worth_both(search: Search, step: Step, waiting: Sequence[Step], queue: Sequence[Step]) -> list[Step]:
    """Return the step that waits for this one alone and promises most, if it is to be tried in the same trial."""
    if step in search.wanted or not waiting:
        return []
    whole = sum(expected_seconds(search, each, plan(search, each)) for each in queue)
    if whole <= estimate.time_left(search, search.best.steps):
        return []
    others = [
        other
        for other in waiting
        if _missing(search, from_step(other)) <= from_step(step).gives
        and estimate.no_time(search, in_order([*search.best.steps, step, other])) is None
    ]
    best = max(others, key=lambda other: _timed_gain(search, from_step(other)), default=None)
    return [best] if best and _timed_gain(search, from_step(best)) >= TOGETHER else []


def left_to_another(search: Search, step: Step, steps: Sequence[Step]) -> float:
    """Return the seconds that a third-party engine's trial leaves to another that waits, if there is time for both.

    A conversion may take far longer than expected: OpenVINO, which unrolls LSTMs, took the time of ONNX Runtime, which
    is ready seven times as soon and is faster (Resemblyzer).
    """
    technique = from_step(step)
    if not is_closed(technique) or step in search.wanted:
        return 0.0
    others = [
        estimate.trial_seconds(search, plan(search, other))
        for other in search.queue
        if is_closed(from_step(other))
        and not technique.replaces(from_step(other))
        and possible(search, other)
    ]
    # Ending a process takes about as long as starting one.
    least = min(others, default=0.0) + search.spent[0].seconds
    spare = estimate.time_left(search, steps) - estimate.trial_seconds(search, steps)
    return least if others and least <= spare else 0.0


def most_promising(search: Search, without: Sequence[Step]) -> Step | None:
    """Return the untried step that is expected to gain most per second, or None."""

    def place(step: Step) -> tuple[bool, float]:
        return step in search.wanted, _rank(search, step, plan(search, step))

    untried = [rung.step for rung in search.rungs if rung.status == "untried" and rung.step not in without]
    return max((step for step in untried if possible(search, step)), key=place, default=None)


def _rank(search: Search, step: Step, steps: Sequence[Step]) -> float:
    """Return the expected gain of a step per second of its trial."""
    return math.log(expected_gain(search, step)) / expected_seconds(search, step, steps)


def _ranks_with(search: Search, step: Step, waiting: Sequence[Step]) -> Iterator[float]:
    """Yield the expected gain per second of a step and one that waits for it alone, in two trials."""
    technique = from_step(step)
    for other in waiting:
        if _missing(search, from_step(other)) <= technique.gives:
            gain = expected_gain(search, step) * expected_gain(search, other)
            seconds = sum(expected_seconds(search, each, plan(search, each)) for each in (step, other))
            yield math.log(gain) / seconds


def expected_gain(search: Search, step: Step) -> float:
    """Return the expected gain of a step where it pays."""
    technique = from_step(step)
    if technique.keeps_pages:
        return _without_faults(search)
    measured = any(rung.step == step and rung.speedup is not None for rung in search.rungs)
    if measured or search.has_variant(step) or _too_coarse(search, technique):
        return components.in_pass(search, technique, SMALL_GAIN)
    gain = search.informed().gain(step, components.in_pass(search, technique, _guess(search, technique)))
    first = _engine_so_far(search)
    if first and search.rival and is_closed(technique) and not technique.replaces(first):
        gain /= search.rival.proven.total.value  # the first engine has gained most of that already
    return max(gain, SMALL_GAIN)


def _guess(search: Search, technique: Technique) -> float:
    """Return the gain to expect of a step without experience."""
    if technique.expected_gain is not None:
        return technique.expected_gain
    best = _engine_so_far(search)
    if best and technique.replaces(best):
        narrower = 0 < best.epsilon < technique.epsilon
        return search.reached() * (GAINS[technique.phase] if narrower else SMALL_GAIN)
    if _is_engine(technique) and not _was_tried(search, technique.name):
        # Unrolled in 8 bits, LSTMs took 1.2 and 2 times as long as the original (Silero VAD, Resemblyzer).
        if technique.calibrates and search.description.features.recurrent:
            return SMALL_GAIN
        return ENGINE_GAIN  # another variant of a dropped engine is as uncertain as any step
    # What lets others do something is worth what waits for it, a compiler at least.
    gain = GAINS[Phase.COMPILE if technique.enables else technique.phase]
    return max(gain, _timed_gain(search, technique))


def _engine_so_far(search: Search) -> Technique | None:
    """Return the third-party engine that was kept."""
    return from_step(search.rival.candidate.steps[-1]) if search.rival else None


def _without_faults(search: Search) -> float:
    """Return a lower bound on the gain of the best recipe if its pages stayed mapped, from counted page faults."""
    return 1 / max(1 - search.best.faulting / search.pass_seconds(search.best), HIDDEN)


def _was_tried(search: Search, name: str) -> bool:
    return any(rung.step.name == name and rung.status != "refused" for rung in search.rungs)


def _too_coarse(search: Search, technique: Technique) -> bool:
    """Check whether a step rounds as much as one that lost more than the budget: the loss goes with the rounding."""
    lost = [
        from_step(rung.step).epsilon
        for rung in search.rungs
        if rung.status == "dropped" and rung.quality and rung.quality.drop_high > search.budget.max_drop
    ]
    return technique.epsilon >= min((epsilon for epsilon in lost if epsilon), default=math.inf)


def expected_seconds(search: Search, step: Step, steps: Sequence[Step]) -> float:
    """Return the expected seconds of a trial of `steps`, made for one of them."""
    return search.informed().cost(step, search.original_seconds, estimate.trial_seconds(search, steps))


def plan(search: Search, step: Step) -> tuple[Step, ...]:
    """The recipe in which a step would be tried now, as far as that can be said."""
    return possible(search, step) or in_order([*search.best.steps, step])


def possible(search: Search, step: Step) -> tuple[Step, ...] | None:
    """The recipe in which a step can be tried now, or None."""
    technique = from_step(step)
    return with_step(search, technique, step)[0] or in_company(search, technique, step)


def untried_seconds(search: Search) -> float:
    """Return the expected seconds of trials for all untried and undecided steps."""
    undecided = [rung.step for rung in search.rungs if rung.undecided]
    return sum(estimate.trial_seconds(search, plan(search, step)) for step in undecided)


def waits(search: Search, step: Step, queue: Sequence[Step]) -> bool:
    """Check whether a step depends on another one in the queue."""
    technique = from_step(step)
    if with_step(search, technique, step)[0] is not None:
        return False
    others = [from_step(other) for other in queue if other != step]
    taken = frozenset[str]().union(*(from_step(kept).removed for kept in search.best.steps))
    # What kept steps took away comes back in their place; see `with_step`.
    missing = _missing(search, technique) - taken
    return bool(missing) and missing <= {name for other in others for name in other.gives}


def _missing(search: Search, technique: Technique) -> frozenset[str]:
    """Return the properties that a step needs and the best recipe lacks without the step's other variants."""
    kept = map(from_step, search.best.steps)
    variants = [other for other in kept if technique.replaces(other)]
    taken = frozenset[str]().union(*(variant.removed for variant in variants))
    return technique.required - search.have() - (taken & search.description.properties)


def _is_engine(technique: Technique) -> bool:
    """Check whether the technique runs the model on an engine of its own."""
    return "eager" in technique.removed and "compiled" not in technique.gives


def is_closed(technique: Technique) -> bool:
    """Check whether the technique hands the whole model to a third-party engine, so that no later step applies."""
    return _is_engine(technique) and not technique.gives


def with_step(
    search: Search, technique: Technique, step: Step
) -> tuple[tuple[Step, ...] | None, tuple[Step, ...]]:
    """Return the best recipe with `step`, in place of its variants and of kept steps that remove what it needs."""
    variants = tuple(kept for kept in search.best.steps if technique.replaces(from_step(kept)))
    others = [kept for kept in search.best.steps if kept not in variants]
    missing, together = technique.required - search.have(), in_order([*others, step])
    if not missing or _hold_together(search, together):
        return together, variants
    removers = [kept for kept in others if from_step(kept).removed & missing]
    swapped = (*variants, *removers)
    restored = frozenset[str]().union(*(from_step(kept).removed for kept in swapped))
    if missing - restored or "compiled" in missing or any(kept in search.wanted for kept in swapped):
        return None, variants
    rest = [kept for kept in search.best.steps if kept not in swapped]
    return in_order([*rest, step]), swapped


def _hold_together(search: Search, steps: tuple[Step, ...]) -> bool:
    """Check whether each step finds the properties it needs at its place.

    A step of an early phase may lack only properties that later steps of the recipe remove."""
    have = search.description.properties
    changes = [from_step(step) for step in steps]
    promised = frozenset[str]().union(*(change.gives for change in changes))
    for change in changes:
        if change.required - have - promised:
            return False
        have = (have - change.removed) | change.gives
    return True


def engine_in_the_way(search: Search, technique: Technique) -> Step | None:
    """The kept step, if any, that runs the model on other code, in which nothing is left of what `technique` changes.

    Other steps give way to a better one that clashes with them. This one has the whole model in its place, and what
    was kept since stands on it.
    """
    missing = technique.required - search.have()
    for kept in search.best.steps:
        other = from_step(kept)
        if not is_closed(technique) and _is_engine(other) and other.removed & missing:
            return kept
    return None


def in_company(search: Search, technique: Technique, step: Step) -> tuple[Step, ...] | None:
    """The best recipe with `step` and a step dropped before that gives what it needs.

    A change of the model and the compiler that fuses it are worth more together than what each is worth alone:
    compiled bfloat16 convolutions may gain nothing over eager ones, and compiled 8-bit ones twice as much.
    """
    missing = _missing(search, technique)
    best = [kept for kept in search.best.steps if not technique.replaces(from_step(kept))]
    for rung in search.rungs:
        other = from_step(rung.step)
        if not rung.was_slow or rung.speedup is None or not missing <= other.gives:
            continue
        together = in_order([*best, rung.step, step])
        if other.enables and _hold_together(search, together):
            return together  # what it costs alone is not what it is for
        near = rung.speedup.high > COMPANY
        if near and technique.phase < other.phase and other.needs <= search.have():
            return together
    return None


def lacks(search: Search, technique: Technique) -> str:
    """Return in words which properties a step needs and nothing before it can give."""
    missing = technique.required - search.have()
    return f"the model has no: {', '.join(sorted(missing)).replace('_', ' ')}"


def untried_giver(search: Search, technique: Technique) -> StepResult | None:
    """The row of a step that was not tried for lack of time and would give what this one needs."""
    missing = technique.required - search.have()
    untried = [rung for rung in search.rungs if rung.status == "untried"]
    return next((rung for rung in untried if missing and missing <= from_step(rung.step).gives), None)


def cannot_pay(search: Search, technique: Technique) -> str | None:
    """Why what was counted or timed of the best says that a step has nothing to save that noise does not hide."""
    if search.budget.objective == "memory":
        return None
    if technique.keeps_pages:
        return _few_faults(search)
    return _no_instructions(search, technique) or _no_faster_kernel(search, technique)


def _few_faults(search: Search) -> str | None:
    share = search.best.faulting / search.pass_seconds(search.best)
    if share > HIDDEN:
        return None
    return f"fresh pages take {share:.1%} of a pass, and up to {HIDDEN:.0%} is lost in the noise"


def _no_instructions(search: Search, technique: Technique) -> str | None:
    """Return a reason against layers in 16 bits where the processor does not compute in them, or None.

    Linear layers of a few rows may gain all the same, because their weights are read in half the bytes.
    """
    described, half = search.description, technique.half
    if half is None or half not in described.device.without:
        return None
    features, times = described.features, described.kernel_seconds
    if features.convolution or features.recurrent or times.get(half, 0.0) > times.get("float32", 0.0):
        return f"this processor has no instructions for {half}, and layers in it take several times as long"
    return None


def _no_faster_kernel(search: Search, technique: Technique) -> str | None:
    """The micro-benchmark's verdict: the most that faster linear layers can save."""
    kernels = _kernel_seconds(search, technique)
    if kernels is None or "linear" not in technique.required:
        return None
    before, after = kernels
    saving = before - after
    share = saving / search.pass_seconds(search.best)
    if share > HIDDEN:
        return None
    why = (
        "not faster"
        if saving <= 0
        else f"{share:.1%} of a pass at most, and up to {HIDDEN:.0%} is lost in the noise"
    )
    return (
        f"{technique.kernel} kernels need {_ms(after)} for this model's linear layers where {search.kernel()} needs "
        f"{_ms(before)}: {why}"
    )


def second_chances(search: Search) -> list[Step]:
    """Steps that were dropped for speed before, and not by far: what was kept since can change the verdict."""
    return [
        rung.step
        for rung in search.rungs
        if rung.was_slow
        and rung.speedup is not None
        and rung.speedup.high > COMPANY
        and "compiled" not in from_step(rung.step).gives
        and not is_closed(from_step(rung.step))
    ]


def changes_verdicts(technique: Technique) -> bool:
    """Check whether a kept technique makes other steps worth another trial.

    A compiler fuses what was slow alone. Memory that stays in the process avoids the page faults that hide the gain of
    every other step (twice the time of an 8-bit ResNet-50).
    """
    return "compiled" in technique.gives or technique.phase == Phase.PROCESS


def _kernel_seconds(search: Search, technique: Technique) -> tuple[float, float] | None:
    """Return the seconds of all linear layers on the best recipe's kernel and on a step's; None if not timed."""
    times = search.description.kernel_seconds
    before, after = times.get(search.kernel()), times.get(technique.kernel or "")
    return None if before is None or after is None else (before, after)


def _timed_gain(search: Search, technique: Technique) -> float:
    """Return the gain that the timed kernels of linear layers promise; 1 where none were timed."""
    before, after = _kernel_seconds(search, technique) or (0.0, 0.0)
    saved = (before - after) / search.pass_seconds(search.best)
    return max(1 / max(1 - saved, 1 / ENGINE_GAIN), 1.0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
