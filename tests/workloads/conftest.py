"""Fixtures that tests of workloads share."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo at the end what the test adds to the import path, such as the folder of a factory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
