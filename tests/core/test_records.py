import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import make_quality, make_recipe
from torchwright.core.records import (
    RECIPE_FORMAT,
    Budget,
    Coverage,
    DeviceFacts,
    Interval,
    RooflinePoint,
    Step,
    StepResult,
    current_name,
    to_json,
)


def test_a_former_name_of_a_technique_is_read_as_its_name_today():
    assert Step(name="int8_rows", options={"skip": ["head"]}) == Step(
        name="int8_dynamic", options={"skip": ["head"]}
    )
    assert Coverage(technique="int8_rows", changed=1, total=2).technique == "int8_dynamic"
    assert current_name("dtype") == "dtype"


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("status", "low", "high", "busy", "undecided"),
    [
        ("untried", None, None, False, True),
        ("dropped", 0.94, 2.40, True, True),
        ("dropped", 0.94, 2.40, False, False),
        ("dropped", 0.94, 1.02, True, False),
        ("kept", 0.94, 2.40, True, False),
    ],
)
def test_what_others_work_may_have_hidden_is_not_decided(
    status: Any, low: float | None, high: float | None, busy: bool, undecided: bool
):
    found = None if low is None or high is None else Interval(value=low, low=low, high=high, busy=busy)
    rung = StepResult(step=Step(name="dtype"), kept=False, reason="", status=status, speedup=found)
    assert rung.undecided == undecided


def test_a_recipe_is_json_that_anyone_can_read():
    recipe = make_recipe()
    data = json.loads(to_json(recipe))
    assert data["format"] == RECIPE_FORMAT
    assert data["budget"] == dataclasses.asdict(recipe.budget)
    assert [step["name"] for step in data["steps"]] == [step.name for step in recipe.steps]
    assert len(data["rungs"]) == len(recipe.rungs)
    assert to_json(recipe).endswith("}\n")


@given(FINITE, FINITE, FINITE)
def test_numbers_survive_json_exactly(value: float, low: float, high: float):
    interval = Interval(value=value, low=low, high=high)
    assert Interval(**json.loads(to_json(interval))) == interval


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_json_cannot_say_is_refused(value: float):
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json(Interval(value=value, low=1.0, high=1.0))


def test_facts_cannot_be_changed():
    facts = DeviceFacts(kind="cpu", name="a processor")
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.cores = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "dtype"),
        ({"dtype": "bfloat16"}, "dtype:dtype=bfloat16"),
        ({"freezing": True, "skip": ("a", "b")}, "dtype:freezing=true,skip=a+b"),
    ],
)
def test_a_step_reads_as_it_is_typed(options, text):
    assert str(Step(name="dtype", options=options)) == text


def test_values_read_as_sentences():
    assert str(Interval(value=2.0, low=1.9, high=2.118)) == "2.00x [1.90, 2.12]"
    assert str(Coverage(technique="dtype", changed=3, total=4)) == "3 of 4 modules"
    assert str(Coverage(technique="int8", changed=3, total=4, unit="linears", kernel="oneDNN")) == (
        "3 of 4 linears through oneDNN"
    )


def test_the_roofline_point_states_rates_and_the_share_of_the_bound():
    point = RooflinePoint(
        case="decode", stage="final", dtype="bfloat16", bytes=2_000_000_000, operations=4_000_000_000_000,
        seconds=2.0, bound_seconds=1.0, bound_by="bytes",
    )  # fmt: skip
    assert (point.gb_per_s, point.tflops, point.percent_of_bound) == (1.0, 2.0, 50.0)


def test_the_budget_has_the_defaults_of_the_issue():
    assert Budget() == Budget(max_drop=0.01, objective="latency")


@pytest.mark.parametrize(("higher", "verb"), [(True, "drops"), (False, "rises")])
def test_a_loss_moves_the_metric_away_from_what_is_better(higher: bool, verb: str):
    assert make_quality(0.067, metric="relative error", higher_is_better=higher).worsens == verb


def test_a_gain_upon_a_gain_is_as_wide_as_both():
    first, second = Interval(value=2.0, low=1.5, high=2.5, busy=True), Interval(value=3.0, low=2.0, high=4.0)
    assert first.times(second) == Interval(value=6.0, low=3.0, high=10.0, busy=True)
    assert not second.times(second).busy
