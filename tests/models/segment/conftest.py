"""Models that several tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from sams import tiny_sam, tiny_sam2


@pytest.fixture(scope="module", params=[tiny_sam, tiny_sam2], ids=["sam", "sam2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))
