"""Searches recorded in worlds of a kind, and another of that kind searched with and without them.

The search is the real one, its clock and its models are not: no figure here is one of a machine.
"""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from benchmarks.optimize.recorded import reached, record, wait
from factories import make_features
from search_world import World, fake_world, product, step
from torchwright.core.records import Budget, Recipe, Step
from torchwright.optimization.search.experience import SearchRecord
from torchwright.optimization.search.state import Outcome

VARIANTS: tuple[Step, ...] = (
    step("fold"),
    *(step("half", kind=kind) for kind in "bc"),
    *(step("fuse", level=level) for level in (2, 3)),
    step("weave"),
    step("quantize"),
    step("tune"),
    *(step("library", kind=kind) for kind in ("f32", "bf16", "int8")),
    *(step("pool", size=size) for size in (2, 4)),
    step("settle"),
)
SECONDS = {"fuse": 15.0, "weave": 20.0, "quantize": 12.0, "library": 8.0, "tune": 6.0}


class Family:
    """Models on which each step is worth nearly the same."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        gains = [0.5, 0.8, 0.95, 1.0, 1.0, 1.1, 1.3, 1.8, 3.0]
        self.factors = {str(each): self.chance.choice(gains) for each in VARIANTS}

    def search(self, world: World, *records: SearchRecord) -> Recipe:
        """One of its models."""
        factors = {
            name: factor * self.chance.lognormvariate(0, 0.05) for name, factor in self.factors.items()
        }
        world.gain = product(**factors)
        world.cost = {name: seconds * self.chance.uniform(0.7, 1.4) for name, seconds in SECONDS.items()}
        world.budget = Budget(time_seconds=2000.0)
        return recipe_of(world, world.search(*VARIANTS, records=records))


def recipe_of(world: World, outcome: Outcome) -> Recipe:
    return replace(world.recipe(outcome), features=make_features())


def with_and_without(monkeypatch: pytest.MonkeyPatch, seed: int, models: int) -> tuple[Recipe, Recipe]:
    """One more model of a family, searched without the searches of its others and with them."""
    world, family = fake_world(monkeypatch), Family(seed)
    records = [record(family.search(world), str(model), "abc") for model in range(models)]
    state = family.chance.getstate()
    without = family.search(world)
    family.chance.setstate(state)
    return without, family.search(world, *records)


def ratio(without: Recipe, having: Recipe) -> float:
    """Of the times to 95% of the gain."""
    return wait(having, 0.95)[0] / wait(without, 0.95)[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4, 12])
def test_experience_finds_as_much_and_sooner(monkeypatch: pytest.MonkeyPatch, seed: int):
    without, having = with_and_without(monkeypatch, seed, models=3)
    assert reached(having) >= 0.95 * reached(without)
    assert ratio(without, having) < 0.75


@pytest.mark.slow
def test_in_twenty_families_the_time_to_the_gain_falls_by_a_third(monkeypatch: pytest.MonkeyPatch):
    pairs = [with_and_without(monkeypatch, seed, models=4) for seed in range(20)]
    assert min(reached(having) / reached(without) for without, having in pairs) > 0.95
    ratios = [ratio(*pair) for pair in pairs]
    print(sorted(ratios))
    assert statistics.median(ratios) <= 0.67


# --------------------------------------------------------------------------------------- one search as an entry


def entry(world: World, *tried: Step | tuple[Step, str]) -> SearchRecord:
    return record(recipe_of(world, world.search(*tried)), "model", "abc")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


def test_an_entry_says_what_each_step_was_worth(world: World):
    world.gain, world.cost = product(half=2.0, fuse=1.5, fold=0.8), {"fuse": 9.0}
    found = entry(world, step("fold"), step("half"), step("fuse"))
    assert {name: trial.gain for name, trial in found.trials.items()} == {
        "fold": 0.8, "half": 2.0, "fuse": 1.5
    }  # fmt: skip
    assert found.trials["fuse"].cost > 4 * found.trials["half"].cost > 0


def test_a_variant_is_worth_what_the_one_brought_whose_place_it_took(world: World):
    world.gain = product(**{"half": 1.5, "half:kind=c": 1.2})
    found = entry(world, step("half"), step("half", kind="c"))
    assert found.trials["half:kind=c"].gain == pytest.approx(1.8)
    assert found.trials["half"].gain == 1.0


def test_a_library_is_held_against_the_original_and_what_beat_it(world: World):
    world.gain = product(library=2.0, half=3.0)
    found = entry(world, step("library"), step("half"))
    assert found.trials["library"].gain == 2.0
    world.gain = product(library=4.0, half=1.5)
    found = entry(world, step("library"), step("half"))
    assert found.trials["library"].gain == 4.0
    assert found.trials["half"].gain == pytest.approx(1.5 / 4, abs=1e-3)


def test_a_step_that_left_layers_alone_counts_under_its_own_name(world: World):
    world.gain, world.ranking = (
        product(fuse=2.0, quantize=2.0),
        [(f"layer{n}", 1.0 - n / 20) for n in range(20)],
    )
    world.drop = lambda steps: next(
        (0.0 if each.options else 0.03 for each in steps if each.name == "quantize"), 0.0
    )
    found = entry(world, step("fuse"), step("quantize"))
    assert found.trials["quantize"].gain == pytest.approx(2.0)
    world.gain = product(fuse=2.0, quantize=0.9)
    found = entry(world, step("fuse"), step("quantize"))
    assert found.trials["quantize"].gain == pytest.approx(0.9)
    assert found.trials["quantize"].cost > found.trials["fuse"].cost  # of two trials, one as it was asked for


def test_a_search_says_nothing_of_what_it_has_left(world: World):
    world.budget, world.cost = Budget(time_seconds=20.0), {"fuse": 60.0}
    assert entry(world, step("half"), step("fuse")).trials.keys() == {"half"}
    with pytest.raises(ValueError, match="model: nothing was tried"):
        entry(world, (step("half"), "it cannot run"))


def test_a_recipe_that_did_not_hold_at_the_end_says_nothing_of_its_steps(world: World):
    world.gain = product(half=2.0, fold=0.5)
    recipe = recipe_of(world, world.search(step("half"), step("fold")))
    removed = [replace(rung, kept=False, status="removed") if rung.kept else rung for rung in recipe.rungs]
    found = record(replace(recipe, steps=(), rungs=tuple(removed)), "model", "abc")
    assert found.trials.keys() == {"fold"}


def test_a_search_that_was_continued_is_no_entry(world: World):
    world.budget = Budget(time_seconds=200.0)
    first = world.search(step("half"))
    continued = recipe_of(world, world.resume(first, step("half")))
    with pytest.raises(ValueError, match="do not say when they ended"):
        record(continued, "model", "abc")


def test_what_noise_left_open_is_not_counted_against_a_step(world: World):
    world.gain = product(half=2.0, fold=0.97)
    world.later = lambda names, turn: 0.9 + 0.2 * (turn % 2) if "fold" in names else 1.0
    found = entry(world, step("half"), step("fold"))
    assert (found.trials["fold"].gain or 0) > 1.0


def test_the_gain_is_waited_for_from_the_beginning(world: World):
    world.gain, world.cost = product(half=2.0, fuse=1.5, fold=1.02), {"fuse": 9.0}
    recipe = recipe_of(world, world.search(step("fold"), step("half"), step("fuse")))
    seconds, trials = wait(recipe, 0.95)
    kept = [rung for rung in recipe.rungs if str(rung.step) == "fuse"]
    assert seconds == kept[0].ended_seconds
    assert trials == [str(rung.step) for rung in recipe.rungs].index("fuse") + 1
