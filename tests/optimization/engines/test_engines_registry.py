"""Engines from another package: they come through the same door, from the search to the artifact's user."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import torchwright as tw
from small_artifacts import INPUT, copied, edit, made
from torchwright.core.errors import ArtifactError, UnknownName
from torchwright.core.records import Coverage
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.engines.base import NATIVE, Engine, Kept, Ready, ShippingForm, engines
from torchwright.optimization.engines.dispatch.spec import CallSpec
from torchwright.optimization.engines.jit import Jit
from torchwright.optimization.techniques.base import Phase, Settings, Target, Technique, techniques
from torchwright.workloads.base import Case

FILE = "weights.safetensors"


class Table(Engine):
    """A linear layer from a file, which an artifact keeps: what it runs has never seen the model."""

    name: ClassVar[str] = "table"
    how: ClassVar[str] = "a table of weights"
    apart: ClassVar[bool] = True

    def __init__(self, file: Path) -> None:
        self.file = file

    @classmethod
    def prepare(cls, target: Target, folder: Path | None = None) -> Self:
        assert folder is not None
        layer: Any = target.model
        save_file({"weight": layer.weight, "bias": layer.bias}, folder / FILE)
        return cls(folder / FILE)

    @classmethod
    def opened(cls, folder: Path, calls: tuple[CallSpec, ...], device: str) -> Self:
        assert calls == ()
        return cls(folder / FILE)

    def __call__(self, case: Case) -> Any:
        return nn.functional.linear(*case.args, **load_file(self.file))

    @classmethod
    def ways(cls, own: ShippingForm) -> dict[ShippingForm, str]:
        return {"native": cls.name}

    def keep(self, folder: Path) -> str | None:
        shutil.copy(self.file, folder / FILE)
        return "kept as a table"

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        return Ready(how=cls.how, run=cls(kept.path / FILE))


class Counting(Engine):
    """The model itself, with its calls counted; what it keeps stands for compiled code."""

    name: ClassVar[str] = "counting"
    how: ClassVar[str] = "counted"
    cache: ClassVar[tuple[str, ...]] = ("code",)
    count: ClassVar[int] = 0
    restored: ClassVar[list[str]] = []

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    def prepare(cls, target: Target, folder: Path | None = None) -> Self:
        assert folder is None
        return cls(target.model)

    def __call__(self, case: Case) -> Any:
        Counting.count += 1
        return self.model(*case.args, **case.kwargs)

    def keep(self, folder: Path) -> str | None:
        (folder / NATIVE / "code").write_text("compiled")

    @classmethod
    def restore(cls, folder: Path) -> None:
        cls.restored.append((folder / "code").read_text())


@dataclass(frozen=True, kw_only=True)
class Outside(Technique):
    """Runs the model by an engine of another package."""

    name: ClassVar[str] = "outside"
    phase: ClassVar[Phase] = Phase.COMPILE
    by: str = ""
    """Which."""

    def apply(self, target: Target) -> None:
        target.settings.engine = self.by
        target.coverage.append(Coverage(technique=self.name, changed=1, total=1))


@pytest.fixture(autouse=True)
def installed() -> Iterator[pytest.MonkeyPatch]:
    """The package."""
    with pytest.MonkeyPatch.context() as patch:
        for registry, cls in ((engines, Table), (engines, Counting), (techniques, Outside)):
            registry.names()
            patch.setitem(registry._targets, cls.name, f"{__name__}:{cls.__name__}")
            patch.setitem(registry._loaded, cls.name, cls)
        yield patch


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(16, 8).eval()


@pytest.mark.slow
def test_one_that_keeps_files_of_its_own_is_loaded_from_them(tmp_path: Path) -> None:
    path = made(tmp_path, linear(), ["outside:by=table"])
    recipe, manifest = artifact.open_artifact(path)
    assert (recipe.engine, manifest.engine, manifest.way) == ("table", "table", "native")
    assert recipe.runs_as == Table.how
    assert "kept as a table" in recipe.notes
    assert recipe.rungs[0].compile_seconds is not None
    loaded = tw.load(path)
    assert loaded.how == Table.how
    torch.testing.assert_close(loaded.model(INPUT), linear()(INPUT))


@pytest.mark.slow
def test_one_that_keeps_no_model_runs_the_recipe_on_the_callers_module(tmp_path: Path) -> None:
    path = made(tmp_path, linear(), ["outside:by=counting"])
    assert artifact.open_artifact(path)[1].way == "module"
    with pytest.raises(ArtifactError, match="a file cannot keep its code"):
        tw.load(path)
    loaded, before = tw.load(path, model=linear()), Counting.count
    torch.testing.assert_close(loaded.model(INPUT), linear()(INPUT))
    assert Counting.count == before + 1


@pytest.mark.slow
def test_what_one_keeps_of_compiled_code_is_restored_for_who_trusts_it(tmp_path: Path) -> None:
    path = made(tmp_path, linear(), ["outside:by=counting"])
    Counting.restored.clear()
    stranger = tw.load(path, model=linear())
    assert (Counting.restored, len(stranger.notices)) == ([], 1)
    assert stranger.notices[0].startswith("compiled cache left aside: it was not built by this user")
    assert tw.load(path, model=linear(), trust=True).notices == []
    assert Counting.restored == ["compiled"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recipe.json", "manifest.json"])
def test_an_artifact_of_an_engine_that_is_not_here_says_what_to_install(
    tmp_path: Path, installed: pytest.MonkeyPatch, name: str
) -> None:
    path = copied(made(tmp_path, linear(), ["outside:by=counting"]), tmp_path)
    edit(path / name, lambda data: data.update(engine="elsewhere"))
    with pytest.raises(ArtifactError, match=r"the engine 'elsewhere'.*install the package"):
        tw.load(path, model=linear())


def test_an_engine_that_nobody_registered_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'native'.*install the package"):
        engines.get("nativ")


def fail() -> None:
    raise RuntimeError("cannot be pickled")


@pytest.mark.parametrize("cached", [lambda: None, fail])
def test_a_recipe_says_where_nothing_of_torchs_code_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: Any
) -> None:
    monkeypatch.setattr("torch.compiler.save_cache_artifacts", cached)
    monkeypatch.setattr("torchwright.optimization.engines.jit.keep_machine_code", lambda path: False)
    note = Jit(linear(), Settings()).keep(tmp_path)
    assert note is not None
    assert "compiles again at the first call" in note


@pytest.mark.parametrize(
    ("name", "own", "ways"),
    [
        ("eager", "rebuild", {"rebuild": "eager"}),
        ("eager", "module", {"graphs": "eager", "module": "eager"}),
        ("jit", "rebuild", {"package": "aot", "rebuild": "jit"}),
        ("aot", "module", {"package": "aot"}),
        ("native", "rebuild", {"native": "native"}),
    ],
)
def test_what_needs_least_of_the_caller_is_tried_first(
    name: str, own: ShippingForm, ways: dict[ShippingForm, str]
) -> None:
    assert list(engines.get(name).ways(own).items()) == list(ways.items())
