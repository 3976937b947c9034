"""Read the rows of zoo.py: the faults of one, its line, and the page of all."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.run import Row, line
from benchmarks.models import zoo

ORIGINAL, OURS = "original", "torchwright"
BY_HAND, OPENVINO = "by_hand", "openvino"
NAMES = {BY_HAND: "compile by hand,", OPENVINO: "OpenVINO"}
SLACK = 1.5
"""Fresh inputs may be off by the budget times this: it was held on others."""
SLOWEST, LEVEL = 0.98, 0.97
"""Ratios from which an artifact is not slower than the original, not behind a peer: the upper end, the median."""

ABOUT = (
    "Made by `python -m benchmarks.optimize.zoo --page docs/hundred.md` from the rows in `benchmarks/hundred.jsonl`.",
    "",
    "A row is a search of 90 s with a budget of 1%; installed third-party engines are allowed. It has four calls of",
    "two rows: one calibrates, and one judges the choice (before 2026-11-26 one call did both, before 2026-11-25 of",
    "four rows). The artifact is loaded in a new process and compared with the original on fresh inputs in another",
    "batch. It then takes turns with the original, the hand-tuned torch.compile (the best of default, freezing,",
    "max-autotune, bf16 autocast with and without), and the best of OpenVINO (float32, bf16). Baselines that leave",
    "the budget or are not ready in 90 s do not count. Weights are random. Rows of an older commit stay until they",
    "are measured again. Ratios are within one row, in turns; on a busy machine 90 s hold fewer trials, and the",
    "milliseconds of two rows do not compare. If the original was kept, its ratio shows the error of the timing",
    "itself: the same module, called twice.",
)
COLUMNS = (
    "model",
    "kind",
    "kept",
    "original, ms",
    "over it",
    "over hand-tuned",
    "over OpenVINO's best",
    "error on fresh inputs; faults",
    "commit",
)


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def wrong(row: Row) -> list[str]:
    """Return why its answers are not the original's."""
    if "failure" in row:
        return [row["failure"]]
    loss = row["fresh_loss"]
    if isinstance(loss, str):
        return [f"another batch: {loss}"]
    off = [f"off by {loss:.2%} on fresh inputs"] if loss > SLACK * row["budget"] else []
    return off + [f"the rewrite of {step} is wrong" for step in row.get("wrong", ())]


def slower(row: Row) -> list[str]:
    if "over" not in row or row["over"][ORIGINAL][2] >= SLOWEST:
        return []
    return [f"{row['over'][ORIGINAL][0]:.2f}x of the original's speed"]


def behind(row: Row) -> list[str]:
    over = row.get("over", {})
    return [
        f"behind {NAMES[group]} {row['best'][group]}: {over[group][0]:.2f}x"
        for group in NAMES
        if group in over and over[group][0] < LEVEL
    ]


def faults(row: Row) -> list[str]:
    """Return the complaints that a user would be right to make."""
    return wrong(row) + slower(row)


def as_line(row: Row) -> str:
    name = row["model"] + (f" ({row['cut']})" if row["cut"] else "")
    says = faults(row) + behind(row)
    cells = [name, row["kind"], row.get("kept", "")]
    if "over" in row:
        if isinstance(row["fresh_loss"], float):
            says = [f"{row['fresh_loss']:.2%}", *says]
        cells += [
            f"{row['ms'][ORIGINAL]:.1f}",
            "{:.2f}x [{:.2f}, {:.2f}]".format(*row["over"][ORIGINAL]),
            *(
                f"{row['over'][group][0]:.2f}x {row['best'][group]}" if group in row["over"] else ""
                for group in NAMES
            ),
        ]
    else:
        cells += [""] * 4
    cells += ["; ".join(says), row["commit"]]
    return line(cells)


def page(rows: Sequence[Row]) -> str:
    """Return the page: the newest row of each architecture, machine and number of threads, and their summary."""
    newest = {(row["cpu"], row["threads"], row["model"]): row for row in rows}
    lines = ["# A hundred architectures", "", *ABOUT, ""]
    for place in dict.fromkeys((cpu, threads) for cpu, threads, _ in newest):
        here = [row for (*where, _), row in newest.items() if tuple(where) == place]
        lines += [f"## {place[0]}, {_threads(place[1])}", "", *_head(here), "", *_by_kind(here), ""]
        lines += [*_unmet(here), "", *_missing(here), "", "### Rows", ""]
        lines += [*table(COLUMNS), *map(as_line, here), ""]
    return "\n".join(lines)


def table(columns: Sequence[str]) -> Iterator[str]:
    """Yield the head of a table."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def _head(rows: Sequence[Row]) -> Iterator[str]:
    """Yield shares of all rows, each with its target."""
    timed = [row for row in rows if "over" in row]
    yield f"{len(rows)} of {len(zoo.MODELS)} architectures were run. {_software(rows)}"
    yield ""
    yield from table(("of these", "found", "wanted"))
    yield f"| right | {_share(rows, lambda row: not wrong(row))} | 100% |"
    yield f"| never slower than {SLOWEST}x the original | {_share(timed, lambda row: not slower(row))} | 100% |"
    yield f"| over the original, geometric mean | {mean(ratios(rows))} | 3x |"
    yield f"| over hand-tuned, geometric mean | {mean(ratios(rows, BY_HAND))} | 1.3x |"
    theirs = ratios(rows, OPENVINO)
    yield f"| not behind OpenVINO ({LEVEL}x) | {_share(theirs, lambda ratio: ratio >= LEVEL)} | 95% |"


def _software(rows: Sequence[Row]) -> str:
    sets = {", ".join(f"{name} {version}" for name, version in row["versions"].items()) for row in rows}
    return "; or ".join(sorted(sets)) + "."


def _by_kind(rows: Sequence[Row]) -> Iterator[str]:
    yield from table(
        (
            "kind",
            "run",
            "right and never slower",
            "over the original",
            *COLUMNS[5:7],
            f"not behind it ({LEVEL}x)",
        ),
    )
    for kind in dict.fromkeys(entry.kind for entry in zoo.MODELS.values()):
        some = [row for row in rows if row["kind"] == kind]
        of = sum(entry.kind == kind for entry in zoo.MODELS.values())
        good = sum(not faults(row) for row in some)
        theirs = ratios(some, OPENVINO)
        level = f"{sum(ratio >= LEVEL for ratio in theirs)} of {len(theirs)}" if theirs else ""
        means = " | ".join(mean(each) for each in (ratios(some), ratios(some, BY_HAND), theirs))
        yield f"| {kind} | {len(some)} of {of} | {good} | {means} | {level} |"


def _unmet(rows: Sequence[Row]) -> Iterator[str]:
    yield "### What went wrong, or is behind"
    yield ""
    found = [f"- `{row['model']}`: {'; '.join(faults(row) + behind(row))}" for row in rows if faults(row)]
    found += [
        f"- `{row['model']}`: {'; '.join(behind(row))}" for row in rows if behind(row) and not faults(row)
    ]
    yield from found or ["Nothing."]


def _missing(rows: Sequence[Row]) -> Iterator[str]:
    run = {row["model"] for row in rows}
    missing = [name for name in zoo.MODELS if name not in run]
    if missing:
        yield f"### Not run here yet: {len(missing)}"
        yield ""
        yield from textwrap.wrap(", ".join(missing) + ".", 150)


def ratios(rows: Sequence[Row], peer: str = ORIGINAL) -> list[float]:
    """Return the ratios over the original, or over the best of a group of peers."""
    return [row["over"][peer][0] for row in rows if peer in row.get("over", {})]


def mean(values: Sequence[float]) -> str:
    """Return the geometric mean as text."""
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}x" if values else ""


def _share(of: Sequence[Any], holds: Callable[[Any], bool]) -> str:
    count = sum(map(holds, of))
    return f"{count} of {len(of)}" + (f" ({count / len(of):.0%})" if of else "")
