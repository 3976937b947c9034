"""What to try next, on top of what, and what is not worth a trial."""

from __future__ import annotations

from collections.abc import Sequence

from torchwright.errors import RefusedTechnique
from torchwright.facts import Step
from torchwright.plan.compare import FEWEST_ROUNDS, turn_seconds
from torchwright.plan.state import Search
from torchwright.techniques.base import Phase, Technique, from_step, in_order, techniques

COMPANY = 0.7
"""A step that was this much of a gain alone, or better, is tried again together with one that needs it."""

DEAR = 0.05
"""Share of the time budget; the shortest comparison with an original that is slow takes more."""


def first_queue(search: Search) -> list[Step]:
    """Steps to try, in the order of their phases; those refused outright become rows at once."""
    asked = {step.name: step for step in search.wanted}
    queue: list[Step] = []
    for step in search.wanted:
        reason = _blanket_refusal(search, step)
        if reason:
            raise RefusedTechnique(
                f"{step} was asked for and cannot run here",
                found=reason,
                next="`torchwright doctor` says more",
            )
        queue.append(step)
    refused: set[tuple[str, str]] = set()
    variants: list[tuple[Step, str | None]] = search.description["variants"]
    for step, reason in [] if search.only else variants:
        if step.name in asked or step.name in search.without:
            continue
        if reason is None:
            queue.append(step)
        elif (step.name, reason) not in refused:
            refused.add((step.name, reason))
            search.refuse(step, reason)
    return _large_gains_first(search, in_search_order(queue))


def _large_gains_first(search: Search, queue: list[Step]) -> list[Step]:
    """Where the original is slow beside the time budget, and there is time for few trials: what gains little goes last.

    A billion parameters in float32 take a minute for each trial of transformers' code, and all that such trials keep
    is left behind when an engine of its own takes the whole model over: engines go first, and the narrow weights that
    stand on them. Without an engine, settings of the process wait until the model itself has been changed.
    """
    if FEWEST_ROUNDS * turn_seconds(search.baseline) < DEAR * search.budget.time_seconds:
        return queue
    known: frozenset[str] = search.description["properties"]
    engines = any(_is_engine(technique) and technique.needs <= known for technique in map(from_step, queue))

    def place(step: Step) -> int:
        technique = from_step(step)
        if not engines:
            return int(technique.phase == Phase.PROCESS)
        return 0 if _is_engine(technique) else 1 if technique.phase == Phase.WEIGHTS else 2

    return sorted(queue, key=place)


def _is_engine(technique: Technique) -> bool:
    """Whether it runs the model on code of its own."""
    return "eager" in technique.removes and "compiled" not in technique.gives


def _blanket_refusal(search: Search, step: Step) -> str | None:
    cls = techniques.get(step.name)
    for known, reason in search.description["variants"]:
        if known.name == step.name and reason and known.options == step.options:
            return reason
    return cls.available(search.description["device"])


def tried_already(search: Search, step: Step) -> bool:
    """A later variant of a technique is tried only when the earlier ones were not kept."""
    return step.name in {kept.name for kept in search.best.steps} and step not in search.wanted


def with_step(
    search: Search, technique: Technique, step: Step
) -> tuple[tuple[Step, ...] | None, tuple[Step, ...]]:
    """The best recipe with `step`, in place of kept steps that took away what it needs."""
    missing, together = technique.needs - search.have(), in_order([*search.best.steps, step])
    if not missing or _hold_together(search, together):
        return together, ()
    swapped = tuple(kept for kept in search.best.steps if from_step(kept).removes & missing)
    restored = frozenset[str]().union(*(from_step(kept).removes for kept in swapped))
    if missing - restored or "compiled" in missing or any(kept in search.wanted for kept in swapped):
        return None, ()
    rest = [kept for kept in search.best.steps if kept not in swapped]
    return in_order([*rest, step]), swapped


def _hold_together(search: Search, steps: tuple[Step, ...]) -> bool:
    """Whether each step, in its place, finds what it needs: one of an early phase may lack nothing but what later steps
    of the recipe have taken away."""
    have: frozenset[str] = search.description["properties"]
    changes = [from_step(step) for step in steps]
    promised = frozenset[str]().union(*(change.gives for change in changes))
    for change in changes:
        if change.needs - have - promised:
            return False
        have = (have - change.removes) | change.gives
    return True


def engine_in_the_way(search: Search, technique: Technique) -> Step | None:
    """The kept step, if any, that runs the model on other code, in which nothing is left of what `technique` changes.

    Other steps give way to a better one that clashes with them. This one has the whole model in its place, and what
    was kept since stands on it.
    """
    missing = technique.needs - search.have()
    for kept in search.best.steps:
        other = from_step(kept)
        if _is_engine(other) and other.removes & missing:
            return kept
    return None


def comes_later(search: Search, technique: Technique, queue: list[Step]) -> bool:
    """Whether steps still to be tried give what this one needs."""
    return technique.needs - search.have() <= {name for other in queue for name in from_step(other).gives}


def in_company(search: Search, technique: Technique, step: Step) -> tuple[Step, ...] | None:
    """The best recipe with `step` and a step dropped before that gives what it needs.

    A change of the model and the compiler that fuses it are worth more together than what each is worth alone:
    compiled bfloat16 convolutions may gain nothing over eager ones, and compiled 8-bit ones twice as much.
    """
    missing = technique.needs - search.have()
    for rung in search.rungs:
        other = from_step(rung.step)
        near = rung.status == "dropped" and rung.speedup is not None and rung.speedup.high > COMPANY
        if near and technique.phase < other.phase and missing <= other.gives and other.needs <= search.have():
            return in_order([*search.best.steps, rung.step, step])
    return None


def postpone(search: Search, step: Step, technique: Technique, queue: list[Step]) -> list[Step]:
    """Wait for a later step to give what this one needs, or refuse it when none will."""
    missing = technique.needs - search.have()
    if comes_later(search, technique, queue):
        position = min(i for i, other in enumerate(queue) if from_step(other).gives & missing)
        return [*queue[: position + 1], step, *queue[position + 1 :]]
    if step in search.wanted:
        raise RefusedTechnique(f"{step} was asked for and cannot run here", found=_lacks(missing))
    search.refuse(step, _lacks(missing))
    return queue


def cannot_pay(search: Search, technique: Technique) -> str | None:
    """The micro-benchmark's verdict: the most that faster linear layers can save, against the noise."""
    times: dict[str, float] = search.description["kernel_seconds"]
    kernel = technique.kernel
    if (
        kernel is None
        or kernel not in times
        or search.kernel not in times
        or search.budget.objective == "memory"
    ):
        return None
    if "linear" not in technique.needs:
        return None
    saving = times[search.kernel] - times[kernel]
    if saving > 0.02 * search.best_seconds():
        return None
    return (
        f"{kernel} kernels need {_ms(times[kernel])} for this model's linear layers where {search.kernel} needs "
        f"{_ms(times[search.kernel])}: nothing to gain"
    )


def second_chances(search: Search, queue: list[Step]) -> list[Step]:
    """The queue with steps that were dropped for speed before the model was compiled: fusion can change the verdict.

    They come after the quantizations, which gain more, since each of them takes the compiler once more.
    """
    again = [
        rung.step
        for rung in search.rungs
        if rung.status == "dropped"
        and rung.speedup is not None
        and "compiled" not in from_step(rung.step).gives
    ]
    search.rungs = [rung for rung in search.rungs if rung.step not in again]
    weights = [place for place, step in enumerate(queue) if from_step(step).phase == Phase.WEIGHTS]
    after = weights[-1] + 1 if weights else 0
    return [*queue[:after], *in_search_order(again), *queue[after:]]


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


def _lacks(missing: frozenset[str]) -> str:
    return f"the model has no: {', '.join(sorted(missing)).replace('_', ' ')}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
