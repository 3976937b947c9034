"""`tw.optimize` and its fellows, as a user calls them. Trials run in this process unless a test says otherwise."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchwright as tw
from in_process import own_cache, trials_in_process
from torchwright.cli import main
from torchwright.core.cpu_load import Load
from torchwright.core.errors import (
    ArtifactError,
    Inconclusive,
    ModelError,
    RefusedTechnique,
    RegressionFound,
    TrainingMode,
    UnknownName,
    WorkloadError,
)
from torchwright.core.records import Interval
from torchwright.optimization import api
from torchwright.optimization.artifact.folder import report_path
from torchwright.optimization.trial.client import Context
from torchwright.optimization.trial.session import TrialSession
from torchwright.report import view
from torchwright.workloads import accuracy

X = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


class Mlp(nn.Module):
    """Two linear layers, called by position or by name, with something to add or without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layers(x)
        return y if bias is None else y + bias


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(monkeypatch, tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison finds a speed-up of two."""
    trials_in_process(monkeypatch, 2.0)


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    trials_in_process(monkeypatch, 0.5)


def optimize(inputs: Any = X, model: nn.Module | None = None, **options: Any) -> Any:
    options = {"techniques": ["dtype"], "max_drop": 0.05, "time_budget": 60.0} | options
    return tw.optimize(model or Mlp().eval(), inputs, **options)


# ------------------------------------------------------------------------------------------- the surface


@pytest.mark.quick
def test_the_public_names_are_these_and_no_others():
    public = [
        "TorchwrightError",
        "bench",
        "compile_numpy",
        "export",
        "load",
        "load_class_segmenter",
        "load_decoder",
        "load_diffuser",
        "load_segmenter",
        "load_seq2seq",
    ]
    public += ["load_speech", "optimize", "sequence_parallel", "verify"]
    assert dir(tw) == public
    assert sorted(tw.__all__) == public
    assert all(getattr(tw, name) is not None for name in public)
    with pytest.raises(AttributeError, match="optimise"):
        tw.optimise  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------------------------------------------- inputs


@pytest.mark.quick
@pytest.mark.plain("list")
@pytest.mark.parametrize(
    ("inputs", "call"),
    [
        (X, lambda model: model(X)),
        ((X, X[:1, :8]), lambda model: model(X, X[:1, :8])),
        ({"x": X, "bias": X[:1, :8]}, lambda model: model(x=X, bias=X[:1, :8])),
        ([(X,), {"x": X[:2]}], lambda model: model(x=X[:2])),
    ],
    ids=["tensor", "tuple", "dict", "list"],
)
def test_every_form_of_inputs_gives_a_model_called_like_the_original(doubled: None, inputs: Any, call: Any):
    model = Mlp().eval()
    result = optimize(inputs, model)
    torch.testing.assert_close(call(result.model), call(model), rtol=0.05, atol=0.02)
    assert len(result.recipe.baseline.cases) == (2 if isinstance(inputs, list) else 1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("inputs", "words"), [([], "there are no inputs"), ("text", "of type str"), (3, "of type int")]
)
def test_what_is_no_input_is_said_in_words(inputs: Any, words: str):
    with pytest.raises(WorkloadError, match=words):
        optimize(inputs)


def test_inputs_that_the_model_rejects_are_said_in_words(doubled: None):
    with pytest.raises(ModelError, match=r"fails on its own inputs \(call 'forward'\).*mat1 and mat2"):
        optimize(torch.ones(4, 3))


def test_what_is_no_module_is_said_in_words():
    with pytest.raises(ModelError, match=r"the model is a function.*Next: torchwright\.compile_numpy"):
        tw.optimize(lambda x: x, X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match=r"Next: give an instance: Linear\("):
        tw.optimize(nn.Linear, X)  # pyright: ignore[reportArgumentType]


def test_a_name_is_optimized_as_on_the_command_line(doubled: None, factory: str):
    result = optimize(None, factory)
    assert result.recipe.workload["model"] == factory


@pytest.mark.parametrize(
    ("target", "options", "error", "words"),
    [
        ("bundled", {"inputs": X}, WorkloadError, "inputs= cannot be combined with the model 'bundled'"),
        ("bundled", {"task": "classification"}, WorkloadError, "task= cannot be combined"),
        ("bundled", {"batchh": 3}, WorkloadError, "the option batchh"),
        ("nowhere", {}, ModelError, "there is no model at nowhere"),
        (Mlp().eval(), {"inputs": X, "max_dorp": 0.1}, UnknownName, "did you mean 'max_drop'"),
    ],
)
def test_what_does_not_go_with_a_target_is_refused(
    target: Any, options: dict[str, Any], error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        tw.optimize(target, **options)


# ------------------------------------------------------------------------------------------------- result


@pytest.mark.slow
def test_the_callers_model_is_the_same_to_the_last_bit(doubled: None):
    model = Mlp().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    with pytest.warns(TrainingMode):
        optimize(X, model)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(type(module).__module__.startswith(("torch.nn", __name__)) for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads


@pytest.mark.quick
def test_a_result_says_everything(doubled: None, tmp_path: Path):
    result = optimize()
    (rung,) = result.steps
    assert (str(rung.step), rung.kept, rung.status, rung.reason) == ("dtype", True, "kept", "2.00x faster")
    assert rung.speedup == rung.total_speedup == result.speedup == Interval(value=2.0, low=1.98, high=2.02)
    assert rung.memory_bytes > 0
    assert rung.quality.drop_high <= 0.05
    assert rung.coverage[0].changed == rung.coverage[0].total == 2
    assert rung.compile_seconds is None
    text = str(result)
    assert "dtype" in text
    assert "2.00x" in text
    assert repr(result) == "Result(speedup=2.00x [1.98, 2.02], steps=dtype)"
    assert result.recipe.search_seconds <= 1.1 * 60
    assert result.verdict == "faster"

    saved = result.save(tmp_path / "deep" / "out")
    loaded = tw.load(saved)
    assert loaded.recipe == result.recipe
    torch.testing.assert_close(loaded.model(X), result.model(X))
    assert report_path(saved).read_text(encoding="utf-8").startswith("<!")


@pytest.mark.slow
def test_progress_is_shown_unless_told_not_to(doubled: None, capsys: pytest.CaptureFixture[str]):
    optimize(techniques=[])
    assert "measuring the original" in capsys.readouterr().err
    optimize(techniques=[], progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_result_cleans_up_after_itself(doubled: None):
    result = optimize(techniques=[])
    path = result.path
    assert path.is_dir()
    del result
    gc.collect()
    assert not path.parent.exists()


@pytest.mark.slow  # `test_artifact_answers` saves and loads what nothing made faster
def test_nothing_in_budget_gives_the_original_and_says_so(doubled: None):
    model = Mlp().eval()
    result = optimize(X, model, max_drop=0.0)
    assert result.recipe.steps == ()
    assert result.speedup.value == 1.0
    assert "nothing was both faster and within the accuracy budget" in result.recipe.notes[0]
    assert result.steps[0].status == "dropped"
    assert "the budget is 0.00%" in result.steps[0].reason
    torch.testing.assert_close(result.model(X), model(X))


@pytest.mark.slow
def test_nothing_faster_gives_the_original(halved: None):
    result = optimize()
    assert result.recipe.steps == ()
    assert result.steps[0].reason == "0.50x [0.49, 0.51]: slower"


# ------------------------------------------------------------------------------------------------- metric


@pytest.mark.slow
def test_a_metric_of_the_users_own_is_what_the_budget_is_held_against(doubled: None):
    def score(model: Any) -> float:
        return float(model(X).detach().abs().mean())

    result = optimize(metric=score)
    assert result.steps[0].quality.metric == "score"
    assert result.steps[0].quality.reference == pytest.approx(score(Mlp().eval()), rel=1e-3)


def no_number(model: Any) -> float:
    return math.nan


def raises(model: Any) -> float:
    raise RuntimeError("labels are missing")


@pytest.mark.plain("no_number-nan")
@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (no_number, r"nan"),
        (raises, r"'raises' failed.*labels are missing"),
        (lambda model: "good", r"'<lambda>' failed"),
    ],
)
def test_a_metric_that_is_none_is_said_in_words(doubled: None, metric: Any, words: str):
    with pytest.raises(WorkloadError, match=words):
        optimize(metric=metric)


# -------------------------------------------------------------------------------------------------- names


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"techniques": ["dtyp"]}, UnknownName, "did you mean 'dtype'"),
        ({"techniques": ["dtype:typ=x"]}, UnknownName, "unknown option of dtype 'typ'.*did you mean 'dtype'"),
        ({"techniques": ["dtype:dtype=int3"]}, RefusedTechnique, "bfloat16 | float16"),
        ({"without": ["compil"]}, UnknownName, "did you mean 'compile'"),
        ({"device": "gpu"}, tw.TorchwrightError, "gpu"),
        ({"task": "guess"}, WorkloadError, "regression, classification"),
        ({"max_drop": -1.0}, WorkloadError, "is not a share.*zero or more"),
        ({"time_budget": 0.0}, WorkloadError, "time above 0 seconds"),
    ],
)
def test_a_name_or_number_that_cannot_be_is_said_before_anything_runs(options: Any, error: Any, words: str):
    with pytest.raises(error, match=words):
        optimize(**options)


def test_a_technique_asked_for_that_cannot_run_is_an_error(doubled: None):
    with pytest.raises(RefusedTechnique, match=r"cannot run here.*compiled"):
        optimize(techniques=["int8_dynamic"])


# --------------------------------------------------------------------------------------- verify and bench


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in a file of the current folder."""
    return write_shop(tmp_path, monkeypatch)


def write_shop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    (folder / "shop.py").write_text(
        "import torch\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(16, 8)), (torch.ones(2, 16),)\n"
    )
    return "shop:make"


@pytest.fixture(scope="module")
def found_faster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of that model, which `optimize` found to be twice as fast."""
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch:
        trials_in_process(patch, 2.0, cache=tmp_path_factory.getbasetemp() / "cache")
        result = optimized(write_shop(folder, patch))
        assert result.path == Path("torchwright-shop-make")
    return folder / result.path


@pytest.fixture
def artifact_of_factory(factory: str, found_faster: Path) -> Path:
    """A copy in the current folder."""
    return Path(shutil.copytree(found_faster, found_faster.name))


@pytest.fixture
def unexportable(factory: str) -> str:
    """A model in the same file that branches on its data."""
    with Path("shop.py").open("a", encoding="utf-8") as file:
        file.write(
            "class Branching(torch.nn.Linear):\n"
            "    def forward(self, x):\n"
            "        y = super().forward(x)\n"
            "        return y if float(y.sum()) > 0 else -y\n"
            "def branching():\n"
            "    torch.manual_seed(0)\n"
            "    return Branching(16, 8), (torch.ones(2, 16),)\n"
        )
    return "shop:branching"


def optimized(target: str, **options: Any) -> Any:
    options = {
        "max_drop": 0.05,
        "objective": "latency",
        "time_budget": 60.0,
        "batch": None,
        "prompt_tokens": None,
        "new_tokens": None,
        "tokens": None,
        "eval_text": None,
        "with_steps": ["dtype"],
        "without": [name for name in api.techniques.names() if name != "dtype"],
        "device": "cpu",
        "out": None,
        "seed": 0,
        "on_event": lambda event: None,
        "command": "torchwright optimize",
    } | options
    return api.optimize_cli(target, **options)


def test_verify_measures_again_and_holds_it_against_the_recipe(
    doubled: None, artifact_of_factory: Path, monkeypatch: pytest.MonkeyPatch
):
    found = api.verify(artifact_of_factory)
    assert found["verdict"] == "holds"
    assert found["runs_as"] == found["promised_as"] == "graphs, uncompiled"
    assert found["speedup"] == found["promised"] == "2.00x [1.98, 2.02]"
    assert found["drop_high"] <= 0.05
    json.dumps(found)

    def measure(*found: Interval, **options: Any) -> dict[str, Any]:
        values = iter(found)
        with monkeypatch.context() as patch:
            patch.setattr("torchwright.optimization.api.paired_speedup", lambda before, after: next(values))
            return api.verify(artifact_of_factory, **options)

    slow, busy = Interval(value=1.7, low=1.6, high=1.75), Interval(value=1.27, low=0.5, high=1.75)
    promised = Interval(value=2.0, low=1.9, high=2.1)
    with pytest.raises(RegressionFound, match=r"slower than it was.*1.70x") as regression:
        measure(slow)
    assert regression.value.facts["verdict"] == "broken"
    assert measure(slow, tolerance=0.2)["verdict"] == "holds"
    assert measure(busy, promised)["turns"] == 18
    with pytest.raises(
        Inconclusive, match=r"was not decided.*in 9 turns.*1.78x at least.*--retries"
    ) as unknown:
        measure(busy, retries=0)
    assert unknown.value.facts["verdict"] == "inconclusive"

    real = accuracy.relative_error
    monkeypatch.setattr(
        accuracy, "relative_error", lambda a, b: dataclasses.replace(real(a, b), drop_high=0.5)
    )
    with pytest.raises(RegressionFound, match=r"over its accuracy budget.*up to 50.00%.*5.00%") as over:
        api.verify(artifact_of_factory)
    assert over.value.facts["drop_high"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("promised", "least"),
    [
        (Interval(value=8.5, low=8.0, high=9.0), 7.2),
        (Interval(value=8.5, low=8.0, high=9.0, busy=True), 3.6),
        (Interval(value=1.5, low=1.4, high=1.6, busy=True), 0.9),
        (Interval(value=0.8, low=0.8, high=0.9, busy=True), 0.72),
    ],
)
def test_a_claim_of_a_busy_machine_holds_to_a_factor_of_two_and_is_not_slower(
    doubled: None, factory: str, monkeypatch: pytest.MonkeyPatch, promised: Interval, least: float
):
    result = optimized(factory)
    opened = api.artifact.open_artifact(result.path)
    recipe = dataclasses.replace(opened[0], speedup=promised)
    monkeypatch.setattr(api.artifact, "open_artifact", lambda path: (recipe, *opened[1:]))
    monkeypatch.setattr(api, "paired_speedup", lambda before, after: Interval(value=9, low=8.9, high=9.1))
    assert api.verify(result.path)["at_least"] == pytest.approx(least)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ("weight.data.mul_(-3)", "must return the same weights at every call"),
        ("append(torch.nn.Linear(8, 8))", "a model of other layers"),
    ],
)
def test_verify_says_that_a_factory_returns_another_model(
    doubled: None, factory: str, change: str, advice: str
):
    result = optimized(factory)
    shop = Path("shop.py").read_text()
    target = "model" if change.startswith("append") else "model[0]"
    changed = shop.replace("    return ", "    model, x = ") + f"    {target}.{change}\n    return model, x\n"
    Path("shop.py").write_text(changed)
    sys.modules.pop("shop")
    with pytest.raises(RegressionFound, match=f"over its accuracy budget.*{advice}"):
        api.verify(result.path)


@pytest.mark.slow
def test_verify_on_a_busy_machine_is_not_measured_and_no_regression(
    doubled: None, factory: str, monkeypatch: pytest.MonkeyPatch
):
    result = optimized(factory)
    monkeypatch.setattr("torchwright.optimization.trial.session.TrialSession.waited", lambda session: 0.9)
    busy = partial(Context, load=lambda: Load(running=20, cores=2))
    monkeypatch.setattr("torchwright.optimization.rebuild.Context", busy)
    slow = Interval(value=1.1, low=1.0, high=1.2)
    with monkeypatch.context() as patch:
        patch.setattr("torchwright.optimization.api.paired_speedup", lambda before, after: slow)
        with pytest.raises(Inconclusive, match="was not measured: machine busy, load 20 on 2 cores") as found:
            api.verify(result.path)
    assert found.value.exit_code == 3
    assert (found.value.facts["verdict"], found.value.facts["busy"]) == ("inconclusive", "load 20 on 2 cores")
    assert found.value.facts["turns"] == 4 * 27
    assert api.verify(result.path)["verdict"] == "holds"


@pytest.mark.slow
def test_what_holds_no_model_is_verified_and_timed_on_the_factorys(
    doubled: None, unexportable: str, capsys: pytest.CaptureFixture[str]
):
    result = optimized(unexportable)
    assert result.recipe.runs_as == view.OWN_MODULE
    assert "holds no model" in str(result)
    for found in (api.verify(result.path), api.bench(str(result.path))):
        assert found["runs_as"] == found["promised_as"] == view.OWN_MODULE
        assert found["promised"] == str(result.speedup)
    assert main(["verify", str(result.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"promised as {view.OWN_MODULE}" in shown


@pytest.mark.slow
def test_an_artifact_can_be_optimized_again(doubled: None, factory: str, tmp_path: Path):
    first = optimized(factory)
    again = optimized(str(first.path), out=str(tmp_path / "again"))
    assert again.recipe.workload == first.recipe.workload


def test_the_factory_of_a_strangers_artifact_does_not_run(
    doubled: None, artifact_of_factory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own_cache(monkeypatch, tmp_path / "another user's")
    with pytest.raises(
        ArtifactError, match=r"names a factory to run \(shop:make\), and somebody else made it"
    ):
        api.verify(artifact_of_factory)


@pytest.mark.slow
def test_verify_of_a_model_that_no_file_keeps_says_what_to_do(doubled: None):
    result = optimize()
    with pytest.raises(ArtifactError, match="a file cannot keep its code"):
        api.verify(result.path)


@pytest.mark.slow
def test_bench_times_an_artifact_by_its_self_test_and_a_model_as_it_is(doubled: None, factory: str):
    result = optimize()
    measured = api.bench(str(result.path))
    assert measured["runs_as"] == "graphs, uncompiled"
    assert measured["forward_s"] > 0
    assert measured["peak_memory_bytes"] > 0
    assert measured["forward_percent_of_bound"] > 0
    json.dumps(measured)
    assert api.bench(factory)["runs_as"] == "the original, eager"


@pytest.mark.slow
def test_bench_takes_any_number_of_rows_where_the_artifact_does(
    doubled: None, factory: str, monkeypatch: pytest.MonkeyPatch
):
    result = optimized(factory)
    assert result.recipe.rows
    timed: list[int] = []
    real = TrialSession.time

    def time(self: TrialSession) -> dict[str, float]:
        timed.append(len(self.calls.cases[0].args[0]))
        return real(self)

    monkeypatch.setattr(TrialSession, "time", time)
    measured = api.bench(str(result.path), batch=5)
    assert set(timed) == {5}
    assert measured["batch"] == 5
    assert measured["forward_s"] > 0
    assert "forward_percent_of_bound" not in measured, "the recipe counted another call"
    with pytest.raises(WorkloadError, match=r"takes no --prompt-tokens. Next: optimize again with inputs"):
        api.bench(str(result.path), prompt_tokens=5)


@pytest.mark.slow
def test_bench_of_fixed_calls_says_what_they_were_compiled_for(
    doubled: None, factory: str, unexportable: str
):
    with pytest.raises(WorkloadError, match="timed on, and takes no --batch"):
        api.bench(str(optimized(unexportable).path), batch=5)


def test_bench_of_a_process_that_dies_is_an_error_in_words(
    doubled: None, factory: str, monkeypatch: pytest.MonkeyPatch
):
    def broken(self: Any) -> None:
        raise RuntimeError("bad luck")

    monkeypatch.setattr("torchwright.optimization.trial.session.TrialSession.time", broken)
    with pytest.raises(tw.TorchwrightError, match=r"could not be measured.*RuntimeError: bad luck"):
        api.bench(factory)


# -------------------------------------------------------------------------------------- in real processes


@pytest.mark.quick
@pytest.mark.slow
def test_in_processes_of_its_own_it_gives_the_same(tmp_path: Path):
    """Once without the stand-in: whatever the clock says, there is a verdict and a model that answers right."""
    model = Mlp().eval()
    result = optimize(X, model, techniques=["dtype"])
    assert next(rung.status for rung in result.steps) in ("kept", "dropped", "removed")
    assert result.speedup.value >= 1.0
    torch.testing.assert_close(result.model(X), model(X), rtol=0.05, atol=0.02)
