"""Fixtures that tests of devices share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`cuda_build(False)`: make torch a build for cards on a machine without one."""

    def build(available: bool) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)

    return build
