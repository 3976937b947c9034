"""Continuing a search: what is kept of the earlier one, what is tried, and whose artifact is taken."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchwright as tw
from factories import make_interval
from in_process import trials_in_process
from search_world import World, fake_world, lossy, names, product, row, rows, step
from small_artifacts import INPUT, copied, edit, made, mlp
from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.core.records import Budget, Identity, StepResult
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.engines.identity import identity


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


# ------------------------------------------------------------------------------------------------- rows and recipe


def test_what_was_measured_is_not_tried_again_and_what_was_left_is(world: World):
    world.gain = product(fuse=2.0, half=0.5, quantize=1.5, pool=1.2)
    world.cost = {"fuse": 40.0}
    tried = [step(name) for name in ("fuse", "half", "quantize", "pool", "tune")]
    first = world.search(*tried[:4], (step("trim"), "no layer"))
    assert rows(first)["quantize"] == rows(first)["pool"] == "untried"
    world.budget = Budget(time_seconds=400.0)
    outcome = world.resume(first, *tried, (step("trim"), "no layer"))
    assert rows(outcome)["quantize"] == rows(outcome)["pool"] == "kept"
    assert world.started[:2] == [(), (step("fuse"),)]
    assert not any(step("half") in steps for steps in world.started)
    earlier = {str(rung.step): rung.earlier for rung in outcome.rungs}
    assert earlier == {
        "trim": False, "fuse": True, "half": True, "quantize": False, "pool": False, "tune": False
    }  # fmt: skip
    for name in ("fuse", "half"):
        assert replace(row(outcome, name), earlier=False) == row(first, name)
    assert outcome.speedup.value == pytest.approx(3.6)
    assert any("continues the search that ended at" in event.text for event in world.events)


def test_rows_stay_earlier_ones_however_often_a_search_goes_on(world: World):
    world.gain = product(half=2.0, fold=0.5)
    outcome = world.search(step("half"), step("fold"))
    for _ in range(2):
        outcome = world.resume(outcome, step("half"), step("fold"))
        assert world.started == [(), (step("half"),)]
    assert [(str(rung.step), rung.earlier) for rung in outcome.rungs] == [("half", True), ("fold", True)]


def test_a_retreat_that_was_left_untried_is_tried(world: World):
    """A form with layers left alone is no variant that anybody proposes again."""
    milder = step("quantize", skip=["a"])
    world.gain = product(fuse=2.0, quantize=1.5)
    world.drop = lambda steps: 0.05 if step("quantize") in steps else 0.0
    first = world.search(step("fuse"), step("quantize"))
    assert rows(first) == {"fuse": "kept", "quantize": "dropped"}
    left = StepResult(step=milder, kept=False, status="untried", reason="stopped after 9 s")
    outcome = world.resume(replace(first, rungs=(*first.rungs, left)), step("fuse"), step("quantize"))
    assert names(outcome) == ["quantize:skip=a", "fuse"]
    assert row(outcome, "quantize").earlier


def test_a_dropped_step_gets_its_second_chance_from_the_earlier_row(world: World):
    world.gain = lambda names: {
        frozenset({"fuse"}): 2.0,
        frozenset({"fuse", "half"}): 4.0,
        frozenset({"half"}): 0.8,
    }.get(names, 1.0)
    first = world.search(step("half"))
    outcome = world.resume(first, step("half"), step("fuse"))
    assert names(outcome) == ["half", "fuse"]
    assert (step("half"),) not in world.started


def test_what_lacked_a_compiler_is_asked_again_when_one_is_to_be_tried(world: World):
    """It may have been forbidden before."""
    world.gain = product(fuse=2.0, quantize=1.5)
    tried = [step(name) for name in ("fuse", "quantize", "repack")]
    first = world.search(*tried, without=frozenset({"fuse"}))
    assert rows(first) == {"quantize": "refused", "repack": "refused"}
    outcome = world.resume(first, *tried)
    assert rows(outcome) == {"fuse": "kept", "quantize": "kept", "repack": "refused"}
    assert row(outcome, "repack").earlier


def test_a_recipe_that_does_not_hold_here_is_searched_anew(world: World):
    world.gain = product(half=2.0, fold=1.5)
    first = world.search(step("half"), step("fold"))
    world.gain = product(half=0.5, fold=1.5)
    world.later = lambda names, turn: 2.5 if {"half", "fold"} <= names else 1.0
    outcome = world.resume(first, step("half"), step("fold"))
    assert rows(outcome) == {"half": "dropped", "fold": "kept"}
    assert not any(rung.earlier for rung in outcome.rungs)
    assert "all of it was searched anew" in outcome.notes[0]
    assert world.alive == [(), outcome.best.steps]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda world: setattr(world, "drop", lossy(half=0.5)), "its loss is up to 50.00%"),
        (lambda world: world.fails.update(half=TorchwrightError("no", found="no kernel")), "no kernel"),
    ],
)
def test_a_recipe_that_cannot_be_had_any_more_is_named_with_the_reason(
    world: World, change: Callable[[World], None], words: str
):
    world.gain = product(half=2.0)
    first = world.search(step("half"))
    change(world)
    outcome = world.resume(first, step("half"))
    assert words in outcome.notes[0]
    assert outcome.best.steps == ()


def test_noise_alone_does_not_take_the_earlier_recipe_away(world: World):
    world.gain = product(half=2.0)
    first = world.search(step("half"))
    world.later = lambda names, turn: (0.4, 4.0)[turn % 2] if "half" in names else 1.0
    assert names(world.resume(first, step("half"))) == ["half"]


def test_the_earlier_recipe_is_measured_however_short_the_time(world: World):
    world.gain, world.cost = product(fuse=2.0), {"fuse": 20.0}
    first = world.search(step("fuse"))
    world.budget = Budget(time_seconds=5.0)
    assert names(world.resume(first, step("fuse"))) == ["fuse"]


def test_where_the_earlier_recipe_hangs_nothing_takes_its_place(world: World):
    world.gain = product(fuse=2.0)
    first = world.search(step("fuse"))
    world.cost = {"fuse": 1e9}
    with pytest.raises(TorchwrightError, match=r"recipe of the earlier search was not measured.*anew"):
        world.resume(first, step("fuse"))
    assert world.alive == []


def test_steps_that_were_removed_since_no_form_held_are_tried_again(world: World):
    world.gain = product(fuse=2.0)
    world.later = lambda names, turn: 3.0 if "fuse" in names and len(world.started) == 3 else 1.0
    first = world.ship(step("fuse"))
    assert rows(first) == {"fuse": "removed"}
    assert names(world.resume(first, step("fuse"))) == ["fuse"]


def test_what_is_asked_for_by_name_is_tried_again_where_that_can_change_the_verdict(world: World):
    world.gain = product(half=2.0, fold=1.03, pool=0.5)
    world.later = lambda names, turn: 1.1 if "fold" in names and turn % 3 == 0 else 1.0
    tried = [step(name) for name in ("half", "fold", "pool")]
    first = world.search(*tried)
    assert rows(first) == {"half": "kept", "fold": "dropped", "pool": "dropped"}
    outcome = world.resume(first, *tried, wanted=tuple(tried))
    assert rows(outcome) == {"half": "kept", "fold": "kept", "pool": "dropped"}
    assert world.started == [(), (step("half"),), (step("fold"), step("half"))]


# ------------------------------------------------------------------------------------------------- the same original


def test_with_other_weights_what_lost_too_much_is_tried_again(world: World):
    world.gain = product(half=2.0, fold=0.5)
    world.drop = lossy(half=0.5)
    first = world.search(step("half"), step("fold"))
    world.drop = lossy()
    assert rows(world.resume(first, step("half"), step("fold")))["half"] == "dropped"
    continued = world.recipe(first)
    world.original = Identity(structure="layers", weights="other values")
    outcome = world.search(step("half"), step("fold"), earlier=continued)
    assert rows(outcome) == {"half": "kept", "fold": "dropped"}
    assert [str(rung.step) for rung in outcome.rungs if rung.earlier] == ["fold"]
    assert "weights or metric have changed" in outcome.notes[0]


@pytest.mark.parametrize("original", [None, Identity(structure="other layers", weights="values")])
def test_another_model_of_the_same_name_is_refused(world: World, original: Identity | None):
    continued = replace(world.recipe(world.search(step("half"))), original=original)
    with pytest.raises(ArtifactError, match="other layers"):
        world.search(step("half"), earlier=continued)
    assert world.alive == [()]


def test_the_identity_of_a_model_is_that_of_its_layers_and_values():
    same, trained, wider = mlp(), mlp(), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    trained[0].bias.data += 1e-3
    assert identity(mlp()) == identity(same)
    assert identity(trained).structure == identity(same).structure
    assert identity(trained).weights != identity(same).weights
    assert identity(wider).structure != identity(same).structure


def test_weights_that_are_views_empty_sparse_or_complex_have_one():
    module = nn.Module()
    module.register_buffer("across", mlp()[0].weight.data.t())
    module.register_buffer("empty", INPUT[:0])
    module.register_buffer("one", INPUT.sum())
    module.register_buffer("sparse", INPUT.to_sparse())
    module.register_buffer("turned", INPUT.to(torch.complex64).conj())
    assert identity(module) == identity(module)


# ------------------------------------------------------------------------------------------------------ whole worlds


@pytest.mark.plain("5", "2", "3")
@pytest.mark.parametrize("seed", range(8))
def test_a_search_in_pieces_ends_with_everything_tried_once(world: World, seed: int):
    chance = random.Random(seed)
    tried = [*(step("half", kind=kind) for kind in "acd"), *(step("pool", size=size) for size in (8, 4, 2))]
    tried += [step("fold"), step("quantize"), *(step("fuse", level=level) for level in (2, 3))]
    gains = {str(each): chance.choice([0.6, 0.9, 1.2, 1.5, 2.2]) for each in tried}
    world.gain = lambda names: product(**gains)(names)
    world.cost = {str(each): chance.uniform(0, 10) for each in tried}
    world.budget = Budget(time_seconds=40.0)
    outcome = world.search(*tried)
    for _ in range(12):
        left = [rung.step for rung in outcome.rungs if rung.status == "untried"]
        if not left:
            break
        done = {str(rung.step) for rung in outcome.rungs if rung.status != "untried"}
        before = outcome
        world.budget = Budget(time_seconds=world.budget.time_seconds + outcome.more_seconds)
        outcome = world.resume(outcome, *tried)
        assert done <= {str(rung.step) for rung in outcome.rungs}
        assert gains_of(gains, outcome) >= 0.99 * gains_of(gains, before)
    assert set(rows(outcome)) == set(gains)
    assert "untried" not in rows(outcome).values()


def gains_of(gains: dict[str, float], outcome: Any) -> float:
    return product(**gains)(frozenset(map(str, outcome.best.steps)))


# ----------------------------------------------------------------------------------------------- whose artifact it is


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("resume"), mlp(), ["dtype"])


def resumed(path: Path, **options: Any) -> Any:
    fields: dict[str, Any] = {"techniques": ["dtype", "threads"], "max_drop": 0.05}
    return tw.optimize(mlp(), INPUT, resume=path, time_budget=60, progress=False, **(fields | options))


@pytest.mark.slow
def test_a_saved_artifact_is_continued_and_proved_again(saved: Path, monkeypatch):
    trials_in_process(monkeypatch, 2.0)
    earlier = artifact.open_artifact(saved)[0]
    result = resumed(saved)
    first, second = result.steps
    assert first == replace(earlier.rungs[0], earlier=True)
    assert (second.step.name, second.earlier) == ("threads", False)
    assert result.recipe.runs_as
    assert result.recipe.created >= earlier.created
    assert artifact.open_artifact(saved)[0] == earlier


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_drop": 0.01}, "max_drop: 0.05 then, 0.01 now"),
        ({"objective": "memory"}, "objective: latency then, memory now"),
        ({"task": "classification"}, "task: regression then, classification now"),
        ({"techniques": ["threads"]}, "has what is not to be tried"),
        ({"techniques": None, "without": ["dtype"]}, "Found: dtype."),
    ],
)
def test_another_search_than_the_earlier_one_is_refused(saved: Path, options: dict[str, Any], words: str):
    with pytest.raises(ArtifactError, match="cannot be continued") as caught:
        resumed(saved, **options)
    assert words in str(caught.value)
    assert "start anew" in str(caught.value)


def test_other_calls_and_another_model_are_refused(saved: Path):
    with pytest.raises(ArtifactError, match="shapes: "):
        tw.optimize(mlp(), INPUT[:2], resume=saved, max_drop=0.05)
    with pytest.raises(ArtifactError, match="model: Sequential then, Linear now"):
        tw.optimize(nn.Linear(16, 8), INPUT, resume=saved, max_drop=0.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda recipe: recipe["fingerprint"].update(torch="1.0"), "torch: 1.0 then, "),
        (lambda recipe: recipe["fingerprint"].update(torchwright="0.0.0"), "torchwright: 0.0.0 then, "),
        (lambda recipe: recipe["fingerprint"].update(threads=77), "threads: 77 then, "),
        (lambda recipe: recipe["fingerprint"]["device"].update(isa=["vmx"]), "ISA: vmx then, "),
        (lambda recipe: recipe["fingerprint"]["libraries"].pop("torchao", None), "torchao: none then, "),
        (lambda recipe: recipe["workload"].update({"\x1b[31mred": "\x1b[2J"}), "red:  then, none now"),
        (lambda recipe: recipe["steps"][0].update(name="dtyp"), "did you mean 'dtype'"),
        (lambda recipe: recipe["rungs"][0]["step"]["options"].update(dtype="int1"), "'int1' is not a value"),
        (lambda recipe: recipe["rungs"][0]["step"]["options"].update(keep_float32=3), "'3' is not a value"),
        (lambda recipe: recipe["rungs"][0].update(kept=False), "its rows do not fit its steps"),
        (lambda recipe: recipe.update(steps=[]), "its rows do not fit its steps"),
        (lambda recipe: recipe.update(rungs=1001 * recipe["rungs"]), "1,001 rows"),
        (lambda recipe: recipe.update(rungs=[{"step": "dtype"}]), "rungs.0"),
    ],
)
def test_a_strangers_artifact_is_held_against_every_rule(saved: Path, tmp_path: Path, change, words: str):
    forged = copied(saved, tmp_path)
    edit(forged / artifact.RECIPE, change)
    with pytest.raises(ArtifactError) as caught:
        resumed(forged)
    assert words in str(caught.value)


def test_where_nothing_is_there_the_error_says_how_to_start_anew(tmp_path: Path):
    """As after a search that was killed: it leaves nothing behind."""
    with pytest.raises(ArtifactError, match=r"there is no search to continue in .*nothing.*start anew"):
        resumed(tmp_path / "out")
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is not an artifact"):
        resumed(tmp_path / "file")


@pytest.mark.slow
def test_an_artifact_that_a_killed_run_had_moved_aside_is_continued(saved: Path, tmp_path: Path, monkeypatch):
    trials_in_process(monkeypatch, 2.0)
    aside = tmp_path / ".out.replaced-abcdefgh"
    aside.mkdir()
    shutil.copytree(saved, aside / "out")
    assert resumed(tmp_path / "out", techniques=["dtype"]).steps[0].earlier
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["created"]


def test_an_interval_of_an_earlier_row_counts_as_one_of_this_search(world: World):
    """It decides who is asked again by the drop-one pass."""
    world.gain = product(fuse=2.0)
    first = world.search(step("fuse"))
    kept = replace(row(first, "fuse"), speedup=make_interval(2.0))
    idle = StepResult(step=step("half"), kept=True, status="kept", reason="", speedup=make_interval(1.1))
    both = replace(world.recipe(first), rungs=(idle, kept), steps=(step("half"), step("fuse")))
    assert names(world.search(step("half"), step("fuse"), earlier=both)) == ["fuse"]
