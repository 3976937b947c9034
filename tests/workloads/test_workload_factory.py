"""Factories as targets: Python files with and without a function, and names that nearly exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchwright.core.errors import ModelError
from torchwright.workloads.detect import from_target
from torchwright.workloads.factory import functions_of, names_factory

SOURCE = """
import torch
from torch import nn
raise_if_imported = {raises}
def helper(x): return x
def _private(): return None
def prepare(flag=False, *, deep=True): return None
def make(): return nn.Linear(4, 4), torch.zeros(1, 4)
"""


@pytest.fixture
def folder(own_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "factory_net", raising=False)
    (tmp_path / "factory_net.py").write_text(SOURCE.format(raises=False))
    (tmp_path / "factory_broken.py").write_text(SOURCE.format(raises="1 / 0"))
    return tmp_path


@pytest.mark.parametrize("target", ["factory_broken.py", "factory_broken"])
def test_a_file_without_a_function_is_told_its_functions_and_not_imported(folder: Path, target: str) -> None:
    with pytest.raises(ModelError, match=rf"did you mean {target}:make\?.*: make, prepare\."):
        from_target(target)
    assert "factory_broken" not in sys.modules


def test_a_file_without_functions_is_told_what_to_write(folder: Path) -> None:
    (folder / "empty.py").write_text("def run(model): ...")
    with pytest.raises(ModelError, match=r"without a function that could return a model.*def make\(\)"):
        from_target("empty.py")
    (folder / "wrong.py").write_text("def (")
    with pytest.raises(ModelError, match="without a function"):
        from_target("wrong.py")


def test_a_function_of_a_file_is_called(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "below" / "factory-below.py").write_text(SOURCE.format(raises=False))
    for target in ("factory_net.py:make", "factory_net:make", "below/factory-below.py:make"):
        assert from_target(target).describe()["model"] == target


def test_a_function_that_nearly_exists_is_suggested(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean 'factory_net\.py:make'"):
        from_target("factory_net.py:mak")
    with pytest.raises(ModelError, match=r"there is no file nowhere\.py"):
        from_target("nowhere.py:make")
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        from_target("factory_broken.py:make")


def test_a_file_of_a_name_that_is_taken_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text(SOURCE.format(raises=False))
    with pytest.raises(ModelError, match=r"another module of the name 'json'.*rename json.py"):
        from_target("json.py:make")


def test_a_path_with_a_colon_is_not_a_factory() -> None:
    assert not names_factory("C:/models/llama")
    assert not names_factory("models/a:b")
    assert names_factory("some/where.py:make")
    assert names_factory("package.module:make")


def test_what_no_module_is_has_no_functions(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_bytes(b"\x00\xff")
    assert functions_of(tmp_path / "data.py") == []


def test_a_workload_without_a_model_is_told_apart_from_a_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="'encoder' is the name of a workload that brings no model"):
        from_target("encoder")
    assert from_target("language").describe()["model"] == "bundled"


def test_a_hub_id_without_a_connection_says_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"the hub is offline here.*HF_HUB_OFFLINE is set"):
        from_target("some-owner/some-model")


def test_a_folder_that_nearly_exists_is_suggested(folder: Path) -> None:
    (folder / "my-llama").mkdir()
    with pytest.raises(ModelError, match=r"there is no model at my-lama; did you mean my-llama\?"):
        from_target("my-lama")
