"""Contract tests of every registered workload."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from torchwright.core import nested
from torchwright.core.records import Quality
from torchwright.testing.examples import example
from torchwright.workloads.base import Run, Workload, workloads
from torchwright.workloads.detect import from_description


@pytest.fixture(scope="module", params=workloads.names())
def workload(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return example(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(workload: Workload) -> Any:
    return answers_of(workload)


def answers_of(workload: Workload) -> Any:
    """Return the original's answers as the metric takes them."""
    with torch.inference_mode():
        return workload.observe(run_of(adapted(workload)), torch.float32)


def run_of(model: nn.Module) -> Run:
    return lambda case: model(*case.args, **case.kwargs)


def adapted(workload: Workload) -> nn.Module:
    """A model as techniques get it."""
    return workload.adapt(workload.build())


def damaged(workload: Workload) -> nn.Module:
    """The same architecture with weights that have nothing to do with the original's."""
    model = workload.build()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return workload.adapt(model)


def tensors(value: Any) -> list[torch.Tensor]:
    return nested.tensors(value)


def same(one: Any, other: Any) -> bool:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class TestWorkload:
    def test_its_class_says_what_it_is(self, workload: Workload) -> None:
        cls = type(workload)
        assert workloads.get(cls.name) is cls
        assert (cls.__doc__ or "").strip(), "the docstring is what `torchwright workloads` prints"
        assert isinstance(cls.supports, str)

    def test_a_stranger_to_it_is_not_accepted(self, workload: Workload, tmp_path: Path) -> None:
        assert type(workload).accepts(tmp_path, {"architectures": ["NobodysModel"]}) is False

    def test_it_is_made_again_from_its_description(self, workload: Workload) -> None:
        """The description is all that a recipe keeps, as JSON."""
        kept = _as_kept(workload)
        assert kept["kind"] == workload.name
        assert isinstance(kept["model"], str)
        again = from_description(kept, trust=True)
        assert type(again) is type(workload)
        assert _as_kept(again) == kept
        assert same(_calls(again), _calls(workload))

    def test_it_travels_to_another_process(self, workload: Workload) -> None:
        there = cloudpickle.loads(cloudpickle.dumps(workload))
        assert there.describe() == workload.describe()
        assert same(_calls(there), _calls(workload))

    def test_every_model_it_builds_is_fresh(self, workload: Workload) -> None:
        one, other = workload.build(), workload.build()
        assert not any(module.training for module in one.modules())
        before, after = one.state_dict(), other.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        places = {tensor.data_ptr() for tensor in before.values() if tensor.numel()}
        assert places.isdisjoint(tensor.data_ptr() for tensor in after.values() if tensor.numel())

    def test_files_lie_where_it_says(self, workload: Workload) -> None:
        with_weights, without = workload.files(weights=True), workload.files(weights=False)
        assert without.keys() <= with_weights.keys()
        for name, path in with_weights.items():
            assert path.is_file()
            assert not Path(name).is_absolute()
            assert ".." not in Path(name).parts

    @torch.inference_mode()
    def test_original_and_adapted_answer_every_call(self, workload: Workload) -> None:
        original = workload.build()
        ask, run = workload.original_run(original), run_of(adapted(workload))
        cases = workload.cases(torch.float32)
        assert len({case.name for case in cases}) == len(cases)
        for case in cases:
            assert case.repeat >= 1
            _check_finite(ask(case))
            _check_finite(run(case))
        workload.check_adapted(original, adapted(workload))

    @torch.inference_mode()
    def test_calibration_runs(self, workload: Workload) -> None:
        run = run_of(adapted(workload))
        for case in workload.calibration(torch.float32):
            _check_finite(run(case))

    @torch.inference_mode()
    def test_it_runs_in_bfloat16(self, workload: Workload) -> None:
        model = workload.cast(adapted(workload), torch.bfloat16, lambda name, module: False)
        for case in workload.cases(torch.bfloat16):
            _check_finite(model(*case.args, **case.kwargs))

    @torch.inference_mode()
    def test_the_original_loses_nothing(self, workload: Workload, reference: Any) -> None:
        """Also on the data that it keeps apart to judge what the search has chosen."""
        qualities = [_compared(workload, reference, adapted(workload))]
        if (unseen := workload.unseen()) is not None:
            apart = unseen.observe(run_of(adapted(workload)), torch.float32)
            qualities.append(_compared(unseen, apart, adapted(workload)))
        for quality in qualities:
            assert quality.drop == pytest.approx(0, abs=1e-6)
            assert quality.samples >= 0

    @torch.inference_mode()
    def test_other_weights_lose(self, workload: Workload, reference: Any) -> None:
        quality = _compared(workload, reference, damaged(workload))
        assert quality.drop > 1e-3
        assert quality.drop_high >= quality.drop


def _as_kept(workload: Workload) -> dict[str, Any]:
    return json.loads(json.dumps(workload.describe()))


def _calls(workload: Workload) -> list[Any]:
    return [(case.args, case.kwargs) for case in workload.cases(torch.float32)]


def _compared(workload: Workload, reference: Any, candidate: nn.Module) -> Quality:
    """Return the metric of `candidate` against the original, as a recipe would keep it."""
    quality = workload.compare(reference, workload.observe(run_of(candidate), torch.float32))
    assert quality.metric
    numbers = (quality.value, quality.reference, quality.drop, quality.drop_high, *quality.extras.values())
    assert all(math.isfinite(number) for number in numbers)
    return quality


def _check_finite(output: Any) -> None:
    found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    assert found, "the call gave no tensor back"
    assert all(bool(tensor.isfinite().all()) for tensor in found)
