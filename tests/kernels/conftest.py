"""Every instruction set that this machine has, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from torchwright.kernels import ops
from torchwright.kernels.cpu import build


@pytest.fixture
def native() -> Any:
    """The compiled operators."""
    missing = build.load_fault()
    if missing:
        pytest.skip(f"no kernels: {missing}")
    return ops.native


@pytest.fixture(params=[*build.X86, "portable"])
def isa(request: pytest.FixtureRequest, native: Any) -> Iterator[str]:
    """The operators run on this instruction set, and afterwards on the one from before."""
    if request.param not in native.isas():
        pytest.skip(f"this machine has {', '.join(native.isas())}")
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)
