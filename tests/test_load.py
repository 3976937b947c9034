"""The machine's load, from a kernel's count that the test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwright.measure import load
from torchwright.measure.load import Load


def says(monkeypatch: pytest.MonkeyPatch, text: str, cores: int = 2) -> Load:
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    monkeypatch.setattr(load, "usable_cores", lambda: cores)
    return Load.now()


def test_the_thread_that_reads_the_count_is_not_part_of_the_load(monkeypatch):
    assert says(monkeypatch, "0.07 0.67 0.49 1/129 8744\n") == Load(running=0, cores=2)


def test_more_threads_than_cores_share_them_fairly(monkeypatch):
    found = says(monkeypatch, "3.10 0.67 0.49 21/160 8744\n")
    assert (found.slowdown, found.busy, str(found)) == (10.0, True, "load 20 on 2 cores")


def test_as_many_threads_as_cores_are_no_load(monkeypatch):
    found = says(monkeypatch, "1.00 1.00 1.00 3/160 8744\n")
    assert (found.slowdown, found.busy) == (1.0, False)


def test_one_core_is_named_in_the_singular():
    assert str(Load(running=3, cores=1)) == "load 3 on 1 core"


@pytest.mark.parametrize("text", ["", "0.07 0.67 0.49", "0.07 0.67 0.49 many/129 8744"])
def test_a_system_that_does_not_count_has_no_load(monkeypatch, text: str):
    assert says(monkeypatch, text).slowdown == 1.0
