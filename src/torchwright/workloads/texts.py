"""Two texts, one to judge by and one to calibrate with, so that no candidate has seen what it is judged on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torchwright.core.errors import WorkloadError

BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_TEXTS = (BUNDLED / "eval.txt", BUNDLED / "calibration.txt")
KEPT = 5
"""One part in so many of a user's text, its end, is kept for calibration; of the bundled texts it is about as much."""

Part = TypeVar("Part")
Other = TypeVar("Other")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Split(Generic[Part]):
    """The evaluation text and the calibration text."""

    evaluation: Part
    calibration: Part

    def map(self, change: Callable[[Part], Other]) -> Split[Other]:
        return Split(change(self.evaluation), change(self.calibration))


def own_text(path: str | Path | None) -> Path | None:
    """A user's text; None stands for the bundled ones. Raises `WorkloadError` for one that is not there."""
    if path and not Path(path).is_file():
        raise WorkloadError(f"the evaluation text {path} is not there", next="pass --eval-text FILE")
    return Path(path) if path else None


def read_texts(own: Path | None) -> Split[str]:
    """The bundled texts, or a user's own one in two parts."""
    if own is None:
        return Split(*BUNDLED_TEXTS).map(lambda path: path.read_text("utf-8"))
    text = own.read_text("utf-8", errors="replace")
    cut = len(text) - len(text) // KEPT
    return Split(text[:cut], text[cut:])


def too_short(own: Path | None, found: Split[int], needed: Split[int], unit: str) -> WorkloadError:
    """The error for a text that is not long enough for both."""
    return WorkloadError(
        f"the evaluation text {own or BUNDLED_TEXTS[0]} is too short",
        found=f"{found.evaluation} {unit} to judge by and {found.calibration} to calibrate with",
        allowed=f"at least {needed.evaluation} and {needed.calibration}",
        next="pass a longer --eval-text FILE",
    )


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` of the rows, from all over; some again where there are fewer."""
    step = max(1, len(rows) // count)
    return [rows[index * step % len(rows)] for index in range(count)]
