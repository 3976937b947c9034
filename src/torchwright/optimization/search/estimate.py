"""Estimates of time for a trial and the artifact's proof, from earlier ones on this model."""

from __future__ import annotations

from collections.abc import Sequence

from torchwright.core.records import Step
from torchwright.optimization.engines.sensitivity import parts_seconds
from torchwright.optimization.search import compare
from torchwright.optimization.search.state import LATE_SHARE, PATIENCE, Search, Spent
from torchwright.optimization.techniques.base import Technique, compiles, conversion_of, from_step

CONVERTER_EXPORTS, COMPILER_EXPORTS = 10.0, 12.0
"""Expected time of a third-party conversion and of a compilation, in exports of the model, until one was measured.

Conversions took 10 to 13 exports on four models, compilers 11 to 50 on seven. DETR's 41 s are 11 of its exports; with
an estimate of 20 a search of 150 s never compiled it.

A guess is on the low side: a longer trial is stopped in time, and one that was not begun yields nothing.
"""
PROOF_SHARE = 0.4
"""The largest share of the time budget that is reserved for writing the artifact and proving it."""
LEAST_SECONDS = 60.0
"""Whatever loads or writes a model has a minute, however short its estimate: disks and compilers are slow at times."""


def trial_seconds(search: Search, steps: Sequence[Step]) -> float:
    """A trial of these steps, from its process to its verdict."""
    return ready_seconds(search, steps) + search.settle_seconds + comparison_seconds(search)


def ready_seconds(search: Search, steps: Sequence[Step]) -> float:
    """Until a process with these steps can be called, from the trial that had most in common with them.

    What one compiler or engine took says nothing about another: without a trial of theirs it is a guess.
    """
    if converted := _conversions(search, steps):
        return converted[-1].seconds - converted[-1].conversion
    return afresh_seconds(search, steps)


def afresh_seconds(search: Search, steps: Sequence[Step]) -> float:
    """The same where nothing is taken over from other trials."""
    alike = [spent for spent in search.spent if runners(spent.steps) == runners(steps)]
    exports = COMPILER_EXPORTS if compiles(steps) else CONVERTER_EXPORTS if _converting(steps) else 0.0
    guess = search.spent[0].seconds + exports * search.description.export_seconds
    if not alike:
        return guess
    nearest = max(reversed(alike), key=lambda spent: _in_common(spent.steps, steps))
    return max(nearest.seconds, guess) if nearest.stopped else nearest.seconds


def comparison_seconds(search: Search) -> float:
    """One comparison with a candidate, which is expected to take half as long as the best does."""
    original, best = compare.turn_seconds(search.baseline), compare.turn_seconds(search.best)
    one_round = best / 2 + (0.0 if compare.spares_original(search) else original)
    one_round += 0.0 if search.best is search.baseline else best
    most = min(compare.ROUNDS[1] * one_round, compare.limit_seconds(search))
    return max(compare.FEWEST_ROUNDS * one_round, most)


def proof_seconds(search: Search, steps: Sequence[Step]) -> float:
    """Writing an artifact of these steps and proving it in a fresh process, as far as there is time for that.

    Until something is kept, it is a small share of the time budget: a find is worth more than time for its proof.
    """
    share = PROOF_SHARE if search.found_any() else LATE_SHARE / 2
    expected = least_proof_seconds(search, steps) + figures_seconds(search)
    if compiles(steps):  # once more, for a dynamic batch size
        expected += afresh_seconds(search, steps) - search.spent[0].seconds
    return min(expected, share * search.budget.time_seconds)


def least_proof_seconds(search: Search, steps: Sequence[Step]) -> float:
    """Finding what answers other sizes, and timing the artifact in a fresh process."""
    return _other_sizes_seconds(search, steps) + fresh_process_seconds(search)


def _other_sizes_seconds(search: Search, steps: Sequence[Step]) -> float:
    """Return the seconds of finding what answers other batch sizes and shapes.

    One process exports graphs for the example, for dynamic shapes and for a batch of one. Another reads them, which
    takes as long, checks them, and times the forms where some are compiled. A third-party engine answers all sizes by
    a call that is judged; another one as it is.
    """
    if not search.description.called_as_is:
        return 0.0
    if compiles(steps) or not runners(steps):
        return graphs_seconds(search) + (comparison_seconds(search) if compiles(steps) else 0.0)
    return search.spent[0].seconds + search.settle_seconds if _converting(steps) else 0.0


def graphs_seconds(search: Search, *, processes: int = 2) -> float:
    """Return the seconds of exporting three graphs, and of reading and checking them, which takes as long again."""
    return processes * search.spent[0].seconds + 6 * search.description.export_seconds


def figures_seconds(search: Search) -> float:
    """Return the seconds of judging the artifact, and of timing three other batch sizes for half a comparison each."""
    return search.settle_seconds + 3 * compare.limit_seconds(search) / 2


def fresh_process_seconds(search: Search) -> float:
    """Return the seconds of timing the artifact in a process that is not forked, with the original there or in its own.

    The last comparison is twice as long as others.
    """
    processes = 1 if search.description.called_as_is else 2
    return processes * search.import_seconds + 2 * (search.spent[0].seconds + comparison_seconds(search))


def latest(search: Search, steps: Sequence[Step]) -> float:
    """Return the deadline of a trial of these steps.

    After it, its artifact could not be proved within the time budget, nor, if the trial fails, that of the kept recipe
    that would ship.
    """
    alive = [search.best, search.aside, search.rival and search.rival.candidate]
    kept = max((each.steps for each in alive if each), key=lambda recipe: _precedence(search, recipe))
    recipes = [steps, kept] if kept else [steps]
    return search.end - max(proof_seconds(search, recipe) for recipe in recipes)


def _precedence(search: Search, steps: Sequence[Step]) -> tuple[bool, float]:
    """Return the sort key of a kept recipe: steps asked for by name first, then its speed-up over the original."""
    rows = [rung for rung in search.rungs if rung.kept and rung.step in steps]
    speedup = max((rung.total_speedup.value for rung in rows if rung.total_speedup), default=1.0)
    return any(step in search.wanted for step in steps), speedup


def time_left(search: Search, steps: Sequence[Step]) -> float:
    """Return the seconds for a trial that leave time for the proof."""
    return latest(search, steps) - search.context.clock()


def lacking_seconds(search: Search, steps: Sequence[Step]) -> float:
    """Return by how much the time budget is too short for a trial of `steps`."""
    return max(0.0, PATIENCE * trial_seconds(search, steps) - time_left(search, steps))


def patience(search: Search) -> float:
    """Seconds for loading what was compiled and for its first calls, three at most."""
    return LEAST_SECONDS + PATIENCE * (search.spent[0].seconds + 3 * compare.turn_seconds(search.baseline))


def ranking_seconds(search: Search, technique: Technique) -> float:
    """Until modules are ranked by their parts in the model's error; 0 where they are ranked otherwise."""
    if not technique.errors_add:
        return 0.0
    return search.spent[0].seconds + parts_seconds(compare.turn_seconds(search.baseline))


def no_time(search: Search, steps: Sequence[Step], *, before: float = 0.0) -> str | None:
    """Why the time that is left, less what is done `before`, is not enough for a trial of these steps, or None."""
    expected, left = trial_seconds(search, steps), time_left(search, steps) - before
    if expected <= left:
        return None
    return f"it would need about {expected:.0f} s, and {max(left, 0):.0f} s were left for trials"


def runners(steps: Sequence[Step]) -> frozenset[str]:
    """Return the compilers and engines that run the model in place of eager PyTorch, by name."""
    return frozenset(step.name for step in steps if "eager" in from_step(step).removed)


def _converting(steps: Sequence[Step]) -> bool:
    """Check whether a third-party engine runs the exported model."""
    return any({"eager", "exportable"} <= from_step(step).needs for step in steps)


def _conversions(search: Search, steps: Sequence[Step]) -> list[Spent]:
    """Trials that converted the model as these steps do, which take that over."""
    name = conversion_of(steps)
    return [spent for spent in search.spent if spent.conversion and conversion_of(spent.steps) == name]


def _in_common(one: Sequence[Step], other: Sequence[Step]) -> int:
    """Return the similarity of two recipes: the number of common steps minus those of only one."""
    ours, theirs = {str(step) for step in one}, {str(step) for step in other}
    return len(ours & theirs) - len(ours ^ theirs)
