"""What holds for every process of a test run; pytest-xdist starts its own after this file has been read."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest

# OpenMP's threads spin while they wait, for what another process's threads would compute on the same processor.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor compiles a program for each instruction set of the processor to see that the compiler has it, 14 s of a run
# with a cache of its own. The kernels' build asks the same compiler for the same sets.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Tests of other processes are other programs to a search: what it chooses does not depend on them.
os.environ.setdefault("TORCHWRIGHT_ASSUME_QUIET", "1")
# pytest-xdist's workers have 80: tables are as wide as in a file without it.
os.environ.pop("COLUMNS", None)

NIGHTLY = {"slow", "sweep"}
WHOLE = re.compile(r"^pytestmark = \[?pytest\.mark\.(slow|sweep)\b", re.MULTILINE)
COUNTS = "counts"
"""The property in which a test records what it counted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the file for durations."""
    parser.addoption("--durations-to", type=Path, metavar="FILE", help="append each phase's seconds to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Record durations where a file is named."""
    if path := config.option.durations_to:
        from durations import Durations

        config.pluginmanager.register(Durations(path.absolute()))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave to the nightly run the parameters that a test's `plain` does not name."""
    mark = item.get_closest_marker("plain")
    if mark is not None and isinstance(item, pytest.Function) and item.callspec.id not in mark.args:
        item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hold the names in `plain` against the parameters that there are, where all of a file was collected."""
    if any("::" in argument for argument in config.args):
        return
    named = dict[str, set[str]]()
    for item in items:
        if (mark := item.get_closest_marker("plain")) is not None and isinstance(item, pytest.Function):
            test = item.nodeid.removesuffix(f"[{item.callspec.id}]")
            named.setdefault(test, set(mark.args)).discard(item.callspec.id)
    for test, unknown in named.items():
        if unknown:
            raise pytest.UsageError(f"{test}: `plain` names no parameter of it: {', '.join(sorted(unknown))}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are imported: all that is made there stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what the imports made out of garbage collections: a search asks for three, over all of these objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Have all collected as Python ends: libraries print what is left of theirs."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the fuzz tests counted: pytest shows no output of tests that pass in its worker processes."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    found = [str(value) for report in reports for name, value in report.user_properties if name == COUNTS]
    if found:
        terminalreporter.section("mutants")
        for counts in found:
            terminalreporter.line(counts)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests are all of another run: importing them takes longer than others' tests.

    With `-m quick` those without its marker, in the plain run those that are marked as a whole.
    """
    if not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if config.option.markexpr == "quick":
        return "mark.quick" not in text or None
    return (_is_plain(config) and WHOLE.search(text) is not None) or None


def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    """Make no items of tests that are nightly as a whole in the plain run."""
    if name.startswith("test") and _is_plain(collector.config):
        marks = getattr(obj, "pytestmark", [])
        if isinstance(marks, list) and any(mark.name in NIGHTLY for mark in marks):
            return []
    return None


def _is_plain(config: pytest.Config) -> bool:
    """Check for the plain run, of files as wholes."""
    return config.option.markexpr == "not slow and not sweep" and not any("::" in arg for arg in config.args)
