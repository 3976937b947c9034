"""A run proved on this machine: in its layout where there is room for it, and what its failures have in common."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path

from torchwright.hardware.devices.cpu import usable_memory_bytes
from torchwright.hub.folder import resolve
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import decoder_config, read_decoder_config
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.parallel.apply import check_fits
from torchwright.train.prove.compare import RankReport
from torchwright.train.prove.diagnose import Divergence, diagnose, worst
from torchwright.train.prove.launch import EXACT, Around, columns, run_layout
from torchwright.train.prove.processes import ProveError
from torchwright.train.prove.shrink import shrink
from torchwright.train.run.config import run as runs
from torchwright.train.run.config.read import read_run

PROCESSES = 8
"""The most processes of one run, by default."""
PROCESS_BYTES = 2**29
"""Memory of a process, its compiler included."""
CARRIERS = ("dp_shard", "cp")
"""ep spreads experts over the processes of these."""
PLAIN = {
    "compile": {"compile": False},
    "recompute": {"recompute": "none"},
    "float8 gather": {"gather": None},
    "accumulation": {"micro_batches": 1},
    "qat": {"qat": None},
}
"""Feature of a run → what leaves it out."""


@dataclass(frozen=True, kw_only=True)
class LayoutProof:
    """One layout's three steps against the reference."""

    layout: Layout
    compiled: bool
    errors: dict[str, float]
    """column → the largest relative error, in tolerances, of any value on any process."""
    worst: dict[str, str]
    """column → the value that has it."""
    passed: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Everything `torchwright prove` says."""

    model: str
    run: runs.Run
    config: DecoderConfig
    """The shape of the small model that ran."""
    parts: tuple[LayoutProof, ...]
    divergence: Divergence | None
    """The failure of the smallest part, None if all passed."""
    extrapolated: tuple[str, ...]
    """Differences between the layout and the run that stood for it."""

    @property
    def layout(self) -> Layout:
        return self.run.parallel

    @property
    def passed(self) -> bool:
        return self.divergence is None


def prove_file(
    path: Path, processes: int = PROCESSES, announce: Callable[[LayoutProof], None] = lambda part: None
) -> Proof:
    """Prove the run of a run file: its layout with its compilation, recomputation, precision, optimizer and so on.

    Of the model only its configuration is read. Raises as `read_run` and `prove`.
    """
    run = read_run(path)
    if run.lora is not None:
        raise ProveError(
            "prove compares every parameter's gradient, and adapters leave most without one",
            next="prove the run without [lora]: its layout, precision and compilation are the same",
        )
    if run.needs is not None:
        raise ProveError(
            "prove compares the loss of the next token, and the run has [preference] or [head]",
            next="prove the run without it: its layout, precision and compilation are the same",
        )
    return prove(str(path), [run], read_model(run, path.parent), processes, announce=announce)


def prove_layout(
    target: str | Path,
    layout: Layout,
    processes: int = PROCESSES,
    announce: Callable[[LayoutProof], None] = lambda part: None,
) -> Proof:
    """Prove `layout` for the model of a folder or hub id, of which only config.json is read: as it is, and compiled.

    Raises `LayoutError` where there is nothing to prove, and as `prove`.
    """
    if not used(layout):
        raise LayoutError(
            "there is nothing to prove in a layout of one process",
            next="name axes, as in --layout dp_shard=4,tp=2",
        )
    plain = runs.Run(
        out="",
        tokens=1,
        batch_tokens=1,
        context=1,
        precision="fp32",
        model=runs.Model(folder=str(target)),
        data=runs.Data(train=[""]),
        micro_batches=layout.pp,
        layout={axis: getattr(layout, axis) for axis in used(layout)},
    )
    compiled = plain.model_copy(update={"compile": True})
    return prove(
        str(target),
        [plain, compiled],
        read_decoder_config(resolve(str(target))),
        processes,
        announce=announce,
    )


def read_model(run: runs.Run, folder: Path) -> DecoderConfig:
    """The shape of a run's model; `folder` is the run file's."""
    if run.model.folder is not None:
        return read_decoder_config(folder / run.model.folder)
    assert run.model.config is not None
    return decoder_config(run.model.config, "`model.config` of the run file")


def prove(
    name: str,
    ways: Sequence[runs.Run],
    full: DecoderConfig,
    processes: int = PROCESSES,
    around: Around = contextlib.nullcontext,
    announce: Callable[[LayoutProof], None] = lambda part: None,
) -> Proof:
    """Prove that runs that differ only in their layout agree, for a model of the shape `full`.

    Runs the layout itself if it takes at most `processes` processes and memory allows. Otherwise runs every
    combination of its axes that fits, and each axis at the highest degree that fits. `announce` is called for each.
    If one diverges, its parts run until the smallest failing one is found, which is then explained. `around` is for
    tests.

    Raises `LayoutError` for a layout that the model does not allow, and `ProveError` if a process fails.
    """
    run = ways[0]
    check_fits(full, run.parallel, run.pipeline.stages)
    room = max(1, min(processes, usable_memory_bytes() // PROCESS_BYTES))
    chosen, extrapolated = choose(run.parallel, room)
    trials = _Trials(full, around)
    parts, failed = [], None
    for layout, way in product(chosen, ways):
        trial = _in_layout(way, layout)
        parts.append(trials.part(trial))
        announce(parts[-1])
        if not parts[-1].passed:
            failed = trial
            break
    return Proof(
        model=name,
        run=run,
        config=shrink(run, full, chosen[0]).config,
        parts=tuple(parts),
        divergence=None if failed is None else trials.blame(failed),
        extrapolated=extrapolated,
    )


def used(layout: Layout) -> tuple[str, ...]:
    """The axes above one."""
    return tuple(axis for axis, degree in asdict(layout).items() if degree > 1)


def choose(layout: Layout, processes: int) -> tuple[list[Layout], tuple[str, ...]]:
    """The layouts to run within `processes`, and what of `layout` that leaves to be extrapolated."""
    if layout.processes <= processes:
        return [layout], ()
    axes = used(layout)
    two = Layout.from_degrees({axis: min(degree, 2) for axis, degree in asdict(layout).items()})
    pairs = [part for size in range(1, len(axes) + 1) for part in _parts(two, axes, size)]
    fitting = [part for part in pairs if part.processes <= processes]
    if not fitting:
        least = min(part.processes for part in pairs)
        raise LayoutError(f"no part of {layout} fits into {processes} processes", allowed=f"{least} or more")
    highest = {axis: _highest(layout, axis, processes) for axis in axes}
    largest = [part for part in fitting if not any(set(used(part)) < set(used(other)) for other in fitting)]
    higher = list(dict.fromkeys(part for part in highest.values() if part not in fitting))
    chosen = higher + [part for part in largest if all(used(part) != used(other) for other in higher)]
    proved = [set(used(part)) for part in chosen]
    missing = [part for part in pairs if not any(set(used(part)) <= done for done in proved)]
    smallest = [part for part in missing if not any(set(used(other)) < set(used(part)) for other in missing)]
    said = [
        f"{axis}={getattr(layout, axis)} (ran at {getattr(part, axis)})"
        for axis, part in highest.items()
        if getattr(part, axis) < getattr(layout, axis)
    ]
    said += [f"{' with '.join(used(part))} together" for part in smallest]
    return chosen, tuple(said) or (f"all axes together at their degrees: {layout}",)


def _highest(layout: Layout, axis: str, processes: int) -> Layout:
    """The highest degree of one axis that runs within `processes`; ep with the axis that carries it."""
    carrier = axis if axis != "ep" else max(CARRIERS, key=lambda name: getattr(layout, name))
    degree = getattr(layout, carrier)
    ways = max(part for part in range(1, processes + 1) if degree % part == 0)
    if axis == "ep":
        return Layout.from_degrees({carrier: ways, "ep": math.gcd(layout.ep, ways)})
    return Layout.from_degrees({axis: ways})


def _parts(layout: Layout, axes: tuple[str, ...], size: int) -> Iterator[Layout]:
    """Every choice of `size` axes that is a layout of its own; ep needs axes that carry it."""
    for names in combinations(axes, size):
        degrees = {name: getattr(layout, name) for name in names}
        if (
            layout.ep == 1
            or "ep" not in names
            or math.prod(degrees.get(c, 1) for c in CARRIERS) % layout.ep == 0
        ):
            yield Layout.from_degrees(degrees)


def _in_layout(run: runs.Run, layout: Layout) -> runs.Run:
    return run.model_copy(update={"layout": {axis: getattr(layout, axis) for axis in used(layout)}})


class _Trials:
    """Runs of one model's small forms, each at most once."""

    def __init__(self, full: DecoderConfig, around: Around) -> None:
        self.full, self.around = full, around
        self._done: dict[tuple[str, str], list[RankReport]] = {}

    def part(self, run: runs.Run) -> LayoutProof:
        """A run in every column that it is proved in."""
        start = time.perf_counter()
        names = columns(run)
        self._done |= {
            (run.digest(), name): reports
            for name, reports in run_layout(run, self.full, names, self.around).items()
        }
        found = {name: worst(self._done[run.digest(), name]) for name in names}
        return LayoutProof(
            layout=run.parallel,
            compiled=run.compile,
            errors={name: difference.error for name, difference in found.items()},
            worst={name: difference.name for name, difference in found.items()},
            passed=not any(difference.wrong for difference in found.values()),
            seconds=time.perf_counter() - start,
        )

    def blame(self, failed: runs.Run) -> Divergence:
        """Return the fault of the smallest run that fails as `failed` does: the least features, axes, and degrees."""
        column = next(name for name in columns(failed) if self._wrong(failed, name))
        features, smallest = [], failed
        for feature, update in PLAIN.items():
            without = smallest.model_copy(update=update)
            if without == smallest or (feature == "qat" and column == EXACT):
                continue
            if feature == "accumulation" and smallest.parallel.pp > 1:  # stages need micro-batches
                continue
            if self._wrong(without, column):
                smallest = without
            else:
                features.append(feature)
        smallest = self._least(smallest, column)
        divergence = diagnose(
            self._done[smallest.digest(), column], column, _blamed(smallest.parallel), features
        )
        assert divergence is not None
        return divergence

    def _least(self, failed: runs.Run, column: str) -> runs.Run:
        """The fewest axes that fail by themselves, and those at two if they fail so."""
        layout = failed.parallel
        axes = used(layout)
        smaller = (part for size in range(len(axes)) for part in _parts(layout, axes, size))
        found = next((part for part in smaller if self._wrong(_in_layout(failed, part), column)), layout)
        pair = Layout.from_degrees({axis: min(degree, 2) for axis, degree in asdict(found).items()})
        if pair != found and self._wrong(_in_layout(failed, pair), column):
            found = pair
        return _in_layout(failed, found)

    def _wrong(self, run: runs.Run, column: str) -> bool:
        key = run.digest(), column
        if key not in self._done:
            self._done[key] = run_layout(run, self.full, [column], self.around)[column]
        return worst(self._done[key]).wrong


def _blamed(layout: Layout) -> dict[str, int]:
    """The axes of a smallest failing layout, without the one that only carries its ep."""
    axes = used(layout)
    carriers = [axis for axis in axes if axis in CARRIERS]
    return {
        axis: getattr(layout, axis)
        for axis in axes
        if "ep" not in axes or len(carriers) > 1 or axis not in carriers
    }
