"""A small run on gloo processes, each of which compares what it has with the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.prove.compare import RankReport
from torchwright.train.prove.processes import on_processes
from torchwright.train.prove.shrink import Small, exact, rounds, shrink
from torchwright.train.run.config import run as runs

EXACT = "float64"

Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""The context in which every process trains and its reference is computed; for tests, which seed faults by it."""


def columns(run: runs.Run) -> tuple[str, ...]:
    """In what a run is proved: in float64, and in its own precision."""
    rounding = [run.qat.scheme] if run.qat else []
    rounding += [run.precision] if run.precision != "fp32" else []
    rounding += [run.optimizer.name] if run.optimizer.name in runs.FEW_BITS else []
    return EXACT, "+".join(rounding) or "float32"


def run_layout(
    run: runs.Run, full: DecoderConfig, wanted: Sequence[str], around: Around = contextlib.nullcontext
) -> dict[str, list[RankReport]]:
    """Train the small form of `run` on new processes, once for each column wanted; column → the processes' reports.

    Raises `ProveError` where a process fails or hangs.
    """
    small = {column: shrink(exact(run) if column == EXACT else run, full, run.parallel) for column in wanted}
    answers = on_processes(run.parallel.processes, _train, small, around)
    return {column: [answer[column] for answer in answers] for column in wanted}


def _train(small: dict[str, Small], around: Around) -> dict[str, RankReport]:
    """One process: its own reference, its part of the layout, and the comparison of the two."""
    import torch

    from torchwright.train.prove.compare import ValueComparison
    from torchwright.train.prove.reference import reference
    from torchwright.train.prove.steps import train_steps

    reports = {}
    with around():
        for column, one in small.items():
            dtype = torch.float64 if column == EXACT else torch.float32
            plain = exact(one.run)
            wanted = reference(plain, one.config, torch.float64)
            rounding = column != EXACT and rounds(one.run)
            rounded = reference(one.run, one.config, dtype) if rounding else None
            actual, mesh = train_steps(one, dtype)
            comparison = ValueComparison(wanted, rounded, dtype, one.run.parallel, mesh)
            reports[column] = comparison.report(actual, one.run.micro_batches)
    return reports
