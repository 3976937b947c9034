"""Artifacts that gained nothing, or whose compiled code is left aside, answer all the same."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchwright as tw
from in_process import own_cache, trials_in_process
from small_artifacts import INPUT, made, mlp, seal
from torchwright.cli import main
from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.optimization import api
from torchwright.optimization.artifact import folder as artifact
from torchwright.report import view
from torchwright.workloads.module import from_factory

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.first(x).relu())

def make():
    torch.manual_seed(0)
    return Net().eval(), torch.linspace(-1, 1, 64).reshape(4, 16)
"""


class Branches(nn.Module):
    """No graph of torch.export's: it branches by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class Squeezes(nn.Module):
    """One row has another shape than one of several, which torch.export does not see: it supposes two at least."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze()


@pytest.fixture(autouse=True)
def nothing_gained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every comparison finds a slowdown."""
    trials_in_process(monkeypatch, 0.9, cache=tmp_path / "cache")
    yield
    torch.compiler.reset()


def saved(tmp_path: Path, model: nn.Module) -> Path:
    result = tw.optimize(model, INPUT, techniques=["dtype"], max_drop=0.05, progress=False)
    assert result.recipe.steps == ()
    assert result.recipe.runs_as == view.OWN_MODULE
    assert result.model(INPUT).equal(model(INPUT)), "the caller's own module runs in this process"
    return result.save(tmp_path / "saved")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        trials_in_process(patch, 0.9, cache=folder / "cache")
        return saved(folder, mlp())


@pytest.fixture
def path(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil, whose signature is still this user's."""
    own_cache(monkeypatch, written.parent / "cache")
    return Path(shutil.copytree(written, tmp_path / "saved"))


@pytest.mark.slow
def test_the_original_answers_by_its_graph(path: Path) -> None:
    loaded = tw.load(path)
    assert loaded.how == "graphs, uncompiled"
    assert any("exported graph answers" in notice for notice in loaded.notices)
    torch.testing.assert_close(loaded.model(INPUT), mlp()(INPUT))
    assert tw.load(path, model=mlp()).how == view.OWN_MODULE


@pytest.mark.filterwarnings("ignore::torchwright.core.errors.SlowerCall")
@pytest.mark.parametrize("rows", [*(pytest.param(rows, marks=pytest.mark.slow) for rows in (0, 1, 3)), 9])
def test_another_batch_is_answered(path: Path, rows: int) -> None:
    x = torch.randn(rows, 16)
    torch.testing.assert_close(tw.load(path).model(x), mlp()(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchwright.core.errors.SlowerCall")
@pytest.mark.parametrize("dynamic", [None, ({0: torch.export.Dim("rows")},)], ids=["found", "given"])
def test_every_batch_is_answered_where_one_row_is_another_graph(tmp_path: Path, dynamic: object) -> None:
    """A batch of one was refused: "this model was compiled for other calls"."""
    model = Squeezes().eval()
    result = tw.optimize(model, INPUT, dynamic=dynamic, techniques=["dtype"], max_drop=0.05, progress=False)
    loaded = tw.load(result.save(tmp_path / "saved"))
    for rows in (1, 2, 4, 9):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(loaded.model(x), model(x))


def test_another_shape_is_refused_in_words_or_answered_by_the_original(path: Path) -> None:
    x = torch.randn(2, 3, 16)
    with pytest.raises(WorkloadError, match=r"Found: \(float32\[2, 3, 16\]\).*original=MODEL"):
        tw.load(path).model(x)
    with pytest.warns(UserWarning, match="the original"):
        torch.testing.assert_close(tw.load(path, original=mlp()).model(x), mlp()(x))


def test_it_loads_without_trust_and_proves_itself(path: Path) -> None:
    (path / artifact.SIGNATURE).unlink()
    torch.testing.assert_close(tw.load(path).model(INPUT), mlp()(INPUT))
    tensors = path / "programs.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    with pytest.raises(ArtifactError, match=r"changed|damaged|checksum"):
        tw.load(path)
    seal(path)
    with pytest.raises(ArtifactError, match="self-test"):
        tw.load(path)


@pytest.mark.slow
def test_it_is_verified_timed_and_exported(path: Path, tmp_path: Path) -> None:
    found = api.verify(path)
    assert (found["verdict"], found["turns"], found["drop"]) == ("holds", 0, 0.0)
    assert api.bench(str(path))["runs_as"] == "graphs, uncompiled"
    assert api.bench(str(path), batch=3)["batch"] == 3
    exported = tw.export(path, to="pt2", out=tmp_path / "exported")
    assert exported.report["verdict"] == "holds"
    torch.testing.assert_close(exported.run(INPUT), mlp()(INPUT))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchwright.core.errors.StandIn")
@pytest.mark.parametrize("form", ["dataclass", "named tuple"])
def test_instances_of_a_scripts_classes_are_answered_and_verified(tmp_path: Path, form: str) -> None:
    """Trials cannot import them: "Can't pickle <class '__main__.Batch'>" left such artifacts without a model."""

    @dataclass
    class Batch:
        x: torch.Tensor
        scale: torch.Tensor | None = None

    Pair = namedtuple("Pair", "x scale")
    Pair.__qualname__ = f"{Batch.__qualname__}.Pair"

    @dataclass
    class Output(OrderedDict[str, Any]):
        logits: torch.Tensor | None = None

        def __post_init__(self) -> None:
            self["logits"] = self.logits

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, batch: Any) -> Output:
            y = self.layers(batch.x)
            return Output(logits=y if batch.scale is None else y * batch.scale)

    model, given = Net().eval(), Batch(INPUT) if form == "dataclass" else Pair(INPUT, torch.ones(4, 1))
    result = tw.optimize(model, (given,), techniques=["dtype"], max_drop=0.05, progress=False)
    path = result.save(tmp_path / "saved")
    torch.testing.assert_close(tw.load(path).model(given).logits, model(given).logits)
    found = api.verify(path)
    assert (found["verdict"], found["drop"]) == ("holds", 0.0)
    assert api.bench(str(path))["runs_as"] == "graphs, uncompiled"


def test_a_search_that_keeps_nothing_keeps_a_graph(tmp_path: Path) -> None:
    torch.testing.assert_close(tw.load(saved(tmp_path, mlp())).model(INPUT), mlp()(INPUT))


def test_a_model_that_does_not_export_says_why_it_is_not_there(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="holds no model"):
        path = saved(tmp_path, Branches().eval())
    notes = json.loads((path / "recipe.json").read_text())["notes"]
    assert any("no graph of the model is in the artifact: torch.export cannot" in note for note in notes)
    with pytest.raises(ArtifactError, match="holds no model"):
        tw.load(path)


@pytest.mark.slow
def test_the_command_lines_artifact_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "answers_net.py").write_text(FACTORY)
    words = ["optimize", "answers_net.py:make", "--without", "compile", "-o", "out", "--quiet"]
    assert main(words) == 0
    model, x = from_factory("answers_net.py:make").model, INPUT
    torch.testing.assert_close(tw.load("out").model(x), model(x))
    assert main(["verify", "out", "--quiet", "--tolerance", "0.2"]) == 0  # 0.9x is decreed


@pytest.mark.slow
def test_graphs_that_do_not_compile_here_run_uncompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("another Inductor")

    path = made(tmp_path, mlp(), ["compile"])
    monkeypatch.setattr(artifact, "same_machine", lambda then, here: "it was compiled for another torch")
    monkeypatch.setattr("torchwright.optimization.engines.compiled.program.compile_program", broken)
    shutil.rmtree(tmp_path / "cache" / "compiled", ignore_errors=True)
    loaded = tw.load(path)
    assert loaded.how == "graphs, uncompiled"
    assert any("compiling the graphs failed (RuntimeError: another Inductor)" in n for n in loaded.notices)
    torch.testing.assert_close(loaded.model(INPUT), mlp()(INPUT), rtol=1e-4, atol=1e-4)
