"""Models and sounds that several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwright.models.speech.transcript import Options
from whispers import tiny

BELIEVED = ("test_bundled_speech", "test_voice")
"""Modules that test what is left out."""


@pytest.fixture(autouse=True)
def any_sound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep all text: tiny models write improbable text of noise."""
    if request.module.__name__ not in BELIEVED:
        monkeypatch.setitem(Options.__init__.__kwdefaults__, "only_speech", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("whisper"))
