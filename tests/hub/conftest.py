"""A cache of their own for tests that make model folders of single files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def gguf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of GGUF files go to a cache of the test: another place for kernels would compile them again."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("torchwright.hub.gguf.folder.private_cache", lambda name: tmp_path / "cache")
