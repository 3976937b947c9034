"""Parts whose workers die: every row is answered or rejected once, and a broken machine still ends the run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchwright.map.compute import Computed, OutputForm
from torchwright.map.isolation import KILLERS, Isolation, WorkerDied
from torchwright.map.plan import Part
from torchwright.map.sources import Record

FORM = OutputForm(form="jsonl", fields={"text": "string"})


def part_of(rows: int) -> Part:
    records = [Record(row + 1, str(row).encode()) for row in range(rows)]
    return Part(index=3, source="a", kind="text", first_row=100, records=records)


def answer(part: Part) -> Computed:
    """The answer of a worker that lives: its rows."""
    rows = [{"row": part.first_row + place} for place in range(len(part.records))]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    return Computed(index=3, answers=lines, rejected=b"", rows=len(rows), rejected_rows=0, seconds=1.0)


def run(part: Part, killers: set[int], *, retry: bool = True) -> tuple[list[tuple[Part, Computed]], int]:
    """Compute a part whose rows `killers` end their workers; return what is finished, and the deaths."""
    isolation, waiting, found, deaths = Isolation(FORM), [part], list[tuple[Part, Computed]](), 0
    while waiting:
        piece = waiting.pop()
        places = range(piece.first_row, piece.first_row + len(piece.records))
        if killers & set(places):
            deaths += 1
            again, done = isolation.failed(piece, "its worker died", retry=retry)
            waiting += again
        else:
            done = isolation.done(piece, answer(piece))
        found += done
    return found, deaths


@settings(deadline=None)
@given(st.integers(1, 40), st.sets(st.integers(100, 139), max_size=KILLERS), st.booleans())
def test_every_row_is_answered_or_rejected_once_and_in_order(
    rows: int, killers: set[int], retry: bool
) -> None:
    killers = {row for row in killers if row < 100 + rows}
    part = part_of(rows)
    [(found, whole)], deaths = run(part, killers, retry=retry)
    assert found is part
    assert [json.loads(line)["row"] for line in whole.answers.splitlines()] == [
        row for row in range(100, 100 + rows) if row not in killers
    ]
    assert [json.loads(line)["row"] for line in whole.rejected.splitlines()] == sorted(killers)
    assert (whole.rows, whole.rejected_rows) == (rows, len(killers))
    if not killers:
        assert deaths == 0


def test_one_row_costs_a_worker_for_each_halving() -> None:
    _, deaths = run(part_of(32), {117})
    assert deaths == 2 + 4 + 2  # the whole part twice, 16, 8, 4 and 2 rows, the row twice


def test_an_accident_rejects_nothing() -> None:
    isolation, part = Isolation(FORM), part_of(1)
    assert isolation.failed(part, "its worker died", retry=True) == ([part], [])
    assert isolation.done(part, answer(part)) == [(part, answer(part))]


def test_so_many_killers_end_the_run() -> None:
    with pytest.raises(WorkerDied, match="17 rows have ended their workers"):
        run(part_of(40), set(range(100, 140)))
