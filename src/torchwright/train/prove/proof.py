"""A layout proved on this machine: which smaller layouts to run, and what their failures have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from torchwright.decoder.config import DecoderConfig, read_decoder_config
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.parallel.apply import check_fits
from torchwright.train.prove.diagnose import TOLERANCES, Divergence, diagnose, worst
from torchwright.train.prove.launch import DTYPES, Reports, run_layout
from torchwright.train.prove.shrink import shrink_config, shrink_layout
from torchwright.workloads.huggingface import resolve

PROCESSES = 4
"""The most processes of one run, by default."""
CARRIERS = ("dp_shard", "cp")
"""ep spreads experts over the processes of these."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One layout's three steps against one process."""

    layout: Layout
    errors: dict[str, float]
    """dtype → the largest relative error of any value on any process."""
    worst: dict[str, str]
    """dtype → the value that has it."""
    seconds: float

    @property
    def passed(self) -> bool:
        return all(error <= TOLERANCES[dtype] for dtype, error in self.errors.items())


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Everything `torchwright prove` says."""

    model: str
    layout: Layout
    config: DecoderConfig
    """Of the small model that ran."""
    runs: tuple[Run, ...]
    divergence: Divergence | None
    """Of the smallest layout that fails, None where all runs passed."""
    not_run: tuple[str, ...]
    """Axes that only more processes would prove together."""

    @property
    def passed(self) -> bool:
        return self.divergence is None


def prove(
    target: str | Path,
    layout: Layout,
    processes: int = PROCESSES,
    fault: str = "",
    announce: Callable[[Run], None] = lambda run: None,
) -> Proof:
    """Prove `layout` for the model of a folder or hub id, of which only config.json is read.

    Runs every combination of the layout's axes, each at two, that takes at most `processes` processes and is not part
    of a larger one that does too; `announce` is told of each. Where one diverges, its parts run until the smallest
    that does is found, and that one is explained. `fault` seeds a fault of `faults.py`, for tests.

    Raises `LayoutError` for a layout that the model does not allow or that has nothing to prove, and `ProveError` where
    a process fails.
    """
    full = read_decoder_config(resolve(str(target)))
    check_fits(full, layout)
    if not used(layout):
        raise LayoutError(
            "there is nothing to prove in a layout of one process",
            next="name axes, as in --layout dp_shard=4,tp=2",
        )
    config = shrink_config(full, layout)
    chosen, not_run = choose(
        shrink_layout(layout), processes, spread=layout.dp_shard * layout.cp > layout.ep > 1
    )
    trials = _Trials(config, fault)
    runs = []
    for part in chosen:
        run = trials.run(part)
        announce(run)
        runs.append(run)
        if not run.passed:
            break
    failed = next((run for run in runs if not run.passed), None)
    return Proof(
        model=str(target),
        layout=layout,
        config=config,
        runs=tuple(runs),
        divergence=None if failed is None else trials.blame(failed.layout),
        not_run=not_run,
    )


def used(layout: Layout) -> tuple[str, ...]:
    """The axes above one."""
    return tuple(axis for axis, degree in asdict(layout).items() if degree > 1)


def choose(layout: Layout, processes: int, *, spread: bool = False) -> tuple[list[Layout], tuple[str, ...]]:
    """The parts of `layout` to run within `processes`, and the combinations of axes that this leaves out.

    With `spread`, experts are spread over fewer processes than share parameters, which takes more than one carrier, or
    one of four.
    """
    axes = used(layout)
    parts = [part for size in range(1, len(axes) + 1) for part in _parts(layout, axes, size)]
    small = [part for part in parts if part.processes <= processes]
    largest = [part for part in small if not any(set(used(part)) < set(used(other)) for other in small)]
    if not small:
        least = min(part.processes for part in parts)
        raise LayoutError(f"no part of {layout} fits into {processes} processes", allowed=f"{least} or more")
    both = any(set(CARRIERS) <= set(used(part)) for part in largest if part.ep > 1)
    if spread and not both and processes >= 4:
        largest.append(Layout(dp_shard=4, ep=2) if layout.dp_shard > 1 else Layout(cp=4, ep=2))
    proved = [set(used(part)) for part in largest]
    missing = [part for part in parts if not any(set(used(part)) <= done for done in proved)]
    smallest = [part for part in missing if not any(set(used(other)) < set(used(part)) for other in missing)]
    return largest, tuple(" with ".join(used(part)) for part in smallest)


def _parts(layout: Layout, axes: tuple[str, ...], size: int) -> Iterator[Layout]:
    """Every choice of `size` axes that is a layout of its own; ep needs an axis that carries it."""
    for names in combinations(axes, size):
        if "ep" not in names or any(carrier in names for carrier in CARRIERS):
            yield Layout.from_degrees({name: getattr(layout, name) for name in names})


class _Trials:
    """Runs of one small model, each layout at most once."""

    def __init__(self, config: DecoderConfig, fault: str) -> None:
        self.config, self.fault = config, fault
        self._done: dict[Layout, tuple[Run, Reports]] = {}

    def run(self, layout: Layout) -> Run:
        if layout not in self._done:
            start = time.perf_counter()
            reports = run_layout(self.config, layout, DTYPES, self.fault)
            found = {dtype: worst(ranks) for dtype, ranks in reports.items()}
            run = Run(
                layout=layout,
                errors={dtype: difference.error for dtype, difference in found.items()},
                worst={dtype: difference.name for dtype, difference in found.items()},
                seconds=time.perf_counter() - start,
            )
            self._done[layout] = run, reports
        return self._done[layout][0]

    def blame(self, failed: Layout) -> Divergence:
        """What is wrong in the smallest part of a layout that fails by itself."""
        axes = used(failed)
        smallest = failed
        for size in range(1, len(axes)):
            wrong = [part for part in _parts(failed, axes, size) if not self.run(part).passed]
            if wrong:
                smallest = wrong[0]
                break
        run, reports = self._done[smallest]
        dtype = next(dtype for dtype, error in run.errors.items() if not error <= TOLERANCES[dtype])
        degrees = asdict(smallest)
        divergence = diagnose(reports[dtype], dtype, _blamed(smallest), degrees)
        assert divergence is not None
        return divergence


def _blamed(layout: Layout) -> tuple[str, ...]:
    """The axes of a smallest failing layout, without the one that only carries its ep."""
    axes = used(layout)
    carriers = [axis for axis in axes if axis in CARRIERS]
    return tuple(axis for axis in axes if "ep" not in axes or len(carriers) > 1 or axis not in carriers)
