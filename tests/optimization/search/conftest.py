"""What several tests of the search change in their techniques."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from search_techniques import Declare, Quantize
from search_world import World
from torchwright.optimization.techniques.base import Technique, techniques


@pytest.fixture
def declare(world: World) -> Iterator[Declare]:
    """`declare(Half, tolerance=0.25)` registers a technique with other declarations in its place."""
    with contextlib.ExitStack() as stack:

        def declare(cls: type[Technique], **declared: Any) -> None:
            changed = type(cls.__name__, (cls,), declared)
            stack.enter_context(techniques.adding({cls.name: changed}))

        yield declare


@pytest.fixture
def errors_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of `quantize`'s layers add up, so that a ranking says how many layers to leave alone."""
    monkeypatch.setattr(Quantize, "errors_add", True)
