"""A candidate whose calls take many times as long as the original's: its metric is not measured first."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

from typing import Any

import pytest

from search_world import Process, World, fake_world, product, row, rows, step
from torchwright.core.records import Budget


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """Recipes whose metric was measured."""
    found: list[frozenset[str]] = []
    real = Process.compare

    def compare(self: Process, **arguments: Any) -> Any:
        found.append(self.names)
        return real(self, **arguments)

    monkeypatch.setattr(Process, "compare", compare)
    return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


def test_what_is_far_slower_is_dropped_by_its_time(world: World, judged: list[frozenset[str]]):
    world.gain = product(half=0.05, fuse=1.5)
    outcome = world.search(step("half"), step("fuse"))
    assert rows(outcome) == {"half": "dropped", "fuse": "kept"}
    dropped = row(outcome, "half")
    assert dropped.speedup.value == pytest.approx(0.05)
    assert dropped.quality is None
    assert dropped.reason.endswith("slower; its loss was not measured")
    assert not any("half" in names for names in judged)


def test_what_is_somewhat_slower_is_judged_by_both(world: World, judged: list[frozenset[str]]):
    world.gain = product(half=0.6)
    outcome = world.search(step("half"))
    assert row(outcome, "half").quality is not None
    assert any("half" in names for names in judged)


def test_a_slow_first_call_alone_decides_nothing(world: World, judged: list[frozenset[str]]):
    world.gain = product(half=2.0)
    world.later = lambda names, turn: 20.0 if "half" in names and turn == 0 else 1.0
    outcome = world.search(step("half"))
    assert rows(outcome) == {"half": "kept"}
    assert row(outcome, "half").quality is not None


def test_what_is_asked_for_or_is_to_save_memory_is_measured(world: World, judged: list[frozenset[str]]):
    world.gain = product(half=0.05)
    outcome = world.search(step("half"), wanted=(step("half"),))
    assert row(outcome, "half").quality is not None
    judged.clear()
    world.budget = Budget(max_drop=0.01, time_seconds=100.0, objective="memory")
    world.search(step("half"))
    assert any("half" in names for names in judged)
