"""The account as one self-contained HTML page: a time line of each rank, no script, nothing loaded from anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchwright.core.process.files import replacing
from torchwright.report import wording
from torchwright.train.ledger import show
from torchwright.train.ledger.account import Account, Piece
from torchwright.train.ledger.buckets import BUCKETS, NANO

WIDTH, LANE, GAP = 1000, 26, 8
"""Units across the drawing, which stretches to the page's width; pixels of a lane's height and between two lanes."""
BINS = 500
"""Parts of a lane; each is filled by the shares of its buckets, so that a short wait is seen and not rounded away."""
MOST_LANES = 16


@dataclass(frozen=True)
class _Lane:
    rank: int
    top: int
    paths: dict[str, str]
    """Bucket → SVG path."""


@dataclass(frozen=True)
class _Tick:
    percent: float
    """Distance from the left."""
    text: str


def render(account: Account) -> str:
    """Return the page; the same account gives the same text, up to the time zone of the machine."""
    from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined

    ranks = sorted({rank for attempt in account.attempts for rank in attempt.lanes})
    shown = _ranks_to_show(account, ranks)
    lanes = [
        _Lane(rank, number * (LANE + GAP), _paths(_life(account, rank), account.start, account.end))
        for number, rank in enumerate(shown)
    ]
    seconds = account.seconds()
    environment = Environment(
        loader=PrefixLoader(
            {
                "report": PackageLoader("torchwright.report", ""),
                "ledger": PackageLoader("torchwright.train.ledger", ""),
            }
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": show.duration, "percent": wording.percent, "clock": show.clock}
    return environment.get_template("ledger/timeline.html.j2").render(
        account=account,
        headline=show.headline(account),
        buckets={
            name: (seconds[name], account.most(name), BUCKETS[name]) for name in BUCKETS if seconds[name]
        },
        attempts=[
            (
                attempt,
                show.steps_of(attempt),
                show.how_ended(attempt, last=attempt is account.attempts[-1]),
                attempt.seconds(),
                (attempt.end - attempt.start) / NANO,
            )
            for attempt in account.attempts
        ],
        starts=[_Tick(_percent(attempt.start, account), str(attempt.number)) for attempt in account.attempts],
        ticks=_ticks(account),
        lanes=lanes,
        ranks=len(ranks),
        width=WIDTH,
        lane_height=LANE,
        pitch=LANE + GAP,
        depth=len(lanes) * (LANE + GAP) - GAP,
    )


def write(account: Account, path: str | Path) -> None:
    """Write the page under a temporary name, and rename it to `path`; make missing folders above it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(render(account), encoding="utf-8")


def _ranks_to_show(account: Account, ranks: list[int]) -> list[int]:
    """Return all ranks, or of many rank 0 and those that spent the least time in steps."""
    if len(ranks) <= MOST_LANES:
        return ranks
    steps = dict.fromkeys(ranks, 0)
    for attempt in account.attempts:
        for rank in attempt.lanes:
            steps[rank] += attempt.spent(rank)["step"]
    slowest = sorted(ranks[1:], key=lambda rank: (steps[rank], rank))[: MOST_LANES - 1]
    return [ranks[0], *sorted(slowest)]


def _life(account: Account, rank: int) -> list[Piece]:
    """Return the pieces of a rank, attempt after attempt; time between attempts is idle and left blank."""
    return [piece for attempt in account.attempts for piece in attempt.lanes.get(rank, [])]


def _paths(pieces: list[Piece], start: int, end: int) -> dict[str, str]:
    """Return for each bucket the rectangles of its share in each bin, stacked from below in the buckets' order."""
    bins: list[dict[str, float]] = [{} for _ in range(BINS)]
    length = max(end - start, 1) / BINS
    for bucket, first, last in pieces:
        at = int((first - start) / length)
        while at < BINS and start + at * length < last:
            inside = min(last, start + (at + 1) * length) - max(first, start + at * length)
            bins[at][bucket] = bins[at].get(bucket, 0.0) + max(inside, 0.0) / length
            at += 1
    paths: dict[str, list[str]] = {}
    step = WIDTH / BINS
    for at, shares in enumerate(bins):
        y = float(LANE)
        for bucket in BUCKETS:
            height = shares.get(bucket, 0.0) * LANE
            if height > 0.01:
                paths.setdefault(bucket, []).append(
                    f"M{at * step:g} {y:.2f}v{-height:.2f}h{step:g}v{height:.2f}z"
                )
                y -= height
    return {bucket: "".join(parts) for bucket, parts in paths.items()}


def _percent(at: float, account: Account) -> float:
    return round(100 * (at - account.start) / max(account.end - account.start, 1), 3)


def _ticks(account: Account) -> list[_Tick]:
    """Return at most ten round times since the start."""
    wide = account.wall / 10
    units = [
        1e-3,
        2e-3,
        5e-3,
        0.01,
        0.02,
        0.05,
        0.1,
        0.2,
        0.5,
        1,
        2,
        5,
        10,
        20,
        30,
        60,
        120,
        300,
        600,
        1200,
        1800,
    ]
    units += [3600 * hours for hours in (1, 2, 4, 6, 12, 24, 48, 120, 240, 480)]
    every = next((unit for unit in units if unit >= wide), units[-1])
    marks = [number * every for number in range(int(account.wall / every) + 1)]
    return [_Tick(_percent(account.start + mark * NANO, account), _elapsed(mark, every)) for mark in marks]


def _elapsed(seconds: float, every: float) -> str:
    if every >= 3600:
        return f"{seconds / 3600:g} h"
    return f"{seconds / 60:g} min" if every >= 60 else f"{seconds:g} s"
