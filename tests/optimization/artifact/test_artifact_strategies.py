"""What an artifact does to the process that loads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchwright.core.records import Step
from torchwright.optimization.artifact.strategies import ArtifactLoader


def test_an_allocator_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading cannot bring one into a process that runs already: the speed was another process's."""
    notices: list[str] = []
    steps = (Step(name="allocator", options={"kind": "mimalloc"}),)
    opened: Any = SimpleNamespace(recipe=SimpleNamespace(steps=steps), _process=True, say=notices.append)
    ArtifactLoader._settle_process(opened)
    assert "timed in a process with mimalloc, and this one was started without it" in notices.pop()
    monkeypatch.setattr("torchwright.optimization.artifact.strategies.is_there", lambda kind: True)
    ArtifactLoader._settle_process(opened)
    assert notices == []
