"""The rows of flight-recorder dumps (no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchwright.core.errors import TorchwrightError
from torchwright.train.hang.calls import Dump
from torchwright.train.hang.read import FINISHED, numbered_files, rank_of, read_dump
from torchwright.train.query.lines import MOST_FILES, at, text, whole
from torchwright.train.query.tables import Row, Rows

STUCK = "stuck"
"""The folder of dumps in a run folder."""


def add_dumps(run: str, folder: Path, rows: Rows) -> None:
    """Add the dumps in a run's `stuck` folder, or in the folder itself, and their calls."""
    for place in (folder / STUCK, folder / STUCK / FINISHED, folder, folder / FINISHED):
        paths = [path for path in numbered_files(place) if "rank" in path.name]
        if len(paths) > MOST_FILES:
            rows.problem(run, place.name, None, f"more than {MOST_FILES:,} dumps; the rest is left out")
        for path in paths[:MOST_FILES]:
            rank = rank_of(path)
            assert rank is not None
            try:
                dump = read_dump(path, rank)
            except TorchwrightError as error:
                rows.problem(run, str(path.relative_to(folder)), None, str(error))
                continue
            rows.add("dumps", [_dump(run, dump)])
            rows.add("calls", _calls(run, dump))


def _dump(run: str, dump: Dump) -> Row:
    stands = None if dump.stands is None else text(dump.stands)
    return (
        run,
        whole(dump.rank),
        whole(dump.world),
        at(dump.taken),
        text(dump.reason),
        dump.failed,
        dump.finished,
        stands,
    )


def _calls(run: str, dump: Dump) -> Iterator[Row]:
    for call in (*dump.calls, *dump.messages):
        yield (
            run,
            dump.rank,
            text(call.group, 200),
            whole(call.seq),
            text(call.op, 200),
            text(call.what),
            at(whole(call.created)),
            call.done,
            whole(call.peer),
            text(call.where),
        )
