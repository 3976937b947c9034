"""A small pipeline with random weights, fresh for each run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers", reason="pipelines are opened with diffusers")
    from pixart import write_pixart

    return write_pixart(tmp_path_factory.mktemp("pixart"), seed=random.randrange(2**31))
