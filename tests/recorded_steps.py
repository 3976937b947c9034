"""The steps that decoders play from recordings, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchwright.hardware.kernels.gpu import operators
from torchwright.models.decoder import recorded


def count_played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record steps with room for a page; return a list that gets an item for each step played from a recording.

    Without a card a recording is the calls themselves, over the tensors of the recording.
    """
    played: list[int] = []
    record = recorded.record

    def counting(compute: Any, pool: Any) -> Any:
        play = compute if operators.INTERPRETED else record(compute, pool)
        return lambda: played.append(1) or play()

    monkeypatch.setattr(recorded, "record", counting)
    monkeypatch.setattr(recorded, "FIRST_PAGES", 1)
    if operators.INTERPRETED:
        monkeypatch.setattr(recorded, "_records", lambda device: True)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return played
