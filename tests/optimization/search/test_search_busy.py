"""Claims of a machine on which others run."""

from __future__ import annotations

import pytest

from search_world import World, fake_world, product, row, step
from torchwright.core.cpu_load import Load


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


def test_rounds_in_which_others_ran_are_made_up_for(world: World):
    # Others take nine tenths of the candidate's time in more rounds than any median can bear.
    world.gain = product(fold=2.0)
    world.later = lambda names, turn: 10.0 if "fold" in names and turn % 3 else 1.0
    world.waited = lambda names, turn: 0.9 if "fold" in names and turn % 3 else 0.0
    found = row(world.search(step("fold")), "fold")
    assert (found.status, found.speedup.busy) == ("kept", False)
    assert found.speedup.value == pytest.approx(2.0)


def test_on_a_busy_machine_the_low_end_is_claimed(world: World):
    world.gain = product(fold=2.0)
    world.later = lambda names, turn: 1.0 + 0.1 * (turn % 5)
    world.waited = lambda names, turn: 0.5
    outcome = world.ship(step("fold"))
    assert outcome.speedup.busy
    assert 1.0 < outcome.speedup.value == outcome.speedup.low < outcome.speedup.high
    assert str(outcome.speedup).endswith("measured on a busy machine")


def test_where_others_want_every_core_the_low_end_is_claimed(world: World):
    """Turns that waited for no core still shared caches and memory with them."""

    def later(names: frozenset[str], turn: int) -> float:
        world.sampled = Load(running=24.0, cores=2)  # they come when the threads have been chosen
        return 1.0 + 0.1 * (turn % 5)

    world.gain, world.later = product(fold=2.0), later
    outcome = world.ship(step("fold"))
    assert outcome.speedup.busy
    assert outcome.speedup.value == outcome.speedup.low
