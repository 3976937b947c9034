"""The content of a profile, as frozen values. No torch here: `--json` prints them as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchwright.core.records import DeviceFacts

Kind = Literal[
    "matmul",
    "convolution",
    "attention",
    "memory-bound",
    "casts",
    "copies",
    "fused kernels",
    "compiled code",
    "other",
    "dispatch",
    "idle",
]
"""The kinds of work.

`memory-bound`: elementwise operators, norms, reductions, lookups. `casts`: another dtype, quantized ones among them.
`copies`: the same values in another place or layout. `fused kernels`: what the compiler made of several operators.
`compiled code`: kernels that were compiled without names. `dispatch`: views, allocations, and operators that only call
others. `idle`: no operator ran.
"""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """An achieved rate, against the machine's measured rate that it comes closest to."""

    gflops: float | None
    """1e9 operations per second, multiply and add apart; None for what moves data and computes little."""
    gb_per_s: float | None
    """1e9 bytes per second of inputs and outputs, each counted once; None where an output's size is not known."""
    dtype: str
    bound_by: Literal["operations", "bytes"] | None = None
    """None where the machine's rate was not measured."""
    share: float | None = None
    """Share of that rate; above one where the data came from a cache."""


@dataclass(frozen=True, kw_only=True)
class OperatorTime:
    """One operator over one pass: its own time, without that of operators that it calls."""

    name: str
    kind: Kind
    calls: float
    """In one pass over the workload's calls."""
    seconds: float
    share: float
    """Share of the pass."""
    rate: Rate | None = None


@dataclass(frozen=True, kw_only=True)
class KindTime:
    """All operators of one kind over one pass."""

    kind: Kind
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """One kind of call."""

    name: str
    unrecorded_seconds: float
    """Seconds of one call without the profiler."""
    repeat: int
    """Calls of one pass."""
    recorded: int
    """Number of recorded calls."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One pass over a workload's calls, from calls that the profiler saw."""

    seconds: float
    unrecorded_seconds: float
    """The same without the profiler."""
    idle_seconds: float
    idle_share: float
    computing_seconds: float
    """In products, convolutions and attention."""
    operations: float | None
    """Operations, multiply and add apart; the original's where compiled code hides its sizes.

    None where some of the original's are not known either."""
    calls: tuple[CallTime, ...]
    kinds: tuple[KindTime, ...]
    """Longest first; their shares add up to one where operators did not run side by side."""
    operators: tuple[OperatorTime, ...]
    """Longest first."""


@dataclass(frozen=True, kw_only=True)
class ProfiledStage:
    """A model at one point of its recipe."""

    name: str
    """`original`, the step that was added, or `artifact`."""
    runs_as: str
    recording: Recording | None
    failed: str | None = None
    """The reason for a missing recording."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GraphBreak:
    """A line of the user's at which a compiled graph ends, or which the compiler runs operator by operator."""

    cause: str
    """A short name, such as `print` or `data-dependent branch`."""
    file: str
    line: int
    text: str
    """The line itself."""
    reason: str
    cure: str
    count: int
    """Number of times that the compiler met the break."""
    whole_function: bool
    """True if the whole function around it runs uncompiled."""
    torch_says: str
    """torch's own first line, to search for."""
    rewritten: bool = False
    """True if the technique `whole_graph` rewrites it."""
    left: str | None = None
    """Why it does not."""


@dataclass(frozen=True, kw_only=True)
class Breaks:
    """The graph breaks of a model."""

    graphs: int
    """Into which torch.compile cuts the calls; 1 for each kind of call is the best."""
    found: tuple[GraphBreak, ...]
    failed: str | None = None
    """Why torch.compile could not be asked."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything that `torchwright profile` says."""

    target: str
    machine: DeviceFacts
    threads: int
    torch: str
    stages: tuple[ProfiledStage, ...]
    breaks: Breaks | None
    """The graph breaks of the original, or None."""
    disturbed: str | None = None
    """Why the machine's rates are not known, such as "machine busy (load 20 on 2 cores)"."""
    trace: str | None = None
