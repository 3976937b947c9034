"""Differences between torch's operations and NumPy's: a table of probed operations, and a probe for all others.

The table (semantics.json, written by scripts/numpy_semantics.py) holds for the versions that it names. For other
versions, and for operations that it lacks, each operation is probed at its first use, and the answer is kept in the
cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from torchwright.core.errors import ArtifactError
from torchwright.core.json_file import read_json
from torchwright.core.paths import cache_folder, file_digest
from torchwright.core.process.files import replacing
from torchwright.optimization.numpy.operations import Operation, Step

TABLE = Path(__file__).with_name("semantics.json")
Settle = Callable[[Iterable[Operation]], dict[Operation, str]]
PROBE_SECONDS = 300.0
"""The most that one probe may take: a few operations are compiled in 10 to 30 seconds."""


def versions() -> dict[str, str]:
    """The scope of a verdict: releases of torch and NumPy, and the kind of processor."""
    torch_release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    numpy_release = ".".join(np.__version__.split(".")[:2])
    return {"torch": torch_release, "numpy": numpy_release, "machine": platform.machine()}


def first_difference(steps: list[Step], settle: Settle | None = None) -> str:
    """The first step that torch computes otherwise than NumPy, in words; empty where all agree on all probe values.

    `settle` returns the verdicts of operations, by default `differences`.
    """
    settle = settle or differences
    settled = settle(step.general for step in steps if step.general)
    left = [step for step in steps if step.general and settled[step.general] and step.special]
    settled |= settle(step.special for step in left if step.special)
    for step in steps:
        decisive = step.special if step in left else step.general
        if decisive and settled[decisive]:
            return f"{decisive.key} differs in torch: {settled[decisive]}"
    return ""


def differences(
    operations: Iterable[Operation], probe: Callable[[list[Operation]], list[str]] | None = None
) -> dict[Operation, str]:
    """A text per operation: where torch differs from NumPy, empty where it agrees on every probe value.

    `probe` answers for operations that neither the table nor the cache has.
    """
    wanted = list(dict.fromkeys(operations))
    known = table() | _cached()
    unknown = [operation for operation in wanted if operation.key not in known]
    if unknown:
        found = {one.key: text for one, text in zip(unknown, (probe or probed)(unknown), strict=True)}
        known |= found
        _keep(found)
    return {operation: known[operation.key] for operation in wanted}


@functools.cache
def table() -> dict[str, str]:
    """Return the verdicts that come with this package for the versions that run here."""
    return table_of(versions())


def table_of(versions: dict[str, str]) -> dict[str, str]:
    """Return the verdicts that come with this package; none for other versions than the table's."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    return data["differences"] if data["versions"] == versions else {}


def probed(
    operations: list[Operation],
    seconds: float = PROBE_SECONDS,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> list[str]:
    """Probe in a process of its own, which an operation may end (a division that traps); halves find which one.

    `run` starts the process, as `subprocess.run` does.
    """
    request = json.dumps([[operation.expression, operation.dtypes] for operation in operations])
    try:
        answer = run(
            [sys.executable, "-m", "torchwright.optimization.numpy.probe"],
            input=request,
            capture_output=True,
            encoding="utf-8",
            timeout=seconds,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return [f"its probe did not end within {seconds:.0f} s"] * len(operations)
    if answer.returncode == 0:
        return json.loads(answer.stdout)
    if len(operations) == 1:
        last = answer.stderr.strip().splitlines()[-1:]
        return [f"the probe ended with {answer.returncode}: {''.join(last)}"]
    middle = len(operations) // 2
    return probed(operations[:middle], seconds, run) + probed(operations[middle:], seconds, run)


def _cache_file() -> Path:
    return cache_folder() / "numpy" / _cache_name()


@functools.cache
def _cache_name() -> str:
    """Return the name of the file with the verdicts of these versions, by this probe and its values."""
    sources = "".join(file_digest(TABLE.with_name(name))[:8] for name in ("probe.py", "domain.py"))
    return f"{'-'.join(versions().values())}-{sources}.json"


def _cached() -> dict[str, str]:
    if not _cache_file().exists():
        return {}
    try:
        data = read_json(_cache_file())
    except ArtifactError:  # damaged: what it held is probed again
        return {}
    return data if isinstance(data, dict) else {}


def _keep(found: dict[str, str]) -> None:
    """Add to the cache. Where nothing can be written, the next process probes again."""
    with contextlib.suppress(OSError):
        _cache_file().parent.mkdir(parents=True, exist_ok=True)
        with replacing(_cache_file()) as beside:
            beside.write_text(json.dumps(_cached() | found, indent=0, sort_keys=True), encoding="utf-8")
