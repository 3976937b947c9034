"""Models and sounds that several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from whispers import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("whisper"))
