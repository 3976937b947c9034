"""A layout run on gloo processes, each of which compares what it has with a run alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torchwright.decoder.config import DecoderConfig
from torchwright.train.layout import Layout
from torchwright.train.prove.compare import RankReport
from torchwright.train.prove.processes import on_processes

DTYPES = ("float64", "float32")

Reports = dict[str, list[RankReport]]
"""dtype → the processes' reports."""


def run_layout(
    config: DecoderConfig, layout: Layout, dtypes: Sequence[str] = DTYPES, fault: str = ""
) -> Reports:
    """Train three steps in `layout` on new processes, once for each dtype, and compare each with a run alone.

    `fault` seeds a fault of `faults.py`, for tests. Raises `ProveError` where a process fails or hangs.
    """
    answers = on_processes(layout.processes, _train, config, layout, tuple(dtypes), fault)
    return {dtype: [answer[place] for answer in answers] for place, dtype in enumerate(dtypes)}


def _train(config: DecoderConfig, layout: Layout, dtypes: tuple[str, ...], fault: str) -> list[RankReport]:
    """One process: its own reference, its part of the layout, and the comparison of the two."""
    import torch

    from torchwright.train.prove.compare import compare
    from torchwright.train.prove.steps import run_alone, run_in_layout

    reports = []
    for name in dtypes:
        dtype = getattr(torch, name)
        wanted = run_alone(config, dtype)
        with _seeded(fault):
            actual, mesh = run_in_layout(config, dtype, layout)
        reports.append(compare(actual, wanted, layout, mesh))
    return reports


def _seeded(fault: str) -> contextlib.AbstractContextManager[None]:
    if not fault:
        return contextlib.nullcontext()
    from torchwright.train.prove.faults import seed

    return seed(fault)
