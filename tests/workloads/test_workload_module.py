"""Any module with inputs: forms of inputs, metrics, the caller's model left alone, factories and what goes wrong."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils import _pytree as pytree

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.intervals import rms_bounds
from torchwright.core.records import Interval, Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.proof.recipe import calibration_notes
from torchwright.optimization.proof.verify_artifact import disturbance_note
from torchwright.optimization.techniques.shared.int8 import STEPS, observe_inputs
from torchwright.workloads.base import CastBoundary, changed_tensors, fresh, own_tensors, to_dtype
from torchwright.workloads.module import ModuleWorkload, from_factory, normalise


class Mixer(nn.Module):
    """Takes what it is given in any form and returns a nest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, scale=1.0, extra=None):
        y = self.dropout(self.linear(x)) * scale
        return {"y": y if extra is None else y + extra["bias"], "count": x.shape[0]}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mixer()


def run_of(model):
    return lambda case: model(*case.args, **case.kwargs)


def quality(workload, model):
    reference = workload.observe(run_of(workload.build()), torch.float32)
    return workload.compare(reference, workload.observe(run_of(model), torch.float32))


class TestInputs:
    @pytest.mark.parametrize(
        ("inputs", "calls"),
        [
            (torch.ones(2), [(1, 0)]),
            ((torch.ones(2), 3), [(2, 0)]),
            ((), [(0, 0)]),
            ({"x": torch.ones(2), "scale": 2.0}, [(0, 2)]),
            ([torch.ones(2), (torch.ones(3), 1), {"x": torch.ones(4)}], [(1, 0), (2, 0), (0, 1)]),
        ],
    )
    def test_every_form(self, inputs, calls):
        assert [(len(args), len(kwargs)) for args, kwargs in normalise(inputs)] == calls

    def test_an_empty_list(self, model):
        with pytest.raises(WorkloadError, match=r"there are no inputs.*a tuple, a dict, a tensor"):
            ModuleWorkload(model, [])

    @pytest.mark.parametrize("inputs", [5, "text", None, {1, 2}, [torch.ones(1), 5], [[torch.ones(1)]]])
    def test_forms_that_are_none(self, model, inputs):
        with pytest.raises(WorkloadError, match=r"inputs of type \w+ cannot be passed to a model.*Allowed"):
            ModuleWorkload(model, inputs)

    def test_cases_carry_names_and_nested_arguments(self, model):
        inputs = [{"x": torch.ones(2, 4), "extra": {"bias": torch.ones(3)}}, (torch.ones(5, 4), 2.0)]
        workload = ModuleWorkload(model, inputs)
        cases = workload.cases(torch.float32)
        assert [case.name for case in cases] == ["shape 1", "shape 2"]
        assert [workload.build()(*case.args, **case.kwargs)["count"] for case in cases] == [2, 5]
        assert [case.name for case in ModuleWorkload(model, inputs[1]).cases(torch.float32)] == ["forward"]

    def test_describe_names_shapes_and_types(self, model):
        inputs = [
            (torch.ones(2, 4, dtype=torch.bfloat16), 2.0),
            {"x": torch.ones(5, 4), "extra": {"bias": torch.ones(3)}},
        ]
        description = ModuleWorkload(model, inputs).describe()
        assert description["kind"] == "module"
        assert description["model"] == "Mixer"
        assert description["shapes"] == [
            {"args": [["bfloat16", 2, 4], "2.0"], "kwargs": {}},
            {"args": [], "kwargs": {"x": [["float32", 5, 4]], "extra": [["float32", 3]]}},
        ]


class TestModel:
    def test_the_callers_model_is_left_alone(self, model):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        workload = ModuleWorkload(model, torch.ones(2, 4))
        built: Any = workload.build()
        built.linear.weight.data.zero_()
        built.half()
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        again: Any = workload.build()
        assert again.linear.weight.abs().sum() > 0

    def test_built_models_are_in_eval_mode_without_gradients(self, model):
        built: Any = ModuleWorkload(model, torch.ones(2, 4)).build()
        assert not any(module.training for module in built.modules())
        assert not any(parameter.requires_grad for parameter in built.parameters())

    def test_shared_weights_stay_shared(self):
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        built: Any = ModuleWorkload(model, torch.ones(1, 3)).build()
        assert built[0].weight is built[1].weight

    @pytest.mark.parametrize("thing", [torch.relu, nn.Linear, "path", None, 5])
    def test_what_is_no_module(self, thing):
        with pytest.raises(ModelError, match=r"the model is a \w+\. Allowed: a torch\.nn\.Module"):
            ModuleWorkload(thing, torch.ones(1))

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (
                lambda: torch.jit.script(nn.Linear(2, 2)),
                r"TorchScript module \(Linear\)\. Allowed: the torch\.nn\.Module",
            ),
            (lambda: nn.Linear(2, 2, device="meta"), r"meta device, without data\. Next: load"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
    def test_what_has_no_weights_to_change(self, make, words):
        with pytest.raises(ModelError, match=words):
            ModuleWorkload(make(), torch.ones(1, 2))

    @torch.no_grad()
    def test_parametrized_weights_are_computed_once_and_travel(self):
        model = nn.Sequential(weight_norm(nn.Linear(4, 3)), spectral_norm(nn.Linear(3, 2))).eval()
        x = torch.randn(5, 4)
        workload = cloudpickle.loads(cloudpickle.dumps(ModuleWorkload(model, x)))
        torch.testing.assert_close(workload.build()(x), model(x))
        assert hasattr(model[0], "parametrizations")

    def test_inputs_lose_their_history(self, model):
        x = torch.ones(2, 4, requires_grad=True) * 2
        (case,) = ModuleWorkload(model, {"x": x}).cases(torch.float32)
        assert not case.kwargs["x"].requires_grad

    def test_a_model_that_cannot_be_copied(self):
        model = nn.Linear(2, 2)
        model.cache = model.weight * 2  # a tensor in the middle of a graph
        with pytest.raises(ModelError, match=r"the model Linear cannot be copied.*deepcopy"):
            ModuleWorkload(model, torch.ones(1, 2))

    def test_travels_by_cloudpickle(self, model):
        class Local(nn.Module):
            def forward(self, x):
                return x + 1

        workload = cloudpickle.loads(cloudpickle.dumps(ModuleWorkload(Local(), torch.ones(2))))
        assert workload.build()(torch.ones(2)).tolist() == [2, 2]

    def test_bfloat16_inside_float32_outside(self, model):
        workload = ModuleWorkload(model, (torch.ones(2, 4), 1.0, {"bias": torch.ones(3)}))
        cast: Any = workload.cast(workload.build(), torch.bfloat16, lambda name, module: False)
        (case,) = workload.cases(torch.float32)
        output = cast(*case.args)
        assert type(cast) is CastBoundary
        inner: Any = cast.inner
        assert inner.linear.weight.dtype == torch.bfloat16
        assert output["y"].dtype == torch.float32
        assert output["count"] == 2
        torch.testing.assert_close(output["y"], workload.build()(*case.args)["y"], rtol=0.02, atol=0.02)

    def test_modules_kept_in_float32_and_integers_left_alone(self):
        model = fresh(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)))
        changed = to_dtype(model, torch.bfloat16, lambda name, module: name == "2")
        assert changed == ["0", "1"]
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        assert dtypes["0.weight"] == dtypes["1.running_mean"] == torch.bfloat16
        assert dtypes["2.weight"] == torch.float32
        assert dtypes["1.num_batches_tracked"] == torch.int64

    def test_rotary_frequencies_keep_their_digits(self):
        """At position 4,000 a frequency in bfloat16 is another angle: logits of the cast model stay near."""
        from folders import causal

        model = fresh(causal("Llama", max_position_embeddings=8192))
        wanted, ids_BT = model.float(), torch.arange(5, 45)[None]
        far_BT = torch.arange(4000, 4040)[None]
        with torch.inference_mode():
            expected = wanted(input_ids=ids_BT, position_ids=far_BT).logits
            changed = to_dtype(model, torch.bfloat16, lambda name, module: False)
            found = model(input_ids=ids_BT, position_ids=far_BT).logits.float()
        assert "model.rotary_emb" not in changed
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert float((found - expected).norm() / expected.norm()) < 0.05


class TestOtherValues:
    """One example calibrates at two sizes, and what was calibrated is judged at a third."""

    def test_numbers_are_scaled_and_integers_are_not(self):
        model = nn.Bilinear(3, 3, 2)
        model.forward = lambda x, ids: x * ids
        workload = ModuleWorkload(model, (torch.ones(2, 3), torch.arange(3)))
        first, second = workload.calibration(torch.float32)
        assert torch.equal(first.args[0], torch.ones(2, 3))
        assert torch.equal(second.args[0], torch.full((2, 3), 0.5))
        assert torch.equal(second.args[1], torch.arange(3))
        varied = workload.varied()
        assert varied is not None
        (case,) = varied.cases(torch.float32)
        assert torch.equal(case.args[0], torch.full((2, 3), 0.75))
        assert torch.equal(workload.cases(torch.float32)[0].args[0], torch.ones(2, 3))

    @pytest.mark.parametrize(
        "workload",
        [
            lambda: ModuleWorkload(nn.Linear(2, 2), [torch.ones(1, 2)] * 2),
            lambda: ModuleWorkload(nn.Linear(2, 2), torch.ones(1, 2), metric=lambda model: 1.0),
            lambda: ModuleWorkload(nn.Linear(2, 2), torch.ones(1, 2), task="classification"),
            lambda: ModuleWorkload(nn.Embedding(4, 2), torch.tensor([1])),
        ],
    )
    def test_there_are_none_where_others_judge_or_nothing_can_be_scaled(self, workload: Any):
        assert workload().varied() is None


class TestMetrics:
    def test_relative_error_is_the_default_over_all_shapes_and_outputs(self, model):
        workload = ModuleWorkload(model, [torch.ones(2, 4), torch.ones(3, 4)])
        other: Any = workload.build()
        assert quality(workload, other).drop == 0
        other.linear.weight.data.mul_(1.01)
        changed = quality(workload, other)
        assert changed.metric == "relative error"
        assert 1e-3 < changed.drop < 0.05

    def test_bfloat16_outputs_are_compared_as_float32(self):
        workload = ModuleWorkload(nn.Identity(), torch.ones(2, dtype=torch.bfloat16))
        (seen,) = workload.observe(run_of(workload.build()), torch.float32)
        assert [t.dtype for t in seen.outputs] == [torch.float32]

    def test_classification_judges_by_agreement_over_every_input(self):
        logits = [size * torch.eye(5) for size in (1.0, 2.0, 3.0, 4.0, 5.0)]
        workload = ModuleWorkload(nn.Identity(), logits, task="classification")
        reference = workload.observe(run_of(workload.build()), torch.float32)

        def swapped(wrong):
            return lambda case: case.args[0][:, [1, 0, 2, 3, 4] if case.args[0].max() == wrong else range(5)]

        def judged(wrong):
            return workload.compare(reference, workload.observe(swapped(wrong), torch.float32))

        assert (judged(2).metric, judged(2).samples) == ("top-1 agreement", 15)
        assert judged(2).value == pytest.approx(1 - 2 / 15)
        assert judged(1).value == pytest.approx(1 - 2 / 5)  # what calibrated answers for itself
        assert judged(5).value == 1.0  # which judges what was chosen
        last = workload.unseen()
        assert last is not None
        reference = last.observe(run_of(workload.build()), torch.float32)
        assert last.compare(reference, last.observe(swapped(5), torch.float32)).value == pytest.approx(
            1 - 2 / 5
        )

    def test_inputs_of_one_shape_are_one_call_and_one_sample(self):
        wide, tall = [torch.rand(2, 6) for _ in range(4)], [torch.rand(6, 2).T for _ in range(2)]
        workload = ModuleWorkload(nn.Identity(), [*wide, *tall])
        cases = workload.cases(torch.float32)
        assert [(case.name, case.repeat) for case in cases] == [("shape 1", 2), ("shape 2", 1)]
        assert [case.args[0].stride() for case in cases] == [(6, 1), (1, 2)]
        assert workload.properties(nn.Identity()) == {"several_shapes"}

        alone = ModuleWorkload(nn.Identity(), wide)
        assert [(case.name, case.repeat) for case in alone.cases(torch.float32)] == [("forward", 1)]
        assert not alone.properties(nn.Identity())
        reference = alone.observe(run_of(alone.build()), torch.float32)
        off = [torch.randn(2, 6) * 0.01 for _ in range(4)]
        seen = iter(off)
        found = alone.compare(reference, alone.observe(lambda case: case.args[0] + next(seen), torch.float32))
        judged = torch.cat(off[1:3]).norm() / torch.cat(wide[1:3]).norm()
        first = off[0].norm() / wide[0].norm()
        assert found.drop == pytest.approx(max(judged, first).item(), rel=1e-5)
        assert found.samples in (24, 12)
        assert found.drop_high >= rms_bounds(24)[1] * judged * (1 - 1e-5)

    def test_another_shape_of_as_many_numbers_is_another_output(self):
        workload = ModuleWorkload(nn.Identity(), [torch.rand(2, 6) for _ in range(3)])
        reference = workload.observe(run_of(workload.build()), torch.float32)
        turned = workload.observe(lambda case: case.args[0].reshape(6, 2), torch.float32)
        with pytest.raises(WorkloadError, match=r"shape \[6, 2\] where the original has \[2, 6\]"):
            workload.compare(reference, turned)

    def test_an_input_that_nothing_changes_stands_beside_one_that_is_changed(self):
        class Clamps(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.clamp_(min=0).sum(-1)

        workload = ModuleWorkload(Clamps(), [torch.rand(2, 6), torch.rand(2, 6), -torch.rand(2, 6)])
        seen = [workload.observe(run_of(workload.build()), torch.float32) for _ in range(2)]
        assert workload.compare(*seen).drop == 0.0

    def test_inputs_that_are_named_tuples_have_shapes(self):
        packed = [nn.utils.rnn.pack_sequence([torch.rand(n, 4), torch.rand(2, 4)]) for n in (5, 5, 3)]
        workload = ModuleWorkload(nn.LSTM(4, 4), [(each,) for each in packed])
        assert [case.name for case in workload.cases(torch.float32)] == ["shape 1", "shape 2"]

    def test_what_calibrated_and_fares_worse_counts_as_it_is(self):
        inputs = [torch.rand(2, 6) for _ in range(3)]
        workload = ModuleWorkload(nn.Identity(), inputs)
        reference = workload.observe(run_of(workload.build()), torch.float32)
        seen = iter((1.5, 1.01, 1.01))
        found = workload.compare(
            reference, workload.observe(lambda case: case.args[0] * next(seen), torch.float32)
        )
        assert found.drop == found.drop_high == pytest.approx(0.5)

    def test_one_shape_of_several_inputs_may_be_dynamic(self):
        inputs = [torch.rand(2, 6), torch.rand(2, 6)]
        workload = ModuleWorkload(nn.Identity(), inputs, dynamic=({0: torch.export.Dim("rows")},))
        assert [case.dynamic for case in workload.cases(torch.float32)] == [workload.dynamic]
        with pytest.raises(WorkloadError, match=r"dynamic= is for one shape of inputs.*2 shapes"):
            ModuleWorkload(nn.Identity(), [torch.rand(2, 6), torch.rand(3, 6)], dynamic=workload.dynamic)

    @pytest.mark.parametrize(
        ("inputs", "apart"),
        [
            ([torch.ones(2, 3)] * 3, None),
            ([torch.ones(2, 3)] * 8, range(6, 8)),
            ([*[torch.ones(2, 3)] * 7, torch.ones(4, 3)], None),  # a shape of its own is judged by the search
        ],
    )
    def test_inputs_that_judge_what_was_chosen(self, inputs, apart):
        workload = ModuleWorkload(nn.Identity(), inputs)
        last = workload.unseen()
        assert (last and last.sample) == apart
        assert ModuleWorkload(nn.Identity(), inputs, metric=lambda model: 1.0).unseen() is None

    def test_a_classifier_without_classes(self):
        workload = ModuleWorkload(nn.Flatten(0), torch.tensor(1.0), task="classification")
        with pytest.raises(WorkloadError, match="logits with the classes as last axis"):
            workload.observe(lambda case: torch.tensor(1.0), torch.float32)

    def test_an_unknown_task(self, model):
        with pytest.raises(WorkloadError, match=r"unknown task 'detection'.*regression, classification"):
            ModuleWorkload(model, torch.ones(2, 4), task="detection")

    def test_outputs_that_cannot_be_compared(self):
        workload = ModuleWorkload(nn.Identity(), ("text",))
        with pytest.raises(WorkloadError, match=r"nothing that can be compared.*metric="):
            workload.observe(run_of(workload.build()), torch.float32)

    def test_a_metric_of_the_users_own_calls_the_model_as_it_likes(self, model):
        def mean_answer(candidate):
            assert isinstance(candidate, nn.Module)
            return candidate(torch.ones(7, 4), scale=2.0)["y"].mean()

        workload = ModuleWorkload(model, torch.ones(2, 4), metric=mean_answer)
        other: Any = workload.build()
        other.linear.weight.data.mul_(2)
        result = quality(workload, other)
        assert result.metric == "mean_answer"
        assert result.value == pytest.approx(other(torch.ones(7, 4), scale=2.0)["y"].mean().item())
        assert workload.describe()["metric"] == "mean_answer"

    @pytest.mark.parametrize(("higher", "drop"), [(True, 0.1), (False, -0.1)])
    def test_direction(self, model, higher, drop):
        values = iter([1.0, 0.9])
        workload = ModuleWorkload(
            model, torch.ones(2, 4), metric=lambda m: next(values), higher_is_better=higher
        )
        assert quality(workload, model).drop == pytest.approx(drop)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_metric_that_is_no_number(self, model, value):
        workload = ModuleWorkload(model, torch.ones(2, 4), metric=lambda m: value)
        with pytest.raises(WorkloadError, match=r"the metric '<lambda>' returned (nan|inf) for the original"):
            quality(workload, model)

    @pytest.mark.parametrize(
        "metric", [lambda m: None, lambda m: "high", lambda m: torch.ones(2), lambda m: m.missing]
    )
    def test_a_metric_that_fails(self, model, metric):
        workload = ModuleWorkload(model, torch.ones(2, 4), metric=metric)
        with pytest.raises(
            WorkloadError, match=r"the metric '<lambda>' failed\. Found: \w+Error.*returns a number"
        ):
            quality(workload, model)


@pytest.fixture
def here(own_path, tmp_path, monkeypatch):
    """A current folder for factories, with the import state restored."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


class TestFactories:
    def write(self, here, name: str, body: str) -> None:
        (here / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n{body}")

    def test_random_weights_are_the_same_at_every_call(self, here):
        self.write(here, "tw_random", "def make():\n    return nn.Linear(3, 2), torch.randn(4, 3)\n")
        before = torch.get_rng_state()
        first = from_factory("tw_random:make").build().state_dict()
        assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers were used"
        torch.rand(5)
        again = from_factory("tw_random:make").build().state_dict()
        assert all(torch.equal(first[name], again[name]) for name in first)

    def test_a_module_of_the_current_folder(self, here):
        self.write(here, "tw_good", "def make():\n    return nn.Linear(3, 2), torch.ones(4, 3)\n")
        workload = from_factory("tw_good:make")
        (case,) = workload.cases(torch.float32)
        assert workload.build()(*case.args).shape == (4, 2)
        assert workload.describe()["model"] == "tw_good:make"
        assert str(here) in sys.path  # trial processes, which are given this path, can import it too

    @pytest.mark.parametrize(
        ("name", "body", "target", "words"),
        [
            ("tw_a", "", "tw_missing:make", r"'tw_missing:make' cannot be imported.*No module named"),
            ("tw_b", "", "tw_b:make", r"cannot be imported: tw_b has no 'make'"),
            ("tw_c", "", "tw_c:", "cannot be imported"),
            ("tw_d", "def make(:\n", "tw_d:make", "cannot be imported.*SyntaxError"),
            ("tw_e", "1 / 0\n", "tw_e:make", "cannot be imported.*ZeroDivisionError"),
            (
                "tw_f",
                "def make():\n    return {}['key']\n",
                "tw_f:make",
                "the factory 'tw_f:make' failed.*KeyError",
            ),
            ("tw_g", "def make(x):\n    pass\n", "tw_g:make", "failed.*TypeError"),
            ("tw_h", "make = 5\n", "tw_h:make", "failed.*TypeError.*not callable"),
            ("tw_i", "def make():\n    return nn.Linear(1, 1)\n", "tw_i:make", r"returned Linear.*a pair"),
            ("tw_j", "def make():\n    return 1, 2\n", "tw_j:make", r"returned tuple.*a pair"),
        ],
    )
    def test_what_goes_wrong(self, here, name, body, target, words):
        self.write(here, name, body)
        with pytest.raises(ModelError, match=words):
            from_factory(target)

    def test_inputs_that_are_none(self, here):
        self.write(here, "tw_k", "def make():\n    return nn.Linear(1, 1), []\n")
        with pytest.raises(WorkloadError, match="there are no inputs"):
            from_factory("tw_k:make")


def test_what_verify_refuses_is_not_suggested(own_path, tmp_path, monkeypatch):
    (tmp_path / "again_factory.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    busy = Interval(value=2.0, low=1.0, high=3.0)
    assert "`torchwright verify` measures again" in disturbance_note(busy, from_factory("again_factory:make"))
    for workload in (
        ModuleWorkload(nn.Linear(2, 2), torch.ones(1, 2)),
        ModuleWorkload(nn.Linear(2, 2), torch.ones(1, 2), metric=lambda model: 1.0),
    ):
        assert disturbance_note(busy, workload).endswith("optimizing once more measures again")


class Drifting(nn.Module):
    """Normalizes its input in place, as careless code does."""

    def forward(self, x):
        return x.sub_(0.5).div_(0.2) * 2


def test_a_module_that_holds_a_nested_form_is_copied_without_a_warning():
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.form = pytree.tree_structure((1, [2]))

    held: Any = ModuleWorkload(Holds(), ()).build()
    assert held.form == pytree.tree_structure((1, [2]))


class TestInputsThatAreChanged:
    def test_every_call_is_given_the_users_own_values(self):
        x = torch.rand(3, 4)
        workload = ModuleWorkload(Drifting(), (x,))
        for _ in range(3):
            assert quality(workload, Drifting()).drop == 0
            assert torch.equal(workload.cases(torch.float32)[0].args[0], x)

    def test_tensors_stay_laid_out_as_they_were_and_keep_their_memory_in_common(self):
        x = torch.ones(6, 8)
        given = (x[::2], x.t(), x[:1].expand(3, 8))
        own = own_tensors(given)
        assert [t.stride() for t in own] == [t.stride() for t in given]
        assert not changed_tensors(given, own)
        own[1].zero_()
        assert list(changed_tensors(given, own)) == [0, 1, 2]
        assert x.all()

    @pytest.mark.parametrize("task", ["regression", "classification"])
    def test_what_no_longer_changes_its_input_is_another_function(self, task):
        workload = ModuleWorkload(Drifting(), torch.rand(3, 4), task=task)
        with pytest.raises(WorkloadError, match="does not change the same inputs in place"):
            quality(workload, lambda x: Drifting()(x.clone()))

    def test_a_wrong_change_counts_as_a_wrong_output(self):
        def other(x):
            answer = Drifting()(x)
            x.mul_(1.5)
            return answer

        assert quality(ModuleWorkload(Drifting(), torch.rand(3, 4)), other).drop == pytest.approx(0.5)

    def test_nan_and_minus_zero_are_no_change(self):
        workload = ModuleWorkload(nn.Identity(), torch.tensor([math.nan, -0.0, math.inf]))
        (seen,) = workload.observe(run_of(workload.build()), torch.float32)
        assert not seen.changed


class TestCalibration:
    def test_some_of_several_inputs_calibrate(self, model):
        workload = ModuleWorkload(model, [torch.rand(2, 4) for _ in range(8)])
        first = [case.args[0] for case in workload.calibration(torch.float32)]
        assert [x.tolist() for x in first] == [x.tolist() for (x,), _ in workload.inputs[:2]]
        assert workload.calibrates_apart()

    def test_int8_is_judged_on_inputs_that_it_has_not_seen(self):
        """The second input is ten times as large as the one that sets the scales: it was calibrated on both."""
        small = torch.rand(4, 4)
        workload = ModuleWorkload(nn.Sequential(nn.Linear(4, 3)), [small, 10 * small])
        target = make_target(workload, get_device("cpu").identify())
        ranges = observe_inputs(target, (nn.Linear,))
        assert [scale for scale, _ in ranges.values()] == [pytest.approx(small.max().item() / STEPS)]

    def test_one_input_calibrates_and_is_judged_and_the_report_says_so(self, model):
        x = torch.rand(2, 4)
        alone, several = ModuleWorkload(model, x), ModuleWorkload(model, [x, x])
        best: Any = SimpleNamespace(steps=(Step(name="int8_static"), Step(name="dtype")))
        outcome: Any = SimpleNamespace(best=best)
        assert not calibration_notes(outcome, several)
        (note,) = calibration_notes(outcome, alone)
        assert note.startswith("int8_static was calibrated on the inputs it is judged by")
