"""Every instruction set that this machine has, one after another; of large grids the cases that `pairwise` chooses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from pairwise import cover

from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu import build

LARGE = 24
"""Cases of one test, above which not all are for every run."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is left out `sweep`, before pytest selects by marks."""
    here = [
        item
        for item in items
        if item.path.parent == Path(__file__).parent and isinstance(item, pytest.Function)
    ]
    for _, group in groupby(here, key=lambda item: item.parent and (item.parent.nodeid, item.originalname)):
        cases = list(group)
        if len(cases) <= LARGE:
            continue
        chosen = cover(
            [{axis: repr(value) for axis, value in case.callspec.params.items()} for case in cases]
        )
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker("sweep")


@pytest.fixture
def native() -> Any:
    """The compiled operators."""
    missing = build.load_fault()
    if missing:
        pytest.skip(f"no kernels: {missing}")
    return ops.native


@pytest.fixture(params=[*build.architecture(), "portable"])
def isa(request: pytest.FixtureRequest, native: Any) -> Iterator[str]:
    """The operators run on this instruction set, and afterwards on the one from before."""
    if request.param not in native.isas():
        pytest.skip(f"this machine has {', '.join(native.isas())}")
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)
