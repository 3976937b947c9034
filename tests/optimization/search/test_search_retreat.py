"""The search's retreat from a quantization that costs too much, and what its micro-benchmark spares it."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from search_techniques import Declare, Library, Quantize
from search_world import World, fake_world, lossy, names, product, row, rows, step
from torchwright.core.records import RELATIVE_ERROR, Budget, Quality, Ranked, Step
from torchwright.optimization.search import attempt
from torchwright.optimization.search.knapsack import packed


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


# ---------------------------------------------------------------------------------------------- the micro-benchmark


def test_the_micro_benchmark_refuses_with_its_numbers(world: World):
    world.gain = product(fuse=2.0, quantize=5.0)
    world.kernels = {"float32": 0.002, "int8": 0.0019999}
    outcome = world.search(step("fuse"), step("quantize"))
    assert rows(outcome) == {"fuse": "kept", "quantize": "refused"}
    reason = row(outcome, "quantize").reason
    assert reason.startswith("int8 kernels need 2.00 ms")
    assert "float32 needs 2.00 ms: 0.0% of a pass at most, and up to 2% is lost in the noise" in reason
    assert all("quantize" not in [s.name for s in steps] for steps in world.started)


def test_the_micro_benchmark_says_where_a_kernel_is_not_faster_at_all(world: World):
    world.gain = product(fuse=2.0, quantize=5.0)
    world.kernels = {"float32": 0.002, "int8": 0.003}
    reason = row(world.search(step("fuse"), step("quantize")), "quantize").reason
    assert reason.startswith("int8 kernels need 3.00 ms for this model's linear layers")
    assert reason.endswith("float32 needs 2.00 ms: not faster")


def test_the_micro_benchmark_compares_with_the_kernel_in_use(world: World):
    world.gain = product(half=1.5, fuse=1.5, quantize=1.5)
    world.kernels = {"float32": 0.008, "half": 0.002, "int8": 0.003}
    outcome = world.search(step("half"), step("fuse"), step("quantize"))
    assert "half needs 2.00 ms" in row(outcome, "quantize").reason


def test_for_memory_the_micro_benchmark_says_nothing(world: World):
    world.budget = Budget(objective="memory", time_seconds=100.0)
    world.kernels = {"float32": 0.002, "int8": 0.002}
    world.memory = lambda names: (100 if "quantize" in names else 900 if "fuse" in names else 1000) * 2**20
    assert names(world.search(step("fuse"), step("quantize"))) == ["quantize", "fuse"]


# ---------------------------------------------------------------------------------------------------------- retreat


LAYERS = [(f"layer{index}", 1.0 / (index + 1)) for index in range(10)]


def skipped(steps: tuple[Step, ...]) -> int | None:
    for each in steps:
        if each.name == "quantize":
            return len(each.options.get("skip", ()))
    return None


def test_retreats_from_the_most_sensitive_layers_first_and_stops_when_it_is_enough(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = LAYERS
    world.drop = lambda steps: 0.02 if skipped(steps) == 0 else 0.001
    outcome = world.search(step("fuse"), step("quantize"))
    assert names(outcome) == ["quantize:skip=layer0+layer1", "fuse"]
    assert rows(outcome) == {"fuse": "kept", "quantize": "dropped", "quantize:skip=layer0+layer1": "kept"}
    last = outcome.rungs[-1]
    assert [(each.name, each.error) for each in last.ranking] == LAYERS
    assert last.ranked == 10
    assert not any(rung.ranking for rung in outcome.rungs[:-1])
    assert any("without the 2 most sensitive of 10 modules" in event.text for event in world.events)


def test_gives_up_when_no_retreat_is_enough(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = LAYERS
    world.drop = lambda steps: 0.0 if skipped(steps) is None else 0.03
    outcome = world.search(step("fuse"), step("quantize"))
    assert names(outcome) == ["fuse"]
    assert list(rows(outcome).values()) == ["kept", "dropped", "dropped"]


def test_stops_retreating_once_within_the_budget_and_still_not_faster(world: World):
    world.gain = lambda names: 1.5 if "fuse" in names else 1.0
    world.ranking = LAYERS
    world.drop = lambda steps: 0.02 if skipped(steps) == 0 else 0.0
    outcome = world.search(step("fuse"), step("quantize"))
    assert [len(r.step.options.get("skip", ())) for r in outcome.rungs if r.step.name == "quantize"] == [0, 2]


def test_a_hopeless_drop_is_not_retreated_from(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = LAYERS
    world.drop = lambda steps: 0.0 if skipped(steps) is None else 0.061
    outcome = world.search(step("fuse"), step("quantize"))
    assert list(rows(outcome)) == ["fuse", "quantize"]


@pytest.mark.parametrize(
    ("errors", "left_alone"),
    [
        pytest.param([0.012] + [0.004] * 9, [0, 5], id="the root of squares of the other five is 0.9%"),
        pytest.param([0.012] + [0.001] * 9, [0, 1], id="one is nearly all of it"),
        pytest.param([0.008] * 10, [0, 9], id="nine of ten"),
    ],
)
def test_where_errors_add_up_as_many_are_left_alone_as_must_be(
    world: World, errors_add: None, errors: list[float], left_alone: list[int]
):
    world.metric = RELATIVE_ERROR
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = [(f"layer{index}", error) for index, error in enumerate(errors)]
    world.drop = lambda steps: 0.02 if skipped(steps) == 0 else 0.0
    outcome = world.search(step("fuse"), step("quantize"))
    tried = [len(rung.step.options.get("skip", ())) for rung in outcome.rungs if rung.step.name == "quantize"]
    assert tried == left_alone


@pytest.mark.parametrize(("between", "left_alone"), [(False, [0, 1]), (True, [0])])
def test_what_is_rounded_between_layers_stays_where_layers_are_left_alone(
    world: World, errors_add: None, declare: Declare, between: bool, left_alone: list[int]
):
    """Of the 2% that were lost 1.2% are the layers', and what no layer does loses 1.6% by itself."""
    declare(Quantize, rounds_between=between)
    world.metric = RELATIVE_ERROR
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = [(f"layer{index}", 0.012 if index == 0 else 0.001) for index in range(10)]
    world.drop = lambda steps: 0.02 if skipped(steps) == 0 else 0.0
    outcome = world.search(step("fuse"), step("quantize"))
    tried = [len(rung.step.options.get("skip", ())) for rung in outcome.rungs if rung.step.name == "quantize"]
    assert tried == left_alone


def alone(errors: list[float], lost: Quality) -> int:
    """Return how many layers of these errors a budget of 1% leaves alone."""
    ranking = [Ranked(name=str(number), error=error) for number, error in enumerate(errors)]
    return len(attempt.left_alone(Quantize(), ranking, lost, 0.01))


@pytest.mark.parametrize(("high", "count"), [(0.012, 5), (0.013, 6), (0.018, 8)])
def test_the_upper_end_of_a_loss_is_brought_into_the_budget(errors_add: None, high: float, count: int):
    """Of ten equal parts of 1.2%."""
    lost = Quality(
        metric="error", value=0.012, reference=0.0, drop=0.012, drop_high=high, higher_is_better=False
    )
    assert alone([0.012 / math.sqrt(10)] * 10, lost) == count


@pytest.mark.parametrize("unit", [1.0, 0.1, 30.0])
def test_errors_are_a_share_of_the_loss_where_the_metric_has_another_unit(errors_add: None, unit: float):
    """A tenth of a percent of perplexity may come of a relative error of 3%."""
    lost = Quality(
        metric="perplexity", value=1.02, reference=1.0, drop=0.02, drop_high=0.02, higher_is_better=False
    )
    errors = [unit * (0.019 if index == 0 else 0.002) for index in range(10)]
    assert alone(errors, lost) == 1
    assert alone([0.0] * 10, lost) == 1


@pytest.mark.parametrize(("metric", "count"), [("PredictionPerplexity", 6), ("error rate", 9)])
def test_squared_errors_add_up_in_a_perplexity(errors_add: None, metric: str, count: int):
    """Four of ten equal layers have 40% of the squared error; one has 32% of its root."""
    lost = Quality(
        metric=metric, value=1.02, reference=1.0, drop=0.022, drop_high=0.022, higher_is_better=False
    )
    assert alone([1.0] * 10, lost) == count


def test_what_is_left_alone_costs_the_least_time(errors_add: None):
    """One slow layer has most of the error: the quick ones, which have more for their time, stay in 8 bits."""
    ranking = [
        *(Ranked(name=f"quick{n}", error=0.1, seconds=0.001) for n in range(9)),
        Ranked(name="slow", error=0.95, seconds=0.5),
    ]
    lost = Quality(
        metric="error", value=0.0, reference=0.0, drop=0.02, drop_high=0.02, higher_is_better=False
    )
    assert [each.name for each in attempt.left_alone(Quantize(), ranking, lost, 0.01)] == ["slow"]


@pytest.mark.parametrize("seed", range(20))
def test_the_packing_is_the_best_that_fits(seed: int):
    """Held against every choice, within the fiftieth of the room that rounding may take."""
    chance = random.Random(seed)
    values = [chance.random() for _ in range(10)]
    weights = [chance.random() ** 3 for _ in range(10)]

    def best(room: float) -> float:
        choices = itertools.product((False, True), repeat=10)
        return max(total(values, each) for each in choices if total(weights, each) <= room)

    room = chance.uniform(0.0, 3.0)
    found = packed(values, weights, room)
    assert total(weights, found) <= room
    assert best(0.98 * room) <= total(values, found) <= best(room)


def total(numbers: list[float], chosen: Sequence[bool]) -> float:
    return sum(number for number, taken in zip(numbers, chosen, strict=True) if taken)


def test_nothing_is_packed_without_room():
    assert packed([1.0, 1.0], [0.5, 0.0], 0.0) == [False, True]
    assert packed([1.0, 1.0], [0.5, 0.0], -1.0) == [False, True]
    assert packed([], [], 1.0) == []


@pytest.mark.parametrize(("seconds", "tries"), [(0.5, 2), (10.0, 1)])
def test_layers_are_not_ranked_where_no_time_is_left_for_what_comes_of_it(
    world: World, errors_add: None, seconds: float, tries: int
):
    """AST's ranking took the 12 s in which its float32 would have been found."""
    world.seconds, world.budget = seconds, Budget(max_drop=0.01, time_seconds=140.0)
    world.gain = product(fuse=1.5, quantize=2.0)
    world.ranking = [("layer0", 0.012), *((f"layer{index}", 0.001) for index in range(1, 10))]
    world.drop = lambda steps: 0.02 if skipped(steps) == 0 else 0.0
    outcome = world.search(step("fuse"), step("quantize"))
    assert sum(rung.step.name == "quantize" for rung in outcome.rungs) == tries


def test_a_technique_that_knows_no_retreat_is_dropped_at_once(world: World):
    world.gain = product(half=2.0)
    world.drop = lossy(half=0.02)
    assert list(rows(world.search(step("half")))) == ["half"]


def test_layers_that_cannot_be_ranked_are_a_note(world: World):
    world.gain = product(fuse=1.5, quantize=2.0)
    world.drop = lossy(quantize=0.02)
    outcome = world.search(step("fuse"), step("quantize"))
    assert outcome.notes == ("quantize: no retreat, its layers could not be ranked (no layer has inputs)",)


# ------------------------------------------------------------------------------- what is lost, before it is compiled


@pytest.fixture
def compiling(world: World, declare: Declare) -> World:
    """A compiler that takes its time, and a technique that may lose more than the budget."""
    declare(Quantize, tolerance=0.1)
    world.cost = {"fuse": 20.0}
    world.gain = product(fuse=1.5, quantize=2.0)
    return world


def with_quantize(world: World) -> list[tuple[Step, ...]]:
    return [steps for steps in world.started if skipped(steps) is not None]


def test_what_loses_far_too_much_is_not_compiled_for_that(compiling: World):
    compiling.drop = lossy(quantize=0.0151)
    outcome = compiling.search(step("fuse"), step("quantize"))
    assert names(outcome) == ["fuse"]
    assert row(outcome, "quantize").reason.startswith("error rises by 1.51%")
    assert row(outcome, "quantize").reason.endswith("the budget is 1.00%; not compiled for that")
    assert row(outcome, "quantize").quality.drop == 0.0151
    assert compiling.looked == [(step("quantize"), step("fuse"))]
    assert not with_quantize(compiling)


def test_a_milder_form_is_looked_at_too_and_compiled_where_it_holds(compiling: World):
    compiling.ranking = LAYERS
    compiling.drop = lambda steps: {None: 0.0, 0: 0.05}.get(skipped(steps), 0.001)
    outcome = compiling.search(step("fuse"), step("quantize"))
    assert outcome.best.steps[0].options == {"skip": ["layer0", "layer1"]}
    assert [skipped(steps) for steps in compiling.looked] == [0, 2]
    assert {skipped(steps) for steps in with_quantize(compiling)} == {2}


def test_a_little_too_much_is_judged_as_it_would_be_shipped(compiling: World):
    """Compiled code rounds less often than eager code does."""
    compiling.drop = lossy(quantize=0.0149)
    outcome = compiling.search(step("fuse"), step("quantize"))
    assert len(compiling.looked) == 1
    assert with_quantize(compiling)
    assert "compiled" not in row(outcome, "quantize").reason


@pytest.mark.parametrize("why", ["the compiler is quick", "it loses nothing by its nature", "a look is slow"])
def test_what_would_not_pay_is_not_looked_at(compiling: World, declare: Declare, why: str):
    compiling.drop = lossy(quantize=0.05)
    if why == "the compiler is quick":
        compiling.cost = {}
    elif why == "it loses nothing by its nature":
        declare(Quantize, tolerance=0.01)
    else:
        compiling.cost["quantize"] = 40.0
    outcome = compiling.search(step("fuse"), step("quantize"))
    assert len(compiling.looked) == (why == "a look is slow")
    assert "not compiled" not in row(outcome, "quantize").reason


@pytest.fixture
def converting(world: World, declare: Declare) -> World:
    """A library whose conversion takes its time, and whose loss eager code shows."""
    declare(Library, tolerance=0.1, emulates=True)
    world.converting, world.export_seconds = 20.0, 2.0
    world.gain = product(library=4.0, fold=1.5)
    return world


def test_what_loses_far_too_much_in_eager_code_is_not_converted_for_that(converting: World):
    converting.drop = lossy(library=0.07)
    outcome = converting.search(step("library"))
    assert rows(outcome) == {"library": "dropped"}
    assert row(outcome, "library").reason.endswith("emulated, and not converted for that")
    assert converting.looked == [(step("library"),)]
    assert (step("library"),) not in converting.started
    assert converting.now < 10


def test_what_may_be_within_the_budget_is_converted(converting: World):
    converting.drop = lossy(library=0.0149)
    outcome = converting.search(step("library"))
    assert (step("library"),) in converting.started
    assert "emulated" not in row(outcome, "library").reason
