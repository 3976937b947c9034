"""Many short requests of every kind, and those that want too much: both processes keep their memory.

`python -m benchmarks.serve.load` sends ten thousand; here are enough of them to see a leak of ten kilobytes each.
`python -m benchmarks.serve.abuse` takes ten minutes; here is half of one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from http_support import command

sys.path.append(str(Path(__file__).parents[2]))

REQUESTS = 1600


@pytest.mark.slow
def test_memory_is_steady_over_many_short_requests() -> None:
    from benchmarks.serve.load import KINDS, load

    with command("--kv-memory", "16MiB") as server:
        *rows, last = asyncio.run(load(server.url, server.process.pid, REQUESTS, at_once=16))
    share = REQUESTS // len(KINDS)
    expected = {f"{kind} 200": share for kind in KINDS} | {"refused 400": share}
    del expected["refused 200"]
    assert last["answers"] == expected
    assert last["kv_in_use"] == 0
    assert [row["answered"] for row in rows][-1] == REQUESTS
    # The HTTP process remembers compiled grammars, up to a limit; the engine's pools are full after the first third.
    assert last["growth_mb"]["http"] < 24
    assert last["growth_mb"]["engine"] < 12


@pytest.mark.slow
def test_nothing_is_lost_and_memory_is_bounded_beside_those_that_want_too_much() -> None:
    from benchmarks.serve.abuse import ATTACKS, attacked

    with command("--kv-memory", "16MiB") as server:
        before = attacked("alone", [], server.url, server.process.pid, streams=8, seconds=5)
        row = attacked("all", list(ATTACKS), server.url, server.process.pid, streams=8, seconds=30)
    assert row["lost"] == {}
    assert {answer.rsplit(" ", 1)[1] for answer in row["attackers"]} <= {"200", "400", "413", "429"}
    assert row["mb"]["http"] < before["mb"]["http"] + 500
    assert row["mb"]["engine"] < before["mb"]["engine"] + 700
