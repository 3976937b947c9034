"""Processor and wall seconds of each phase of each test, for who makes the run shorter.

`pytest --durations-to FILE` writes one line of JSON for each phase; `python tests/durations.py FILE` ranks files, tests
and workers. Processor seconds are those of the test's process and of the children that it has waited for.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage  # a test replaces the module's own
from time import perf_counter, time
from typing import Any

import pytest

FILES, TESTS = 60, 60
"""Lines of the summary."""


class Durations:
    """A plugin of pytest that appends to a file; pytest-xdist's workers share it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _phase(self, item: pytest.Item, when: str) -> Generator[None, Any, Any]:
        began, spent = perf_counter(), _processor_seconds()
        try:
            return (yield)
        finally:
            row = {
                "id": item.nodeid,
                "when": when,
                "wall": round(perf_counter() - began, 4),
                "cpu": round(_processor_seconds() - spent, 4),
                "worker": os.environ.get("PYTEST_XDIST_WORKER", "main"),
                "end": round(time(), 2),
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "teardown"))


def _processor_seconds() -> float:
    spent = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def summary(rows: list[dict[str, Any]]) -> str:
    """Rank the files and tests by wall seconds, and say when each worker began and ended."""
    files, processor, tests = Counter[str](), Counter[str](), Counter[str]()
    ends = dict[str, list[float]]()
    for row in rows:
        file = row["id"].partition("::")[0]
        files[file] += row["wall"]
        processor[file] += row["cpu"]
        tests[row["id"]] += row["wall"]
        ends.setdefault(row["worker"], []).extend([row["end"] - row["wall"], row["end"]])
    first = min(min(times) for times in ends.values())
    lines = [
        f"{sum(files.values()):.0f} s, {sum(processor.values()):.0f} s of processors, {len(tests)} tests"
    ]
    for worker, times in sorted(ends.items()):
        lines.append(f"{worker}: from {min(times) - first:.0f} to {max(times) - first:.0f} s")
    lines += [f"{seconds:7.1f} {processor[file]:7.1f} {file}" for file, seconds in files.most_common(FILES)]
    lines += [f"{seconds:7.1f} {test}" for test, seconds in tests.most_common(TESTS)]
    return "\n".join(lines)


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    print(summary([json.loads(line) for line in text.splitlines()]))
