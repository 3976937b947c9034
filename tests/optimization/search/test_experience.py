"""What other searches found: read with care, an order and no more."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from factories import make_device, make_features
from search_world import World, fake_world, names, product, step, tried
from torchwright.core.errors import ArtifactError
from torchwright.optimization.search.experience import (
    Experience,
    SearchRecord,
    Trial,
    instructions,
    near,
    read,
)
from torchwright.optimization.techniques.base import parse_step, techniques


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


def make_trial(**overrides: Any) -> Trial:
    fields: dict[str, Any] = {"gain": None, "drop": 0.0, "cost": 1.0}
    return Trial(**(fields | overrides))


def make_record(*, model: str = "other", **overrides: Any) -> SearchRecord:
    fields: dict[str, Any] = {
        "model": model,
        "machine": "Intel Xeon",
        "instructions": "cpu amx_int8",
        "cores": 8,
        "torch": "2.13.0",
        "commit": "abc",
        "max_drop": 0.01,
        "features": make_features(),
        "trials": {},
    }
    return SearchRecord(**(fields | overrides))


def three(**trials: Trial) -> tuple[SearchRecord, ...]:
    """The same search of three models."""
    return tuple(make_record(model=name, trials=trials) for name in ("one", "two", "three"))


# ----------------------------------------------------------------------------------------------------------- table


def test_the_table_names_steps_that_there_are():
    for record in read():
        for name in record.trials:
            technique = parse_step(name)
            assert str(technique) == name
            assert technique.name in techniques.names()


def one_search(**overrides: Any) -> str:
    return json.dumps({"searches": [dataclasses.asdict(make_record()) | overrides]})


NEGATIVE, SHORT = {"gain": -1, "drop": 0, "cost": 1}, {"gain": 1, "cost": 1}


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("", "Expecting value"),
        ("[]", "should be an object"),
        ('{"searches": [{}]}', "required"),
        (one_search(colour="red"), "colour"),
        (one_search(cores=0), "a core at least"),
        (one_search(trials={"half": SHORT}), "drop"),
        (one_search(trials={"half": NEGATIVE}), "above 0"),
    ],
)
def test_a_table_that_is_damaged_is_refused_by_name(tmp_path: Path, content: str, wrong: str):
    path = tmp_path / "experience.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match=wrong) as refused:
        read(path)
    assert str(path) in str(refused.value)


def test_a_table_is_read_as_it_was_written(tmp_path: Path):
    path, record = tmp_path / "experience.json", make_record(trials={"half": make_trial(gain=2.0)})
    path.write_text(json.dumps({"searches": [dataclasses.asdict(record)]}))
    assert read(path) == (record,)


# -------------------------------------------------------------------------------------------------------- nearness


def of_models_like(*records: SearchRecord, **features: Any) -> Experience:
    return near(records, make_features(**features), make_device(), 0.01)


def test_the_same_model_weighs_one_and_another_kind_or_machine_nothing():
    assert of_models_like(make_record()).near[0][0] == pytest.approx(1.0)
    assert not of_models_like(make_record(), linear=0.0, convolution=1.0).near
    assert not of_models_like(make_record(instructions="cpu avx2")).near
    assert not of_models_like(make_record(features=make_features(dtype="bfloat16"))).near
    assert not of_models_like(make_record(features=make_features(decode=True))).near
    assert not of_models_like(make_record(), pipeline=True).near


def test_a_machine_is_known_by_the_instructions_that_decide():
    assert instructions(make_device()) == "cpu amx_int8"
    assert instructions(make_device(isa=("avx2", "fma"))) == "cpu avx2"
    assert instructions(make_device(isa=("neon", "fp16", "dotprod", "sve"))) == "cpu dotprod"
    assert instructions(make_device(isa=())) == "cpu"
    assert instructions(make_device(kind="cuda", isa=("sm_90",))) == "cuda sm_90"


def test_the_nearer_model_comes_first_and_weighs_more():
    small, large = (
        make_record(model=str(size), features=make_features(operations=size)) for size in (10**7, 10**8)
    )
    found = of_models_like(small, large, operations=10**9).near
    assert [record.model for _, record in found] == ["100000000", "10000000"]
    assert found[0][0] > found[1][0] > 0


def test_more_cores_are_farther():
    weights = [of_models_like(make_record(cores=cores)).near[0][0] for cores in (8, 4, 2)]
    assert weights == pytest.approx([1.0, 1.0 - math.log10(2), 1.0 - math.log10(4)])


# ------------------------------------------------------------------------------------------------------- estimates


def test_the_expected_gain_lies_between_what_was_found_and_the_guess():
    half = of_models_like(make_record(trials={"half": make_trial(gain=3.0)})).gain(step("half"), 1.5)
    assert half == pytest.approx(math.exp((math.log(3.0) + 0.5 * math.log(1.5)) / 1.5))
    assert Experience().gain(step("half"), 1.5) == pytest.approx(1.5)


def test_what_was_no_part_of_the_recipe_is_expected_to_bring_nothing():
    slow = make_record(trials={"half": make_trial(gain=0.8)})
    lossy = make_record(trials={"half": make_trial(gain=3.0, drop=0.05)})
    for record in (slow, lossy):
        assert of_models_like(record).gain(step("half"), 2.0) == pytest.approx(2.0 ** (0.5 / 1.5))


def test_what_a_smaller_budget_kept_from_being_timed_says_nothing():
    strict = make_record(max_drop=0.001, trials={"half": make_trial(drop=0.005)})
    assert of_models_like(strict).gain(step("half"), 2.0) == pytest.approx(2.0)


def test_what_lost_otherwise_by_the_same_steps_says_less():
    """Eight bits are expected to hold where the half precision of a model held, as it did here."""
    robust = {"half": make_trial(drop=0.004), "fuse": make_trial(gain=4.0)}
    fragile = {"half": make_trial(drop=0.11), "fuse": make_trial(gain=0.5)}
    known = of_models_like(make_record(trials=robust), make_record(trials=fragile))
    assert known.given({}).gain(step("fuse"), 1.0) == pytest.approx(4.0 ** (1 / 2.5))
    assert known.given({"half": 0.004}).gain(step("fuse"), 1.0) == pytest.approx(4.0 ** (1 / 1.5))
    assert known.given({"half": 0.2}).gain(step("fuse"), 1.0) == pytest.approx(1.0)
    halfway = 1 - math.log10(2)
    assert known.given({"half": 0.008}).near[0][0] == pytest.approx(halfway)
    tiny = of_models_like(make_record(trials={"half": make_trial(drop=1e-7)}))
    assert tiny.given({"half": 1e-4, "other": 0.5}).near[0][0] == 1.0


def test_the_expected_cost_is_in_what_the_original_took():
    known = of_models_like(make_record(trials={"fuse": make_trial(cost=4.0)}))
    assert known.cost(step("fuse"), 10.0, 40.0) == pytest.approx(40.0)
    assert known.cost(step("half"), 10.0, 3.0) == pytest.approx(3.0)


# ------------------------------------------------------------------------------------------------------- the order


def test_experience_decides_what_is_tried_first(world: World):
    world.gain = product(fuse=1.5, half=1.5, fold=1.2)
    tries = (step("fold"), step("half"), step("fuse"))
    world.search(*tries)
    assert tried(world)[0] == "half"
    world.started.clear()
    records = (make_record(trials={"fuse": make_trial(gain=4.0), "half": make_trial(gain=0.9)}),)
    world.search(*tries, records=records)
    assert tried(world)[0] == "fuse"


@pytest.mark.parametrize(("metric", "first"), [("relative error", "half"), ("perplexity", "fuse")])
def test_what_outputs_lose_says_nothing_of_a_tasks_metric(world: World, metric: str, first: str):
    world.metric = metric
    world.gain = product(fuse=1.5, half=1.5, fold=1.2)
    lossy = make_record(max_drop=0.5, trials={"fuse": make_trial(gain=4.0, drop=0.4)})
    world.search(step("fold"), step("half"), step("fuse"), records=(lossy,))
    assert tried(world)[0] == first


@pytest.mark.parametrize(("gain", "first"), [(3.0, "fuse"), (1.0, "half")])
def test_a_compiler_is_worth_what_waits_for_it(world: World, gain: float, first: str):
    """Fusing alone gains 2%, and what needs it three times as much as half precision, or nothing."""
    world.gain = product(fuse=1.5, half=1.5, quantize=1.5)
    records = three(half=make_trial(gain=1.3), fuse=make_trial(gain=1.02), quantize=make_trial(gain=gain))
    world.search(step("half"), step("fuse"), step("quantize"), records=records)
    assert tried(world)[0] == first


@pytest.mark.parametrize(("int8", "first"), [(0.0001, "fuse"), (0.0079, "half")])
def test_a_kernel_that_was_timed_promises_what_it_saves(world: World, int8: float, first: str):
    world.gain = product(fuse=1.5, half=1.5, quantize=1.5)
    world.kernels = {"float32": 0.008, "int8": int8}
    world.search(step("half"), step("fuse"), step("quantize"))
    assert tried(world)[0] == first


def test_a_far_model_changes_nothing(world: World):
    tries = (step("fold"), step("half"), step("fuse"))
    far = make_record(
        features=make_features(convolution=1.0, linear=0.0), trials={"fuse": make_trial(gain=9.0)}
    )
    world.search(*tries, records=(far,))
    order = tried(world)
    world.started.clear()
    world.search(*tries)
    assert tried(world) == order


def test_a_setting_that_is_known_to_matter_does_not_wait_for_the_end(world: World):
    world.gain = product(settle=1.5, fold=1.05)
    world.search(step("fold"), step("settle"), records=three(settle=make_trial(gain=1.5)))
    assert tried(world) == ["settle", "fold"]


def test_the_order_is_the_same_each_time(world: World):
    tries = (step("fold"), step("half"), step("half", kind="c"), step("fuse"), step("pool", size=2))
    records = three(fuse=make_trial(gain=2.0), fold=make_trial(gain=1.3))
    orders = []
    for _ in range(2):
        world.started.clear()
        world.search(*tries, records=records)
        orders.append(tried(world))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("gains", [(2.0, 1.5, 1.2), (1.3, 3.0, 0.9), (0.8, 1.0, 1.0), (1.1, 1.05, 2.0)])
def test_true_experience_changes_no_recipe_only_the_time_until_it_is_found(
    world: World, gains: tuple[float, float, float]
):
    factors = dict(zip(("half", "fuse", "fold"), gains, strict=True))
    world.gain, world.cost = product(**factors), {"fuse": 6.0}
    tries = [step(name) for name in ("fold", "fuse", "half")]
    plain = world.search(*tries)
    trials = {name: make_trial(gain=factor) for name, factor in factors.items()}
    records = tuple(make_record(model=str(n), trials=trials) for n in range(3))
    known = world.search(*tries, records=records)
    assert sorted(names(known)) == sorted(names(plain))
    assert known.speedup.value == pytest.approx(plain.speedup.value)
