"""Priors from recorded searches of similar models: the order of trials.

`experience.json` has an entry for each recorded search; `benchmarks/optimize/experience.py table` makes it from their
recipes. Those on the same kind of machine are weighted by how near their model is: a nearest-neighbour estimate
(Nadaraya, 1964; Watson, 1964), drawn towards the guess without experience. What ships is measured here, as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwright.core.json_file import read_json, typed
from torchwright.core.records import DeviceFacts, Features, Step

TABLE = Path(__file__).with_name("experience.json")
DECADES = 3.0
"""So many powers of ten, in operations or in operations a byte of weights, count as a distance of 1. From there on a
model says nothing of another: one of linear layers alone is 1.4 from one of convolutions."""
PRIOR = 0.5
"""Weight of the guess without experience, in searches of the very same model."""
SMALL_LOSS = 1e-3
"""Losses below are alike."""
LEVELS = ("amx_int8", "avx512_vnni", "avx512f", "avx2", "bf16", "i8mm", "dotprod", "neon")
"""Instruction sets that decide which CPU kernels are fast, the best first."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one step in one recorded search."""

    gain: float | None
    """Its speed-up: of a step that runs the whole model over the original; of any other in the recipe that the search
    ended with, or of the best recipe with it over the best without. None where it was not timed."""
    drop: float | None
    """Relative error, where it was judged."""
    cost: float
    """Seconds of its trial over those that it took to measure and describe the original."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for what has no logarithm."""
        if not all(value is None or value > 0 for value in (self.gain, self.cost)):
            raise ValueError("gain and cost are above 0")


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """One recorded search."""

    model: str
    machine: str
    """Name of the processor or card."""
    instructions: str
    cores: int
    torch: str
    commit: str
    max_drop: float
    features: Features
    trials: dict[str, Trial]
    """By the step, as the command line writes it."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for what has no logarithm."""
        if self.cores < 1:
            raise ValueError("a search has a core at least")


@dataclass(frozen=True, kw_only=True)
class Table:
    """The content of the file."""

    searches: tuple[SearchRecord, ...]


def read(path: Path = TABLE) -> tuple[SearchRecord, ...]:
    """The table; raises `ArtifactError`, which says what is wrong with it."""
    return typed(read_json(path), Table, str(path)).searches


@dataclass(frozen=True, kw_only=True)
class Experience:
    """The recorded searches near one, each with its weight: 1 for a model of the same features, 0 for one too far."""

    max_drop: float = 0.0
    """Relative error that the budget allows; infinity where another metric judges."""
    near: tuple[tuple[float, SearchRecord], ...] = ()

    def given(self, losses: Mapping[str, float]) -> Experience:
        """The same for a search that has found these losses: those that lost otherwise by the same steps count less."""
        weighted = [(weight * _agreement(record, losses), record) for weight, record in self.near]
        near = sorted((each for each in weighted if each[0] > 0), key=lambda each: -each[0])
        return Experience(max_drop=self.max_drop, near=tuple(near))

    def gain(self, step: Step, otherwise: float) -> float:
        """The speed-up to expect of a step; `otherwise` is expected without experience."""
        found = [(weight, self._gain(trial)) for weight, _, trial in self._trials(step)]
        return _geometric([*((weight, gain) for weight, gain in found if gain), (PRIOR, otherwise)])

    def cost(self, step: Step, unit: float, otherwise: float) -> float:
        """Seconds to expect of a step's trial, where measuring and describing the original took `unit`."""
        found = [(weight, trial.cost * unit) for weight, _, trial in self._trials(step)]
        return _geometric([*found, (PRIOR, otherwise)])

    def _trials(self, step: Step) -> list[tuple[float, SearchRecord, Trial]]:
        """Return the results of a step in near searches, the nearest first."""
        name = str(step)
        return [
            (weight, record, record.trials[name]) for weight, record in self.near if name in record.trials
        ]

    def _gain(self, trial: Trial) -> float | None:
        """The gain here of what one search found; None where this budget allows what was never timed there."""
        if trial.drop is not None and trial.drop > self.max_drop:
            return 1.0
        return trial.gain and max(trial.gain, 1.0)


def near(
    records: Sequence[SearchRecord], features: Features, device: DeviceFacts, max_drop: float
) -> Experience:
    """Return the experience with similar models on this kind of machine."""
    weighted: list[tuple[float, SearchRecord]] = []
    for record in records:
        cores = abs(math.log10(record.cores / device.cores))  # ten times as many are too far
        weight = 1.0 - distance(record.features, features) - cores
        if record.instructions == instructions(device) and weight > 0:
            weighted.append((weight, record))
    return Experience(max_drop=max_drop, near=tuple(sorted(weighted, key=lambda each: -each[0])))


def distance(one: Features, other: Features) -> float:
    """Return the distance of two models.

    It is infinite between types of weights, between decode steps and other calls, and between pipelines and single
    models."""
    kinds = [(each.dtype, each.decode, each.recurrent, each.pipeline) for each in (one, other)]
    if kinds[0] != kinds[1]:
        return math.inf
    return math.dist(_point(one), _point(other))


def _agreement(record: SearchRecord, losses: Mapping[str, float]) -> float:
    """1 where the steps that both have tried lost as much in a search as in this one, 0 from ten times as much on."""
    both = [
        (losses[name], trial.drop)
        for name, trial in record.trials.items()
        if trial.drop is not None and name in losses
    ]
    apart = [abs(math.log10(max(ours, SMALL_LOSS) / max(theirs, SMALL_LOSS))) for ours, theirs in both]
    return max(0.0, 1.0 - sum(apart) / len(apart)) if apart else 1.0


def instructions(device: DeviceFacts) -> str:
    """Return the best instruction set of a CPU that decides the kernels; all of them for other devices."""
    best = next((level for level in LEVELS if level in device.isa), None)
    return f"{device.kind} {best or ' '.join(device.isa)}".strip()


def _point(features: Features) -> tuple[float, ...]:
    operations, weights = max(features.operations, 1), max(features.weight_bytes, 1)
    return (
        features.linear,
        features.convolution,
        features.attention,
        features.depthwise,
        math.log10(operations) / DECADES,
        math.log10(operations / weights) / DECADES,
    )


def _geometric(weighted: Sequence[tuple[float, float]]) -> float:
    """The weighted geometric mean of values above 0."""
    total = sum(weight for weight, _ in weighted)
    return math.exp(sum(weight * math.log(value) for weight, value in weighted) / total)
