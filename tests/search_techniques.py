"""Techniques for tests of the search, which change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torchwright.core.errors import TechniqueFailed
from torchwright.core.records import DeviceFacts, Interval, Step
from torchwright.optimization.techniques.base import Phase, ServedGain, Technique
from torchwright.optimization.techniques.shared.for_parts import ForParts

Declare = Callable[..., None]
"""Registers a technique with other declarations in its place: `declare(Half, tolerance=0.25)`."""


@dataclass(frozen=True, kw_only=True)
class Fold(Technique):
    """A change of the graph."""

    name: ClassVar[str] = "fold"
    phase: ClassVar[Phase] = Phase.GRAPH


@dataclass(frozen=True, kw_only=True)
class Trim(Technique):
    """A change of the graph that must come before its numbers and its engine change."""

    name: ClassVar[str] = "trim"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "float32"})


@dataclass(frozen=True, kw_only=True)
class Half(Technique):
    """A narrower type; has two variants."""

    name: ClassVar[str] = "half"
    phase: ClassVar[Phase] = Phase.DTYPE
    needs: ClassVar[frozenset[str]] = frozenset({"float32"})
    gives: ClassVar[frozenset[str]] = frozenset({"half"})
    removes: ClassVar[frozenset[str]] = frozenset({"float32"})
    kind: str = "b"
    """Which; `short` has a smaller range and more digits, `gentle` rounds half as much as others."""

    @property
    def removed(self) -> frozenset[str]:
        return self.removes | {"range"} if self.kind == "short" else self.removes

    @property
    def epsilon(self) -> float:
        return {"short": 2.0**-10, "gentle": 2.0**-8}.get(self.kind, 2.0**-7)

    @property
    def kernel(self) -> str | None:
        return "half"

    @property
    def half(self) -> str | None:
        return "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Quantize(Technique):
    """Narrow weights; takes away what `half` takes away, and can leave layers alone."""

    name: ClassVar[str] = "quantize"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"linear", "compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    skip: tuple[str, ...] = ()
    """Layers left alone."""

    @property
    def kernel(self) -> str | None:
        return "int8"

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names)


@dataclass(frozen=True, kw_only=True)
class Static(Technique):
    """Needs the type that `half` takes away."""

    name: ClassVar[str] = "static"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"float32"})


@dataclass(frozen=True, kw_only=True)
class Tiles(Technique):
    """Takes types of the whole range, in a compiled model."""

    name: ClassVar[str] = "tiles"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"range", "compiled"})


@dataclass(frozen=True, kw_only=True)
class Fuse(Technique):
    """A compiler."""

    name: ClassVar[str] = "fuse"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})
    level: int = 1
    """How hard it tries."""

    @property
    def conversion(self) -> Step:
        return self.step()


@dataclass(frozen=True, kw_only=True)
class Weave(Technique):
    """Another compiler."""

    name: ClassVar[str] = "weave"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})


@dataclass(frozen=True, kw_only=True)
class Whole(Technique):
    """Gains nothing, and lets others do so."""

    name: ClassVar[str] = "whole"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"one_graph"})
    enables: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Ahead(Technique):
    """A compiler of which one variant takes whole graphs alone."""

    name: ClassVar[str] = "ahead"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})
    late: bool = False
    """Compiles at the first call, parts of graphs, too."""

    @property
    def required(self) -> frozenset[str]:
        return self.needs if self.late else self.needs | {"one_graph"}


@dataclass(frozen=True, kw_only=True)
class Engine(Technique):
    """Runs the model on code of its own."""

    name: ClassVar[str] = "engine"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"engine", "packed"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager", "float32", "float_weights", "linear"})


@dataclass(frozen=True, kw_only=True)
class Foreign(Technique):
    """An engine for models of another kind."""

    name: ClassVar[str] = "foreign"
    phase: ClassVar[Phase] = Phase.GRAPH
    needs: ClassVar[frozenset[str]] = frozenset({"language"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})


@dataclass(frozen=True, kw_only=True)
class Library(Technique):
    """Hands the whole model to a library of others; has variants."""

    name: ClassVar[str] = "library"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "exportable", "float32"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager", "float32", "float_weights", "linear"})
    kind: str = "f32"
    """Which; those called `shared…` convert the model alike."""

    skip: tuple[str, ...] = ()
    """Layers that `int8`, shared or not, leaves alone."""

    @property
    def epsilon(self) -> float:
        rounding = {"gentle": 0.6 * 2.0**-8, "bf16": 2.0**-8, "int8": 2.0**-6}
        return rounding.get(self.kind.removeprefix("shared-"), 0.0)

    @property
    def conversion(self) -> Step | None:
        return Step(name=self.name) if self.kind.startswith("shared") else None

    @property
    def calibrates(self) -> bool:
        return self.kind.endswith("int8")

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names) if self.calibrates else None


@dataclass(frozen=True, kw_only=True)
class Repack(Technique):
    """Narrow weights for that code."""

    name: ClassVar[str] = "repack"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"packed"})
    removes: ClassVar[frozenset[str]] = frozenset({"packed"})


@dataclass(frozen=True, kw_only=True)
class Tune(Technique):
    """Needs a compiled model and comes in the phase before the compiler's."""

    name: ClassVar[str] = "tune"
    phase: ClassVar[Phase] = Phase.ATTENTION
    needs: ClassVar[frozenset[str]] = frozenset({"compiled"})


@dataclass(frozen=True, kw_only=True)
class Pool(Technique):
    """A setting of the process."""

    name: ClassVar[str] = "pool"
    phase: ClassVar[Phase] = Phase.RUNTIME
    size: int = 1
    """How large."""


@dataclass(frozen=True, kw_only=True)
class Settle(Technique):
    """A setting that comes before everything else."""

    name: ClassVar[str] = "settle"
    phase: ClassVar[Phase] = Phase.PROCESS
    runs_only: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Stay(Technique):
    """A setting by which memory stays in the process."""

    name: ClassVar[str] = "stay"
    phase: ClassVar[Phase] = Phase.PROCESS
    runs_only: ClassVar[bool] = True
    keeps_pages: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Skip(Technique):
    """Leaves calls out, of which only measuring says how many."""

    name: ClassVar[str] = "skip"
    phase: ClassVar[Phase] = Phase.GRAPH

    calls: int = 0

    @property
    def is_open(self) -> bool:
        return not self.calls

    @property
    def expected_gain(self) -> float:
        return 1.0 + self.calls


@dataclass(frozen=True, kw_only=True)
class Elsewhere(Technique):
    """For another machine."""

    name: ClassVar[str] = "elsewhere"
    phase: ClassVar[Phase] = Phase.RUNTIME

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return f"not on a {device.kind}"


@dataclass(frozen=True, kw_only=True)
class Round(ForParts):
    """A narrower type, for all components or for some."""

    name: ClassVar[str] = "round"
    phase: ClassVar[Phase] = Phase.DTYPE
    needs: ClassVar[frozenset[str]] = frozenset({"float32"})
    gives: ClassVar[frozenset[str]] = frozenset({"half"})
    removes: ClassVar[frozenset[str]] = frozenset({"float32"})


@dataclass(frozen=True, kw_only=True)
class Assist(Technique):
    """Changes how the artifact is served, by so much for each condition."""

    name: ClassVar[str] = "assist"
    phase: ClassVar[Phase] = Phase.RUNTIME
    needs: ClassVar[frozenset[str]] = frozenset({"linear"})
    served: ClassVar[bool] = True
    gains: tuple[str, ...] = ("1.2",)
    """Each within a tenth, or `fails`."""

    def try_on(self, artifact: Path, workload: Mapping[str, Any], seconds: float) -> ServedGain:
        if "fails" in self.gains:
            raise TechniqueFailed("it was not measured", found="it has other tokens")
        found = [float(gain) for gain in self.gains]
        gains = {
            f"at {place}": Interval(value=gain, low=0.9 * gain, high=1.1 * gain)
            for place, gain in enumerate(found)
        }
        return ServedGain(gains=gains, over="nothing", note="much was right")

    def files(self) -> dict[str, Path]:
        return {"inner/file": Path(__file__)}


FAKES: tuple[type[Technique], ...] = (
    Fold,
    Trim,
    Half,
    Quantize,
    Static,
    Tiles,
    Fuse,
    Weave,
    Whole,
    Ahead,
    Engine,
    Foreign,
    Library,
    Repack,
    Tune,
    Pool,
    Settle,
    Stay,
    Skip,
    Elsewhere,
    Round,
    Assist,
)
