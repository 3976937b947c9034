"""Read what benchmarks wrote: a row is one measurement's place and conditions, with its figures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WHOLE = "Torchwright"
"""Technique of a figure that belongs to the whole recipe, as it ships."""
ORIGINAL, BY_HAND, OPENVINO = "over the original", "over torch.compile by hand", "over OpenVINO"
IN_SEARCH = "over the original, in the search"
ZOO_MEASURES = {"original": ORIGINAL, "by_hand": BY_HAND, "openvino": OPENVINO}
ZOO = "benchmarks.optimize.zoo"
TRIED = re.compile(r"(?P<step>\S+): (?P<status>\w+)(?:, (?P<gain>[\d.]+)x)?(?:, (?P<reason>.*))?", re.DOTALL)
"""An entry of a zoo row's `tried`, as `benchmarks.optimize.zoo.tried` writes it."""
LONGEST = 1_000_000
"""Bytes of a line; a zoo row has about 3,000."""


class BadRow(ValueError):
    """A line that is not a row; the message names its file, its number and the fault."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A ratio over a baseline that was timed in turns with it in the same run; higher is better."""

    technique: str
    measure: str
    value: float | None
    """None if the step was not measured; `note` says why."""
    low: float | None = None
    high: float | None = None
    """The 95% interval; None where the row has none."""
    note: str = ""

    @property
    def has_interval(self) -> bool:
        return self.value is not None and self.low is not None and self.high is not None

    @property
    def verdict(self) -> str:
        """`faster` or `slower` if the whole interval says so, else `undecided`; `no interval` without one."""
        if self.value is None:
            return "not measured"
        if self.low is None or self.high is None:
            return "no interval"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "undecided"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a benchmark."""

    source: str
    """File and line."""
    benchmark: str
    workload: str
    conditions: str
    """Sizes and budget; figures under different conditions do not compare."""
    device: str
    commit: str | None
    """The commit that was measured; None if nobody recorded it."""
    date: str | None
    versions: str
    command: str
    figures: tuple[Figure, ...]
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Everything else that the row says."""
    claim: tuple[float, float, float] | None = None
    """The search's own speed-up, which a zoo row times again."""

    @property
    def clean(self) -> bool:
        """Check whether the measured tree was a commit, without changes."""
        return self.commit is not None and "changed" not in self.commit

    def figure(self, technique: str, measure: str) -> Figure | None:
        return next(
            (each for each in self.figures if (each.technique, each.measure) == (technique, measure)), None
        )


def read(folder: Path) -> list[Row]:
    """Return the rows of every `*.jsonl` in `folder`, in the order in which they were appended. Raises `BadRow`."""
    return [row for path in sorted(folder.glob("*.jsonl")) for row in read_file(path)]


def read_file(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines. Raises `BadRow`."""
    made: Callable[[dict[str, Any], str], Row] = zoo_row if path.name == "hundred.jsonl" else uniform_row
    found = list[Row]()
    with path.open(encoding="utf-8", errors="replace") as file:
        number = 0
        while line := file.readline(LONGEST + 1):
            number += 1
            source = f"{path.parent.name}/{path.name}:{number}"
            if len(line) > LONGEST:
                raise BadRow(f"{source}: the line is longer than {LONGEST:,} characters")
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TypeError("a row is a JSON object")
                found.append(made(row, source))
            except BadRow:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadRow(f"{source}: not a row: {type(error).__name__}: {error}") from error
    return found


def interval(given: Any) -> tuple[float, float, float]:
    """Return value, low and high. Raises `ValueError` unless they are finite, above zero and in order."""
    value, low, high = map(float, given)
    if not all(map(math.isfinite, (value, low, high))) or not 0 < low <= value <= high:
        raise ValueError(f"{given} is not an interval: value, low and high with 0 < low <= value <= high")
    return value, low, high


def uniform_row(row: dict[str, Any], source: str) -> Row:
    """Return a row in the form that `benchmarks.harness.run.Rows.measured` writes."""
    figures = list[Figure]()
    for each in row["figures"]:
        value, low, high = interval(each["interval"])
        figures.append(
            Figure(
                technique=str(each["technique"]),
                measure=str(each["measure"]),
                value=value,
                low=low,
                high=high,
                note=str(each.get("note", "")),
            )
        )
    return Row(
        source=source,
        benchmark=str(row["benchmark"]),
        workload=str(row["workload"]),
        conditions=str(row.get("conditions", "")),
        device=device(str(row["device"]), int(row["threads"])),
        commit=str(row["commit"]) or None,
        date=str(row["date"]),
        versions=versions(row["versions"]),
        command=str(row["command"]),
        figures=tuple(figures),
        facts={str(name): str(value) for name, value in row.get("facts", {}).items()},
    )


def zoo_row(row: dict[str, Any], source: str) -> Row:
    """Return a row of the model zoo benchmark (`benchmarks/optimize/zoo.py`)."""
    best = row.get("best", {})
    figures = list[Figure]()
    for name, measure in ZOO_MEASURES.items():
        if given := row.get("over", {}).get(name):
            value, low, high = interval(given)
            note = str(best.get(name, ""))
            figures.append(
                Figure(technique=WHOLE, measure=measure, value=value, low=low, high=high, note=note)
            )
    facts = {
        "kept": row.get("kept"),
        "failure": row.get("failure"),
        "verdict of the search": row.get("verdict"),
    }
    if "ms" in row:
        facts |= {f"{name}, ms": f"{float(value):.4g}" for name, value in row["ms"].items()}
    loss = row.get("fresh_loss")
    facts["error on fresh inputs"] = f"{loss:.2%}" if isinstance(loss, float) else loss
    conditions = [row["cut"], f"budget {float(row['budget']):.0%}" if "budget" in row else ""]
    conditions += [f"batch {row['batch']}" if "batch" in row else ""]
    conditions += [f"{row['inputs']} calls" if "inputs" in row else ""]
    return Row(
        source=source,
        benchmark=ZOO,
        workload=str(row["model"]),
        conditions=", ".join(filter(None, map(str, conditions))),
        device=device(str(row["cpu"]), int(row["threads"])),
        commit=str(row["commit"]),
        date=None,
        versions=versions(row["versions"]),
        command=f"python -m {ZOO} --only {row['model']} --again",
        figures=(*figures, *_tried(row.get("tried", ()))),
        facts={name: str(value) for name, value in facts.items() if value},
        claim=interval(row["claim"]) if "claim" in row else None,
    )


def _tried(entries: list[str]) -> list[Figure]:
    """Return one figure for each technique of a search: its fastest variant, or the reason that none was measured."""
    found: dict[str, Figure] = {}
    for entry in entries:
        match = TRIED.fullmatch(str(entry))
        if not match:
            raise ValueError(f"{entry!r} is not an entry of `tried`: step: status[, gain x][, reason]")
        technique, gain = match["step"].partition(":")[0], match["gain"]
        note = f"{match['step']}: {match['status']}" + (f", {match['reason']}" if match["reason"] else "")
        made = Figure(technique=technique, measure=IN_SEARCH, value=float(gain) if gain else None, note=note)
        before = found.get(technique)
        if before is None or (made.value or 0) > (before.value or 0):
            found[technique] = made
    return list(found.values())


def device(name: str, threads: int) -> str:
    return f"{name}, {'one thread' if threads == 1 else f'{threads} threads'}"


def versions(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in given.items())
