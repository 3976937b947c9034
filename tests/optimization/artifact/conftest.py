"""What tests of strangers' artifacts begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from folders import causal, save
from forged_graphs import free_artifact
from language_artifacts import native_artifact
from small_artifacts import made, mlp


@pytest.fixture(scope="session")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("eager"), mlp(), ["dtype"])


@pytest.fixture(scope="session")
def free(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose graph has free sizes, guards, keywords and nested inputs and outputs."""
    return free_artifact(tmp_path_factory.mktemp("free") / "artifact")


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    return native_artifact(save(causal(head_dim=16), folder / "model"), folder / "artifact")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder and a cache of the test's own; nothing may appear in the first."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))
    yield
    assert not list((tmp_path / "here").iterdir())
