"""Steps for some components of a model: which are tried, which stand side by side, and what the whole has better."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from search_world import World, fake_world, names, row, rows, step

EACH = {"reader": 0.05, "denoiser": 0.75, "decoder": 0.2}
STEPS = (step("round"), *(step("round", parts=[part]) for part in EACH))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = fake_world(monkeypatch)
    made.parts = dict(EACH)
    return made


def rounding(**gains: float) -> Callable[[frozenset[str], str], float]:
    """What rounding a component makes of its own calls."""

    def gain(names: frozenset[str], part: str) -> float:
        rounded = (
            "round" in names if not any(":" in name for name in names) else f"round:parts={part}" in names
        )
        return gains[part] if rounded else 1.0

    return gain


def test_the_whole_is_tried_first_and_its_parts_are_no_more_trials(world: World):
    world.part_gain = rounding(reader=2.0, denoiser=2.0, decoder=2.0)
    outcome = world.search(*STEPS)
    assert names(outcome) == ["round"]
    assert world.started == [(), (step("round"),)]
    for part in EACH:
        assert "the whole model has it" in row(outcome, f"round:parts={part}").reason


def test_a_component_that_lost_by_the_whole_is_left_out(world: World):
    """Rounded convolutions may be slower: the others are rounded without them."""
    world.part_gain = rounding(reader=2.0, denoiser=2.0, decoder=0.6)
    outcome = world.search(*STEPS)
    assert sorted(names(outcome)) == ["round:parts=denoiser", "round:parts=reader"]
    assert rows(outcome)["round"] == "removed"
    found = row(outcome, "round:parts=decoder")
    assert found.status == "refused"
    assert "decoder gained 0.60x by round and takes" in found.reason


def test_what_is_slower_everywhere_is_tried_once(world: World):
    world.part_gain = rounding(reader=0.6, denoiser=0.5, decoder=0.6)
    outcome = world.search(*STEPS)
    assert names(outcome) == []
    assert world.started == [(), (step("round"),)]
    assert set(rows(outcome).values()) == {"dropped", "refused"}


def test_a_component_that_costs_the_budget_is_left_out(world: World):
    world.part_gain = rounding(reader=2.0, denoiser=2.0, decoder=2.0)
    world.drop = lambda steps: (
        0.5 if any(each.options.get("parts", ["decoder"]) == ["decoder"] for each in steps) else 0.001
    )
    outcome = world.search(*STEPS)
    assert sorted(names(outcome)) == ["round:parts=denoiser", "round:parts=reader"]
    status = rows(outcome)
    assert status["round"] == status["round:parts=decoder"] == "dropped"


def test_what_takes_no_time_is_not_tried_alone(world: World):
    """A component of 1% cannot save 2% of a pass however fast it gets."""
    world.parts = {"reader": 0.01, "denoiser": 0.99}
    world.part_gain = rounding(reader=2.0, denoiser=2.0)
    world.drop = lambda steps: 0.5 if step("round") in steps else 0.0
    outcome = world.search(*STEPS[:3])
    assert names(outcome) == ["round:parts=denoiser"]
    found = row(outcome, "round:parts=reader")
    assert found.status == "refused"
    assert "reader takes 2.0% of a pass, of which it may save 2.0%" in found.reason


def test_another_technique_of_the_same_component_takes_its_place(monkeypatch: pytest.MonkeyPatch):
    """The property that both take away is the whole model's: a component's own is theirs to keep apart."""
    from torchwright.optimization.techniques.int4_weight_only import Int4WeightOnly
    from torchwright.optimization.techniques.int8_weight_only import Int8WeightOnly

    one, other = Int4WeightOnly(parts=("vae",)), Int8WeightOnly(parts=("vae",))
    assert one.replaces(other)
    assert one.replaces(Int8WeightOnly())
    assert Int8WeightOnly().replaces(one)
    assert not one.replaces(Int8WeightOnly(parts=("transformer",)))
    assert not one.replaces(Int4WeightOnly(parts=("transformer",)))
    assert not Int4WeightOnly().replaces(Int8WeightOnly())  # properties say that, and who gives way
