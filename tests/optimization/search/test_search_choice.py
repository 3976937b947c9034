"""What the search does with the time it has: estimates, what is left untried, and random worlds."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from search_world import World, fake_world, lossy, names, product, row, rows, step
from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Budget, Step
from torchwright.optimization.search.state import Outcome


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


# -------------------------------------------------------------------------------------------------------- estimates


def test_what_one_compiler_took_says_nothing_about_another(world: World):
    """Half a minute of `fuse` once refused `weave`, which takes two seconds."""
    world.gain = product(fuse=0.9, weave=2.0)
    world.cost = {"fuse": 60.0, "weave": 2.0}
    assert names(world.search(step("fuse"), step("weave"))) == ["weave"]


def test_what_needs_a_step_that_was_not_tried_is_not_tried_either(world: World):
    world.export_seconds = 20.0
    outcome = world.search(step("half"), step("fuse"), step("quantize"))
    assert rows(outcome) == {"half": "dropped", "fuse": "untried", "quantize": "untried"}
    assert row(outcome, "quantize").reason == "the model has no: compiled, which fuse would give"


def test_a_measured_row_stays_where_a_second_trial_does_not_fit_the_time(world: World):
    world.gain = lambda names: {frozenset({"half"}): 0.8, frozenset({"fuse"}): 2.0}.get(names, 1.0)
    world.cost = {"fuse": 40.0}
    outcome = world.search(step("half"), step("fuse"))
    assert rows(outcome) == {"half": "dropped", "fuse": "kept"}
    assert row(outcome, "half").speedup.value == pytest.approx(0.8)
    assert "0.80x [0.80, 0.80]: slower; again: it would need about" in row(outcome, "half").reason


def test_an_interval_that_says_nothing_is_measured_again(world: World):
    world.gain = product(half=1.5)
    world.later = lambda names, turn: (4.0 if turn % 2 else 0.2) if "half" in names and turn <= 7 else 1.0
    assert names(world.search(step("half"))) == ["half"]


@pytest.mark.plain("60.0")
@pytest.mark.parametrize("budget", [60.0, 100.0])
def test_the_search_leaves_the_time_to_write_and_prove_what_it_found(world: World, budget: float):
    world.gain, world.cost = product(fuse=2.0), {"fuse": 8.0}
    world.budget = Budget(time_seconds=budget)
    outcome = world.search(step("fuse"), *(step("pool", size=size) for size in range(2, 30)))
    again, processes, other_rows = 9.0, 2.0, 6.0
    assert names(outcome) == ["fuse"]
    assert outcome.seconds <= budget - (again + processes + other_rows)


def test_an_open_step_that_is_asked_for_is_chosen_by_measuring(world: World):
    """All variants stand for it: the boldest loses too much, the next is kept, no other takes its place by noise."""
    variants = [step("skip", calls=calls) for calls in (15, 9, 4)]
    world.gain = lambda names: max(
        (gain for gain, each in ((4.0, 15), (1.9, 9), (1.2, 4)) if f"skip:calls={each}" in names), default=1.0
    )
    world.drop = lambda steps: 0.5 if any(each.options.get("calls") == 15 for each in steps) else 0.0
    outcome = world.search(step("half"), *variants, wanted=(step("skip"),), only=True)
    assert outcome.best.steps == (variants[1],)
    status = [(rung.step, rung.status) for rung in outcome.rungs]
    assert status == [(variants[0], "dropped"), (variants[1], "kept"), (variants[2], "dropped")]


def test_an_open_step_without_variants_is_refused_with_the_reason(world: World):
    with pytest.raises(RefusedTechnique, match="nothing is alike"):
        world.search((step("skip"), "nothing is alike here"), wanted=(step("skip"),))


def test_only_what_is_named_is_asked(world: World):
    world.search(step("half"), wanted=(step("fuse"),), only=True)
    assert world.asked == [("fuse",)]


# ---------------------------------------------------------------------------------------------------- random worlds


@dataclass
class Random:
    """Gains, costs and noise by chance, of three techniques with variants and two without."""

    seed: int
    factors: dict[str, float] = field(init=False)
    variants: tuple[Step, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        halves = [step("half", kind=kind) for kind in "acd"]
        pools = [step("pool", size=size) for size in (32, 16, 8, 4, 2)]
        engines = [step("fuse", level=level) for level in (2, 3)]
        self.variants = (step("fold"), *halves, *engines, step("quantize"), *pools)
        gains = [1.08, 1.2, 1.5, 2.2, 4.0]
        self.factors = {
            str(each): self.chance.choice([0.9 if each.name == "fuse" else 0.6, 1.0, *gains])
            for each in self.variants
        }

    def enter(self, world: World, share: float) -> Outcome:
        """Search with a budget of so many times what trying everything once takes."""
        noise, spikes = self.chance.choice([0.0, 0.02, 0.08]), self.chance.choice([0.0, 0.05])
        world.gain = lambda names: product(**self.factors)(names)
        world.later = lambda names, turn: (
            self.chance.lognormvariate(0, noise) * (3.0 if self.chance.random() < spikes else 1.0)
        )
        world.seconds = self.chance.choice([0.001, 0.02, 0.3])
        world.cost = {str(each): self.chance.uniform(0, 4) for each in self.variants}
        for name in ("fuse:level=2", "fuse:level=3"):
            world.cost[name] = self.chance.uniform(2, 30)
        world.export_seconds = self.chance.uniform(0.1, 3)
        everything = sum(10 + 60 * world.seconds + world.cost[str(each)] for each in self.variants)
        compiled = 8 * max(world.cost["fuse:level=2"], world.cost["fuse:level=3"])
        world.budget = Budget(time_seconds=share * (everything + compiled))
        return world.search(*self.variants)

    def best(self) -> float:
        """The gain of the best variant of everything; `quantize` is only to be had compiled."""

        def most(name: str) -> float:
            return max(value for text, value in self.factors.items() if text.partition(":")[0] == name)

        compiled = max(1.0, most("fuse"), most("fuse") * most("quantize"))
        return compiled * max(1.0, most("fold")) * max(1.0, most("half")) * max(1.0, most("pool"))

    def gain(self, steps: tuple[Step, ...]) -> float:
        return product(**self.factors)(frozenset(map(str, steps)))


@pytest.mark.slow
def test_the_best_of_all_variants_is_found_in_nineteen_of_twenty_random_worlds(
    monkeypatch: pytest.MonkeyPatch,
):
    shares = []
    for seed in range(20):
        chance = Random(seed)
        outcome = chance.enter(fake_world(monkeypatch), random.Random(seed).uniform(1.0, 3.0))
        shares.append(chance.gain(outcome.best.steps) / chance.best())
    assert sum(share > 0.9 for share in shares) >= 19, shares


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 20))]
)
def test_every_variant_has_a_row_and_what_the_budget_left_untried_is_listed(world: World, seed: int):
    chance = Random(seed)
    outcome = chance.enter(world, random.Random(seed).uniform(0.1, 0.8))
    found = rows(outcome)
    assert set(found) == set(map(str, chance.variants))
    started = {str(each) for steps in world.started for each in steps}
    assert {found[name] for name in set(found) - started} <= {"untried", "refused"}
    assert outcome.seconds <= world.budget.time_seconds


def test_what_is_calibrated_by_one_example_holds_on_other_values(world: World):
    """A correction that fits the example's values alone is not kept, and what needs none is not asked."""
    world.gain = product(library=2.0, half=1.5)
    world.varied_drop = lambda steps: 0.05 if any("int8" in str(step) for step in steps) else 1.0
    outcome = world.search(step("library", kind="int8"), step("half"))
    assert names(outcome) == ["half"]
    (reason,) = [row.reason for row in outcome.rungs if row.step.name == "library"]
    assert "5.00%" in reason
    assert "on inputs of another size than calibrated it" in reason
    world.varied_drop = lossy(library=1.4 * world.budget.max_drop)
    assert names(world.search(step("library", kind="int8"))) == ["library:kind=int8"]
    world.varied_drop = None
    assert names(world.search(step("library", kind="int8"))) == ["library:kind=int8"]


# ------------------------------------------------------------------------------------------------ two steps in a trial


def short(world: World) -> tuple[Step, ...]:
    """A queue for which there is no time, and kernels that promise that `quantize` saves most of a pass."""
    world.kernels = {"float32": 0.008, "int8": 0.001}
    world.export_seconds, world.budget = 1.0, Budget(time_seconds=24.0)
    return (step("fuse"), step("quantize"), *(step("pool", size=size) for size in range(2, 16)))


def test_where_time_is_short_what_was_timed_to_gain_is_tried_with_its_compiler(world: World):
    """MiniLM's 8 bits had no time left behind a compiler that gained nothing alone."""
    world.gain = product(fuse=0.9, quantize=2.5)
    outcome = world.search(*short(world))
    assert world.started[1] == (step("quantize"), step("fuse"))
    assert names(outcome) == ["quantize", "fuse"]
    assert row(outcome, "fuse").reason == "tried with quantize"
    assert row(outcome, "quantize").total_speedup.value == pytest.approx(0.9 * 2.5)


def test_with_time_for_all_each_step_is_measured_alone(world: World):
    world.gain = product(fuse=1.5, quantize=2.5)
    steps = short(world)
    world.budget = Budget(time_seconds=10_000.0)
    world.search(*steps)
    assert world.started[1] == (step("fuse"),)


@pytest.mark.parametrize("fault", ["slow", "lossy"])
def test_a_compiler_is_tried_alone_where_both_were_not_kept(world: World, fault: str):
    world.gain = product(fuse=1.5, quantize=0.2 if fault == "slow" else 2.0)
    world.drop = lossy(quantize=0.5) if fault == "lossy" else world.drop
    outcome = world.search(*short(world))
    assert names(outcome) == ["fuse"]
    assert row(outcome, "quantize").status == "dropped"
    assert row(outcome, "fuse").speedup.value == pytest.approx(1.5)


def test_the_compiler_is_alone_next_where_another_step_waits_for_it_too(world: World):
    world.gain = product(fuse=1.5, quantize=0.2)
    steps = short(world)
    world.search(*steps, step("quantize", skip=("layer.0",)))
    both, alone = world.started[1:3]
    assert len(both) == 2
    assert alone == (step("fuse"),)


def test_what_kernels_do_not_promise_waits_for_its_compiler(world: World):
    world.gain = product(fuse=1.5, quantize=2.5)
    steps = short(world)
    world.kernels = {"float32": 0.008, "int8": 0.007}
    world.search(*steps)
    assert world.started[1] == (step("fuse"),)
