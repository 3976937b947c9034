"""Frozen values that every room exchanges. No torch here: a recipe can be read, edited and printed without it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal, cast

RECIPE_FORMAT = 4
"""Format of recipe.json; a larger one in a file was written by a newer Torchwright."""

VERIFY_TOLERANCE = 0.1
"""`verify` allows the speed-up to be so much lower than the low end of the recipe's interval: machines are noisy."""
VERIFY_RETRIES = 2
"""Repetitions of `verify`'s turns if they decide nothing."""

CLEARLY = 1.1
"""A gain that others who ran may have hidden is worth another look from here on."""
DISTURBED = 2.0
"""An interval whose ends differ by this factor shows that the machine was busy."""

Objective = Literal["latency", "throughput", "memory"]

RENAMED = {"int8_rows": "int8_dynamic"}
"""Former names of techniques → names today. Recipes and commands may still hold the former ones."""


def current_name(technique: str) -> str:
    """Return the name that a technique has today, given that name or a former one."""
    return RENAMED.get(technique, technique)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A device and its measured ceilings. GB/s are 1e9 bytes, TFLOP/s 1e12 operations."""

    kind: str
    name: str
    isa: tuple[str, ...] = ()
    cores: int = 1
    memory_bytes: int = 0
    read_gb_per_s: float | None = None
    tflops: dict[str, float] = field(default_factory=dict[str, float])
    """Measured matrix-multiply rate per dtype name: float32, bfloat16, float16, int8."""
    without: tuple[str, ...] = ()
    """Those of bfloat16 and float16 for which a processor has no instructions: layers in them take several times as
    long as in float32."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median with its 95% confidence interval, or its low end where nothing better can be claimed."""

    value: float
    low: float
    high: float
    busy: bool = False
    """Others ran while it was measured."""

    def on_busy_machine(self) -> Interval:
        """The value that can be claimed on a busy machine: the low end."""
        return dataclasses.replace(self, value=self.low, busy=True)

    def times(self, other: Interval) -> Interval:
        """The product of two, as wide as both together: of one gain upon another."""
        return Interval(
            value=self.value * other.value,
            low=self.low * other.low,
            high=self.high * other.high,
            busy=self.busy or other.busy,
        )

    @property
    def disturbed(self) -> bool:
        """Check whether it is too wide to decide anything."""
        return self.high > DISTURBED * self.low

    def __str__(self) -> str:
        text = f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"
        return f"{text}, measured on a busy machine" if self.busy else text


@dataclass(frozen=True, kw_only=True)
class CaseTime:
    """One kind of call (a shape of inputs; `prefill` or `decode`): median seconds of one call and its weight."""

    name: str
    seconds: float
    repeat: int = 1
    """Calls of this kind per pass; the objective is the sum of seconds times repeat."""


RELATIVE_ERROR = "relative error"
"""The metric of outputs that nothing says the meaning of."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A candidate's metric against the original's.

    `drop` is the loss against the reference in the budget's unit (0.01 = one per cent). `drop_low` and `drop_high`
    are the ends of its 95% confidence interval; the upper one is held against the budget. Both equal the drop if the
    metric is not a mean over a sample.
    """

    metric: str
    value: float
    reference: float
    drop: float
    drop_high: float
    higher_is_better: bool
    drop_low: float | None = None
    """None in recipes of before."""
    samples: int = 0
    unseen: bool = False
    """True if the data are held out: the search has chosen nothing by them."""
    extras: dict[str, float] = field(default_factory=dict[str, float])

    def is_open(self, max_drop: float) -> bool:
        """Check whether the loss is within a budget that its interval exceeds, and half the interval would be, too."""
        return self.drop_high > max_drop >= (self.drop + self.drop_high) / 2

    @property
    def worsens(self) -> str:
        """The verb of a loss: a metric of which more is better drops, any other rises."""
        return "drops" if self.higher_is_better else "rises"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The changes that one technique made."""

    technique: str
    changed: int
    total: int
    unit: str = "modules"
    kernel: str = ""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Module name → why it was left alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "technique", current_name(self.technique))

    def __str__(self) -> str:
        text = f"{self.changed} of {self.total} {self.unit}"
        return f"{text} through {self.kernel}" if self.kernel else text


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurements of a trial. Seconds; bytes."""

    seconds: float
    """The objective's time: one pass over the workload's calls."""
    cases: tuple[CaseTime, ...]
    peak_memory_bytes: int
    weight_bytes: int
    prepare_seconds: float = 0.0
    """Applying the steps, exporting and compiling, before the first answer."""
    quality: Quality | None = None
    recompiles: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One technique with its options, as plain data."""

    name: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", current_name(self.name))

    def __str__(self) -> str:
        """Return the step as the command line writes it; long lists are shortened."""
        if not self.options:
            return self.name
        return self.name + ":" + ",".join(f"{key}={_plain(value)}" for key, value in self.options.items())


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """The accuracy loss from changing one layer alone."""

    name: str
    error: float
    """Relative error, by the Frobenius norm."""
    whole: bool = False
    """True if the loss is of the model's whole output, such as a picture; otherwise of the layer's own output."""
    seconds: float | None = None
    """Expected time of its calls as it was, where it was estimated."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One row of the waterfall: a technique that was tried or refused, its own effect, and the verdict."""

    step: Step
    kept: bool
    reason: str
    status: Literal["kept", "dropped", "refused", "failed", "removed", "untried", "skipped", "inconclusive"]
    """`refused`: it cannot run or pay, with the number as reason; `removed`: kept first, then found not to
    contribute; `untried`: the time budget left nothing measured; `skipped`, in recipes of before: by experience it was
    not worth measuring; `inconclusive`: the ends of its interval are more than twice apart, so that noise may be all
    of its gain."""
    speedup: Interval | None = None
    """Against the best recipe so far (marginal)."""
    total_speedup: Interval | None = None
    """Against the original."""
    memory_bytes: int | None = None
    memory_change_bytes: int | None = None
    quality: Quality | None = None
    compile_seconds: float | None = None
    payback_calls: float | None = None
    """The break-even of the preparation in calls; None if infinite."""
    coverage: tuple[Coverage, ...] = ()
    ranking: tuple[Ranked, ...] = ()
    """Layers by what they lose, worst first, where that chose those to leave alone; the first of them, if many."""
    ranked: int = 0
    """The number of layers."""
    earlier: bool = False
    """Its figures are of the run that this one continues."""
    wrong: bool = False
    """The loss is so far beyond the technique's own that its rewrite is wrong for this model: a fault to report."""
    ended_seconds: float | None = None
    """Seconds from the beginning of the search to this verdict; None in recipes of before."""

    @property
    def was_slow(self) -> bool:
        """Check whether the speed alone decided against it, or noise did."""
        return self.status in ("dropped", "inconclusive")

    @property
    def undecided(self) -> bool:
        """Check whether nothing was measured, or the machine was so busy that the step may pay all the same."""
        found = self.speedup
        hidden = found is not None and found.busy and found.low <= 1.0 < found.high / CLEARLY
        return self.status in ("untried", "inconclusive") or (self.status == "dropped" and hidden)


@dataclass(frozen=True, kw_only=True)
class RooflinePoint:
    """One kind of call against the machine's measured ceilings.

    `bytes` counts the weights read once plus inputs and outputs; `operations` counts multiply and add apart, for
    matrix products, convolutions and attention. `bound_seconds` is the larger of bytes over measured bandwidth and
    operations over the measured rate of `dtype`.
    """

    case: str
    stage: Literal["original", "final"]
    dtype: str
    bytes: int
    operations: int
    seconds: float
    bound_seconds: float
    bound_by: Literal["bytes", "operations"]

    @property
    def gb_per_s(self) -> float:
        """Achieved bytes per second, in 1e9."""
        return self.bytes / self.seconds / 1e9

    @property
    def tflops(self) -> float:
        """Achieved operations per second, in 1e12."""
        return self.operations / self.seconds / 1e12

    @property
    def percent_of_bound(self) -> float:
        """100 means the machine can do no better."""
        return 100.0 * self.bound_seconds / self.seconds


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The user's limits."""

    max_drop: float = 0.01
    objective: Objective = "latency"
    time_seconds: float = 165.0


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The environment of a measurement: compiled code is reused only where this is equal."""

    torchwright: str
    torch: str
    libraries: dict[str, str]
    python: str
    device: DeviceFacts
    threads: int
    most_threads: int | None = None
    """Threads that torch had, where fewer were chosen: the machine was busy, or a quota limited it."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The fingerprint that tells two originals of the same name apart, as SHA-256 in hexadecimal."""

    structure: str
    """The hash of the names and types of its modules, and the names, dtypes and shapes of its weights."""
    weights: str
    """The hash of a sample of their values."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """The properties of an original that decide which techniques pay, as far as figures express them."""

    linear: float
    """Share of the counted operations that are matrix products, those of attention apart."""
    convolution: float
    attention: float
    depthwise: float
    """Share of the convolutions, by number, that have one channel a group."""
    recurrent: bool
    decode: bool
    """True if calls answer one token at a time."""
    operations: int
    """The operations of one pass; a multiply and an add count as two."""
    weight_bytes: int
    dtype: str
    """That most bytes of the weights are in."""
    pipeline: bool = False
    """True for a pipeline of several models, each of which runs at calls of its own."""


@dataclass(frozen=True, kw_only=True)
class RowsTime:
    """A batch size other than the example's, called as the example was."""

    rows: int
    seconds: float
    speedup: Interval


@dataclass(frozen=True, kw_only=True)
class ProcessGain:
    """The remaining speed-up if a step changes the whole process (how it keeps memory)."""

    without: Interval
    """The recipe without that step, against the original as it is."""
    both: Interval
    """The recipe against an original whose process was changed, too."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The workload's own measures, of the original and of the recipe; a name ends in its unit (`first_word_s`)."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The whole result as plain data: steps, numbers, reasons and where they were measured."""

    format: int = RECIPE_FORMAT
    created: str
    """UTC, ISO 8601."""
    workload: dict[str, Any]
    steps: tuple[Step, ...]
    budget: Budget
    baseline: Measurement
    final: Measurement
    speedup: Interval
    rungs: tuple[StepResult, ...]
    fingerprint: Fingerprint
    search_seconds: float
    roofline: tuple[RooflinePoint, ...] = ()
    notes: tuple[str, ...] = ()
    engine: str = "eager"
    runs_as: str = ""
    """The last comparison, loaded in a fresh process: the source of `speedup`."""
    holds_graph: bool = False
    """True if an artifact for the caller's module also holds the exported graph, which answers without the module."""
    rows: tuple[RowsTime, ...] = ()
    rates: tuple[Rate, ...] = ()
    process: ProcessGain | None = None
    more_seconds: float = 0.0
    """The time that trials of the untried steps would take on top of the time budget."""
    original: Identity | None = None
    """None in recipes of before."""
    features: Features | None = None
    """The original's value; None in recipes of earlier versions."""
    command: str = ""
    """The command that reproduces this result."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of the search for observers: the live table is drawn from these alone."""

    kind: Literal["baseline", "trying", "rung", "stage", "notice", "done"]
    text: str
    elapsed: float
    """Seconds since the search began."""
    time_budget: float
    rung: StepResult | None = None
    best: Interval | None = None
    """Speed-up of the best recipe so far against the original."""


def to_json(value: Any) -> str:
    """A frozen value as indented JSON text."""
    return json.dumps(dataclasses.asdict(value), indent=2, sort_keys=False, allow_nan=False) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        value = cast("list[Any]", value)
        shown = "+".join(map(str, value[:2]))
        return f"{shown}+…({len(value)})" if len(value) > 2 else shown
    return str(value)
