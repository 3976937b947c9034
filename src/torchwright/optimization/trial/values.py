"""Answers of a trial, as frozen values. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchwright.core.records import Coverage
from torchwright.optimization.engines.dispatch.spec import CallSpec


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model with its steps applied."""

    seconds: float
    """Seconds without anything to reuse, compilation and first calls included."""
    engine: str
    dtype: str
    threads: int | None
    allocator: str | None
    coverage: tuple[Coverage, ...]
    weight_bytes: int
    properties: frozenset[str]
    repeats: dict[str, int]
    """Name of a call → how often a pass makes it: steps may leave calls out, or make others."""
    parts: dict[str, str] = field(default_factory=dict[str, str])
    """Name of a call → the component that it calls, where there are several."""
    calls: tuple[CallSpec, ...] = ()
    """The calls that its packages take, in their order."""
    converted: float = 0.0
    """Seconds that it took to convert or compile the model, which another trial of the same conversion is spared."""
    spared: float = 0.0
    """Seconds that this trial was spared so."""


@dataclass(frozen=True, kw_only=True)
class OpenedArtifact:
    """An artifact that was loaded."""

    seconds: float
    how: str
    """The form that runs, in the words of `Loaded.how`."""
    notices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of a process while it answered every call once."""

    peak: int
    """Bytes."""
    recompiles: int
    """So far."""
    faulting: dict[str, float]
    """Seconds of each call in which its pages came from the kernel anew."""
