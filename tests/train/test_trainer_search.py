"""Random run files train two steps as one process in float64 does, or are refused in words (search_runs.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SEEDS, AT_ONCE = 200, 20


def found(folder: Path, seeds: Sequence[int]) -> list[dict[str, str]]:
    script = str(Path(__file__).with_name("search_runs.py"))
    words = [sys.executable, script, str(folder / "runs"), *map(str, seeds)]
    told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in told.splitlines()]


def check(verdicts: list[dict[str, str]], seeds: Sequence[int]) -> None:
    assert [verdict["seed"] for verdict in verdicts] == list(seeds)
    assert not [verdict for verdict in verdicts if verdict["status"] == "wrong"]
    assert all(verdict["why"] for verdict in verdicts if verdict["status"] == "refused")
    assert sum(verdict["status"] == "equal" for verdict in verdicts) >= len(seeds) // 3


@pytest.mark.slow
def test_a_random_run(tmp_path: Path) -> None:
    """A mixture over FSDP, context and expert parallelism, recomputed selectively, with accumulation."""
    seeds = [1003]
    check(found(tmp_path, seeds), seeds)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_random_runs(tmp_path: Path, first: int) -> None:
    seeds = range(first, first + AT_ONCE)
    check(found(tmp_path, seeds), seeds)
