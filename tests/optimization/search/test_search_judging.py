"""A verdict that the sample leaves open is given by more of the data, where there are some and the time for them."""

from __future__ import annotations

import pytest

from search_world import World, fake_world, lossy, names, product, row, rows, step
from torchwright.core.records import Budget

OPEN = (0.002, 0.0108)
"""One of 512 rows has changed its class."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = fake_world(monkeypatch)
    made.gain = product(half=2.0, fuse=2.0)
    return made


def test_more_of_the_data_decide(world: World) -> None:
    world.drop = lambda steps: OPEN if steps else 0.0
    world.further_drop = lambda steps: (0.002, 0.0055)
    outcome = world.search(step("half"), step("fuse"))
    assert names(outcome) == ["half", "fuse"]
    assert outcome.best.quality is not None
    assert outcome.best.quality.drop_high == 0.0055
    assert world.observed_further == [False], "the original is asked once for all candidates"


@pytest.mark.parametrize(
    ("first", "further"),
    [
        pytest.param(OPEN, (0.006, 0.012), id="which say no"),
        pytest.param(OPEN, None, id="there are none"),
        pytest.param((0.009, 0.0125), (0.0, 0.0), id="half the interval would exceed it, too"),
        pytest.param((0.011, 0.0125), (0.0, 0.0), id="over the budget as it is"),
    ],
)
def test_what_is_not_proven_is_dropped(
    world: World, first: tuple[float, float], further: tuple[float, float] | None
) -> None:
    world.drop = lambda steps: first if steps else 0.0
    world.further_drop = None if further is None else lambda steps: further
    outcome = world.search(step("half"))
    assert rows(outcome) == {"half": "dropped"}
    shown = further if world.observed_further and further else first
    assert f"up to {shown[1]:.2%}" in row(outcome, "half").reason


def test_time_for_other_steps_is_not_spent_on_it(world: World) -> None:
    world.drop = lambda steps: OPEN if steps else 0.0
    world.further_drop = lambda steps: (0.002, 0.0055)
    world.budget = Budget(max_drop=0.01, time_seconds=20.0)
    world.observing = 3.0  # more of the data would take 24 s
    assert rows(world.search(step("half"))) == {"half": "dropped"}
    assert world.observed_further == []


def test_held_out_data_decide_likewise(world: World) -> None:
    world.drop = lossy(half=0.006)
    world.unseen_drop = lambda steps: OPEN if steps else (0.0, 0.0)
    world.further_drop = lambda steps: (0.003, 0.0072)
    outcome = world.search(step("half"))
    assert names(outcome) == ["half"]
    assert world.observed_further == [True]
