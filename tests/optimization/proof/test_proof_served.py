"""Steps that change how an artifact is served: tried on the finished artifact, with a row in the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from factories import make_recipe
from search_world import World, fake_world, step
from torchwright.core.cpu_load import Load
from torchwright.core.records import Budget, Step, StepResult
from torchwright.optimization.proof.served import try_served
from torchwright.optimization.search import resume
from torchwright.report import view
from torchwright.workloads.language import LanguageWorkload


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


def assist(*gains: str) -> Step:
    return step("assist", gains=list(gains))


def served(
    world: World, folder: Path, *steps: Step, has: str = "linear", load: int = 0
) -> tuple[tuple[Step, ...], StepResult]:
    """What is kept of the steps, and the row of the last one; `load` processes of others run by then."""
    world.search(served=steps)
    world.sampled = Load(running=load, cores=2)
    kept = try_served(world.searching, LanguageWorkload(), folder, frozenset({has}))
    return kept, world.searching.rungs[-1]


def test_a_step_that_gains_is_kept_with_its_files(world: World, tmp_path: Path) -> None:
    kept, row = served(world, tmp_path, assist("1.0", "1.3"))
    assert kept == (assist("1.0", "1.3"),)
    assert (row.kept, row.status) == (True, "kept")
    assert row.speedup is not None
    assert row.speedup.value == 1.3
    assert row.reason.startswith(
        "served, over nothing: 1.00x [0.90, 1.10] at 0, 1.30x [1.17, 1.43] at 1; much"
    )
    assert (tmp_path / "assist" / "inner" / "file").is_file()


@pytest.mark.parametrize(
    ("gains", "status", "words"),
    [
        (("1.0", "1.05"), "dropped", "1.05x"),
        (("0.8", "1.3"), "dropped", "0.80x"),
        (("fails",), "failed", "it was not measured: it has other tokens"),
    ],
)
def test_a_step_without_a_gain_leaves_nothing(
    gains: tuple[str, ...], status: str, words: str, world: World, tmp_path: Path
) -> None:
    kept, row = served(world, tmp_path, assist(*gains))
    assert (kept, row.kept, row.status) == ((), False, status)
    assert words in row.reason
    assert not list(tmp_path.iterdir())


def test_on_a_busy_machine_the_low_end_counts(world: World, tmp_path: Path) -> None:
    _, row = served(world, tmp_path, assist("1.3"), load=8)
    assert row.speedup is not None
    assert (row.speedup.value, row.speedup.busy) == (pytest.approx(1.17), True)


def test_what_cannot_serve_is_refused(world: World, tmp_path: Path) -> None:
    _, row = served(world, tmp_path, assist("1.3"), has="floating")
    assert row.reason == "the recipe that was found has no: linear"
    _, row = served(world, tmp_path, assist("1.3"), assist("1.4"))
    assert (row.status, row.reason) == ("refused", "assist:gains=1.3 is kept, and a recipe has one of them")
    world.budget = Budget(objective="memory")
    _, row = served(world, tmp_path, assist("1.3"))
    assert "it takes memory" in row.reason


def test_a_search_that_goes_on_tries_it_again(world: World, tmp_path: Path) -> None:
    _, row = served(world, tmp_path, assist("1.3"))
    recipe = make_recipe(steps=(step("half"), row.step), rungs=(row,))
    found = resume._as_searched(recipe)
    assert (found.steps, found.rungs) == ((step("half"),), ())


def test_the_waterfall_ends_with_the_recipe(world: World, tmp_path: Path) -> None:
    """A gain in serving is no time of the workload's calls."""
    _, row = served(world, tmp_path, assist("1.3"))
    recipe = make_recipe(rungs=(row, row))
    first, second = view.stages(recipe)
    assert first.start == second.start == recipe.baseline.seconds
