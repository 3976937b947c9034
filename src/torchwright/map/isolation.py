"""Rows that end their worker: a part that does so again falls into halves, until one row is left, which is rejected.

The halves are computed like parts. Their answers are joined in the order of the rows once the last one is there: nobody
else sees more than the part.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torchwright.core.errors import TorchwrightError
from torchwright.map.compute import Computed, OutputForm, joined, rejected
from torchwright.map.plan import Part

TRIES = 2
"""Deaths of workers under the same part, or the same row: the first may be an accident of the machine."""
KILLERS = 16
"""Rows that end their workers before the run ends: so many are the fault of the machine or the model, and each costs a
dozen workers."""


class WorkerDied(TorchwrightError):
    """A worker that crashed, or that the system killed when memory ran out."""

    exit_code = 1


@dataclass
class _Halved:
    """A part that is computed in pieces."""

    part: Part
    pieces: list[tuple[Part, Computed]]
    """Those that are done."""


class Isolation:
    """The parts of one run whose workers died."""

    def __init__(self, form: OutputForm) -> None:
        self.notices = list[str]()
        self._form = form
        self._halved: dict[int, _Halved] = {}
        self._deaths = Counter[tuple[int, int, int]]()
        self._killers = 0

    def is_piece(self, part: Part) -> bool:
        """Check whether a part is a piece of another."""
        return part.index in self._halved

    def failed(
        self, part: Part, cause: str, *, retry: bool
    ) -> tuple[list[Part], list[tuple[Part, Computed]]]:
        """Return the parts to be computed in place of one whose worker died, and a part that this has finished.

        A whole part is tried again first, if `retry`. Raises `WorkerDied` where too many rows have ended workers.
        """
        place = part.index, part.first_row, len(part.records)
        self._deaths[place] += 1
        single = len(part.records) == 1
        if self._deaths[place] < TRIES and (single or (retry and not self.is_piece(part))):
            return [part], []
        if not single:
            if not self.is_piece(part):
                self._halved[part.index] = _Halved(part, [])
            self.notices.append(f"rows {part.rows}: {cause}; they are computed again in halves")
            return _halves(part), []
        self._killers += 1
        if self._killers > KILLERS:
            raise WorkerDied(
                f"{self._killers} rows have ended their workers, row {part.rows} the last",
                found=cause,
                next="give it smaller parts with --part-rows, or fewer --workers; what is done is kept",
            )
        reason = f"twice, {cause}"
        self.notices.append(f"row {part.rows} is rejected: {reason}")
        return [], self.done(part, rejected(part, reason, self._form))

    def done(self, part: Part, computed: Computed) -> list[tuple[Part, Computed]]:
        """Take what was computed; return the part whose last piece this is."""
        halved = self._halved.get(part.index)
        if halved is None:
            return [(part, computed)]
        halved.pieces.append((part, computed))
        if sum(len(piece.records) for piece, _ in halved.pieces) < len(halved.part.records):
            return []
        del self._halved[part.index]
        pieces = sorted(halved.pieces, key=lambda piece: piece[0].first_row)
        return [(halved.part, joined([computed for _, computed in pieces], self._form))]


def _halves(part: Part) -> list[Part]:
    middle = len(part.records) // 2
    return [
        replace(part, records=part.records[:middle]),
        replace(part, records=part.records[middle:], first_row=part.first_row + middle),
    ]
