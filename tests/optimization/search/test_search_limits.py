"""The search's limits: time, trials that go wrong, and what the user asked for or forbade."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_world import Process, World, fake_world, lossy, names, product, row, rows, step
from torchwright.core.cpu_load import Load
from torchwright.core.errors import RefusedTechnique, TorchwrightError
from torchwright.core.records import Budget
from torchwright.optimization.search import estimate
from torchwright.optimization.trial.client import Candidate, TrialFailed


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


# -------------------------------------------------------------------------------------------------- the time budget


def test_without_time_steps_are_left_untried_and_the_total_stays_within_the_budget(world: World):
    world.gain = product(fuse=2.0, quantize=1.5, pool=1.5)
    world.cost = {"fuse": 40.0}
    outcome = world.search(step("fuse"), step("quantize"), step("pool"))
    assert rows(outcome) == {"fuse": "kept", "quantize": "untried", "pool": "untried"}
    assert row(outcome, "pool").reason.startswith("it would need about 4")
    assert "were left for trials" in row(outcome, "pool").reason
    assert world.now <= world.budget.time_seconds


@pytest.mark.parametrize(("seconds", "sits_out"), [(30.0, True), (0.1, False)])
def test_an_original_of_long_turns_sits_out_once_something_is_kept(
    world: World, seconds: float, sits_out: bool
):
    """SAM's ViT-B takes 36 s a pass: 1,800 s did for three trials, with the original in each of their turns."""
    world.seconds = seconds
    world.budget = Budget(max_drop=0.01, time_seconds=3000.0 * seconds)
    turns: list[str] = []
    """The last event before each turn of the original."""

    def gain(names: frozenset[str]) -> float:
        if not names and world.events:
            turns.append(f"{world.events[-1].kind} {world.events[-1].text}")
        return product(half=2.0, pool=3.0)(names)

    world.gain = gain
    outcome = world.search(step("half"), step("pool"))
    assert rows(outcome) == {"half": "kept", "pool": "kept"}
    totals = [row(outcome, name).total_speedup for name in ("half", "pool")]
    assert [total.value for total in totals] == pytest.approx([2.0, 6.0])
    assert "trying half" in turns
    assert ("trying pool" not in turns) == sits_out


def test_a_hanging_trial_is_stopped_when_the_time_ends_and_the_best_so_far_is_returned(world: World):
    world.gain = product(half=2.0, fuse=9.0)
    world.cost = {"fuse": 1e9}
    outcome = world.search(step("half"), step("fuse"))
    assert names(outcome) == ["half"]
    assert row(outcome, "fuse").status == "untried"
    assert "when the time for trials ended" in row(outcome, "fuse").reason
    assert world.now <= 1.1 * world.budget.time_seconds


def test_until_something_is_kept_trials_have_the_time_of_what_its_proof_can_do_without(world: World):
    world.gain = product(half=2.0, pool=3.0)
    world.drop = lossy(half=0.5)
    world.cost = {"half": 89.0}
    outcome = world.search(step("half"), step("pool"))
    assert rows(outcome) == {"half": "dropped", "pool": "kept"}


def test_a_trial_leaves_the_time_that_the_proof_of_what_is_kept_takes(world: World):
    """PixArt's 1.94x by autocast and the compiler was lost: a trial of OpenVINO's, which need not be compiled once more
    for its proof, had the time that the compiled package's proof would have taken."""
    world.gain = product(fuse=2.0)
    world.cost = {"fuse": 25.0, "library": 58.0}
    outcome = world.search(step("fuse"), step("library"), wanted=(step("fuse"),))
    assert rows(outcome)["fuse"] == "kept"
    assert row(outcome, "library").status == "untried"
    assert world.now <= world.budget.time_seconds - 25.0


def test_what_was_compiled_is_there_for_another_setting_of_the_process(world: World):
    """EfficientNet's compiler took 50 s of 150, and memory that stays in the process, which changes no code, another 50
    that were not left."""
    world.gain, world.cost = product(fuse=2.0, settle=1.2), {"fuse": 40.0}
    outcome = world.search(step("fuse"), step("settle"))
    assert rows(outcome) == {"fuse": "kept", "settle": "kept"}
    spent = [(each.seconds, each.conversion) for each in world.searching.spent]
    assert spent == [(1.0, 0.0), (41.0, 40.0), (41.0, 40.0)]


def test_a_compiler_is_expected_to_take_its_time_again_for_the_artifact(world: World):
    world.gain, world.cost, world.called_as_is = product(fuse=2.0), {"fuse": 20.0}, True
    world.search(step("fuse"))
    compiled, seconds = (step("fuse"),), estimate.ready_seconds(world.searching, (step("fuse"),))
    assert seconds == pytest.approx(1.0)
    world.searching.budget = replace(world.budget, time_seconds=1000.0)
    least = estimate.least_proof_seconds(world.searching, compiled)
    assert estimate.proof_seconds(world.searching, compiled) >= least + 20.0


def test_what_a_server_imports_once_is_not_expected_of_every_trial(world: World):
    world.import_seconds = 60.0
    world.budget = Budget(max_drop=0.01, time_seconds=200.0)
    world.gain = product(half=2.0, pool=1.5)
    assert rows(world.search(step("half"), step("pool"))) == {"half": "kept", "pool": "kept"}
    assert world.searching.import_seconds == 60.0


@pytest.mark.parametrize("cost", [float(c) for c in range(0, 100, 7)])
@pytest.mark.parametrize("seconds", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("budget", [15.0, 100.0])
def test_wherever_the_time_ends_there_is_a_result_in_time(
    world: World, cost: float, seconds: float, budget: float
):
    """Above all in the middle of a comparison: it must not end the original's or the best recipe's process."""
    world.budget = Budget(max_drop=0.01, time_seconds=budget)
    world.gain = product(half=1.5, fuse=2.0, pool=1.2)
    world.cost = {"fuse": cost}
    world.seconds = seconds
    outcome = world.search(step("half"), step("fuse"), step("pool"))
    assert outcome.speedup.low >= 1.0
    assert outcome.seconds <= 1.1 * world.budget.time_seconds + world.stretched()
    assert world.alive == [(), outcome.best.steps][: 2 if outcome.best.steps else 1]


@pytest.mark.parametrize("seconds", [0.1, 20.0])
def test_the_time_budget_starts_when_the_original_has_been_measured(world: World, seconds: float):
    """At a load of 20 on two cores an original of three layers took longer than a budget of 20 s."""
    world.budget = Budget(time_seconds=seconds)
    world.gain = product(half=2.0)
    world.seconds = 30.0
    outcome = world.search(step("half"))
    assert rows(outcome) == {"half": "kept"}
    assert outcome.seconds < world.now - 30.0


@pytest.mark.parametrize(
    ("load", "why"),
    [(20, "machine busy: load 20 on 2 cores"), (0, "no trial fits it")],
    ids=["busy", "quiet"],
)
def test_one_promising_candidate_is_tried_where_none_fits_the_time(world: World, load: int, why: str):
    world.budget, world.load = Budget(time_seconds=20.0), Load(running=load, cores=2)
    world.gain, world.cost = product(fuse=2.0, half=1.5), {"fuse": 90.0, "half": 30.0, "settle": 9.0}
    world.export_seconds = 8.0
    world.seconds = 1.0
    world.started.clear()
    outcome = world.search(step("fuse"), step("half"), step("settle"))
    assert rows(outcome) == {"fuse": "untried", "half": "kept", "settle": "untried"}
    note = next(note for note in outcome.notes if "stretched" in note)
    assert note == f"the time budget was stretched by {world.stretched():.0f} s to try half: {why}"
    assert note in [event.text for event in world.events if event.kind == "notice"]


def test_where_a_stretched_trial_fails_the_next_one_is_tried(world: World):
    world.budget, world.seconds = Budget(time_seconds=2.0), 1.0
    world.gain = product(half=2.0, pool=1.5)
    world.fails = {"half": TrialFailed("crashed (SIGSEGV)")}
    outcome = world.search(step("half"), step("pool"))
    assert rows(outcome) == {"half": "failed", "pool": "kept"}


def test_a_stretched_trial_that_hangs_ends_the_search_with_the_original(world: World):
    world.budget, world.cost = Budget(time_seconds=2.0), {"half": 1e9, "pool": 1e9}
    world.seconds = 1.0
    outcome = world.search(step("half"), step("pool"))
    assert rows(outcome) == {"half": "untried", "pool": "untried"}
    assert outcome.best is world.searching.baseline
    assert world.now < 200.0


def test_what_was_asked_for_has_its_trial_however_short_the_time(world: World):
    world.budget, world.cost = Budget(time_seconds=5.0), {"fuse": 60.0}
    world.gain, world.export_seconds = product(fuse=2.0), 6.0
    assert rows(world.search(wanted=(step("fuse"),), only=True)) == {"fuse": "kept"}


def test_an_original_that_hangs_is_an_error_and_a_loaded_machine_is_waited_for(world: World):
    world.seconds = 500.0
    with pytest.raises(TorchwrightError, match=r"original model does not answer.*plain PyTorch"):
        world.search(step("half"))
    assert world.alive == []
    world.load = Load(running=20, cores=2)
    assert names(world.search(step("half"))) == []


def test_an_original_that_slows_down_in_the_middle_is_not_ended_by_the_time_budget(world: World):
    """Its turn took longer than all the time that was left, and with it the search lost what it compares with."""
    world.gain = product(half=2.0, pool=2.0)
    world.load = Load(running=24, cores=2)
    world.later = lambda names, turn: 1e4 if turn > 12 else 1.0
    outcome = world.search(step("half"), step("pool"))
    assert () in world.alive
    assert outcome.best.steps == () or outcome.best.steps in world.alive


def test_an_original_that_is_lost_in_the_middle_leaves_the_original_as_the_result(world: World):
    world.gain = product(half=2.0)
    world.unseen_drop = lambda steps: 0.0
    world.drop = lossy(half=0.009)
    real = Process.observe

    def lost(self: Process, *, unseen: bool = False) -> str | None:
        if unseen:
            raise TrialFailed("killed (signal 9): most likely out of memory")
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Process, "observe", lost)
        outcome = world.search(step("half"))
    assert rows(outcome) == {"half": "removed"}
    assert outcome.best is world.searching.baseline
    assert "the search ended early: killed (signal 9): most likely out of memory" in outcome.notes
    assert world.alive == [()]


# --------------------------------------------------------------------------------------------- trials that go wrong


@pytest.mark.parametrize(
    "reason", ["crashed (SIGSEGV)", "killed (signal 9): most likely out of memory", "ValueError: bad shape"]
)
def test_a_trial_that_dies_becomes_a_row_with_its_reason(world: World, reason: str):
    world.gain = product(half=2.0, fuse=2.0)
    world.fails = {"half": TrialFailed(reason)}
    outcome = world.search(step("half"), step("fuse"))
    assert names(outcome) == ["fuse"]
    assert (row(outcome, "half").status, row(outcome, "half").reason) == ("failed", reason)


def test_a_trial_that_dies_while_it_is_timed_is_closed(world: World):
    def dies(names: frozenset[str], turn: int) -> float:
        if "half" in names:
            raise TrialFailed("crashed (SIGABRT)")
        return 1.0

    world.later = dies
    outcome = world.search(step("half"))
    assert row(outcome, "half").status == "failed"
    assert world.alive == [()]


def test_a_technique_that_refuses_while_applied_becomes_a_row(world: World):
    world.fails = {"half": RefusedTechnique("half cannot run here", found="no kernel for 3 channels")}
    outcome = world.search(step("half"))
    assert (row(outcome, "half").status, row(outcome, "half").reason) == (
        "refused",
        "half cannot run here: no kernel for 3 channels",
    )


def test_an_original_that_cannot_run_is_an_error(world: World, monkeypatch):
    def broken(*args: Any, **options: Any) -> Candidate:
        raise TrialFailed("ValueError: bad")

    monkeypatch.setattr("torchwright.optimization.trial.client.start_candidate", broken)
    with pytest.raises(TorchwrightError, match=r"the original model cannot be run.*ValueError: bad"):
        world.search()


def test_an_interrupt_closes_every_process(world: World):
    world.gain = product(half=2.0)

    def interrupted(names: frozenset[str], turn: int) -> float:
        if "fuse" in names:
            raise KeyboardInterrupt
        return 1.0

    world.later = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.search(step("half"), step("fuse"))
    assert world.alive == []


# ---------------------------------------------------------------------------------------------- wanted and unwanted


def test_a_wanted_step_that_cannot_run_is_an_error(world: World):
    with pytest.raises(RefusedTechnique, match=r"elsewhere was asked for.*not on a cpu.*torchwright doctor"):
        world.search(wanted=(step("elsewhere"),))
    assert world.alive == []


def test_a_wanted_step_that_this_model_refuses_is_an_error_with_the_reason(world: World):
    with pytest.raises(RefusedTechnique, match="too few layers"):
        world.search((step("fold"), "too few layers"), wanted=(step("fold"),))


def test_a_wanted_step_that_refuses_while_applied_is_an_error(world: World):
    world.fails = {"half": RefusedTechnique("half cannot run here", found="no kernel")}
    with pytest.raises(RefusedTechnique, match="no kernel"):
        world.search(wanted=(step("half"),))
    assert world.alive == []


def test_a_wanted_step_whose_needs_nobody_meets_is_an_error(world: World):
    with pytest.raises(RefusedTechnique, match="the model has no: compiled"):
        world.search(wanted=(step("tune"),), only=True)


def test_only_what_is_wanted_is_tried_and_with_its_options(world: World):
    world.gain = product(half=2.0, fuse=2.0)
    outcome = world.search(step("half"), step("fuse"), wanted=(step("half", kind="f"),), only=True)
    assert list(rows(outcome)) == ["half:kind=f"]


def test_a_technique_to_be_left_out_is_never_tried(world: World):
    world.gain = product(half=2.0, fuse=2.0)
    outcome = world.search(step("half"), step("fuse"), without=frozenset({"fuse"}))
    assert list(rows(outcome)) == ["half"]
    assert all(step("fuse") not in steps for steps in world.started)
