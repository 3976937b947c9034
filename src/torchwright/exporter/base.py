"""The contract of an export target: it writes a model in a runtime's format, and runs it there.

A package of its own adds one by an entry point of the group `torchwright.exports`. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchwright.core.errors import RefusedTechnique, WorkloadError, unknown
from torchwright.core.records import Step
from torchwright.core.registry import Registry
from torchwright.exporter.formats import Format
from torchwright.optimization.engines.dispatch.spec import CallSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from torchwright.exporter.subject import Subject
    from torchwright.optimization.techniques.base import Target

Run = Callable[[Sequence["Tensor"]], "list[Tensor]"]
"""From a call's tensors to its results', both flat."""
Values = dict[str, "Tensor"]
"""Values that operators within a graph have computed, by `key`, for the operators that the format still knows."""

PROFILED = 8
"""Calls whose operators are timed, after one that is not."""

exports: Registry[type[ExportTarget]] = Registry(
    "export target",
    group="torchwright.exports",
    builtins={
        "aoti": "torchwright.exporter.targets.aoti:Aoti",
        "executorch": "torchwright.exporter.targets.executorch.target:ExecuTorch",
        "gguf": "torchwright.exporter.targets.gguf:Gguf",
        "litert": "torchwright.exporter.targets.litert:LiteRt",
        "onnx": "torchwright.exporter.targets.onnx_file:Onnx",
        "openvino": "torchwright.exporter.targets.openvino_ir:OpenVinoIr",
        "pt2": "torchwright.exporter.targets.pt2:Pt2",
        "safetensors": "torchwright.exporter.targets.safetensors_folder:SafetensorsFolder",
    },
    next="`torchwright export --help` says what each is",
)


@dataclass(frozen=True, kw_only=True)
class Written:
    """A target's description of the package that it has written."""

    operators: dict[str, int] = field(default_factory=dict[str, int])
    """The number of operators by how they run, in the runtime's own words, such as "delegated"."""
    notes: tuple[str, ...] = ()
    planned: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes of memory that are planned ahead: by method, and of each value that has a place of its own there."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds per kind of undelegated operator in the example's call, if the runtime has no profiler of its own."""
    parting: str = ""
    """The first layer that the target's own rounding throws off, where its runtime could not show it."""


@dataclass(frozen=True, kw_only=True)
class Delegate:
    """A delegate: the backend to which a runtime hands operators."""

    precisions: tuple[str, ...]
    """The target's precisions; the first is the default."""
    fixed: str | None = None
    """Why it takes the example's sizes alone, where it does."""

    def missing(self) -> str | None:
        """Why nothing can be lowered to it here and the command that mends that, or None."""
        return None

    def elsewhere(self) -> str | None:
        """Why what is lowered to it does not run here, or None."""
        return None


class ExportTarget:
    """One format of one runtime. Its methods are those of the class: nothing is kept between them."""

    name: ClassVar[str]
    runtime: ClassVar[str]
    """The runtime of the package."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Distributions whose versions the package notes; `unavailable` says which are missing."""
    tolerances: ClassVar[dict[str, float]] = {"fp32": 1e-3}
    """Precision → its typical relative error against eager float32; the first is the default."""
    rounding: ClassVar[dict[str, float]] = {}
    """Precision → how far a row of a matrix is from the original's at most, by its nature, where `weights` tell."""
    formats: ClassVar[dict[str, str]] = {}
    """Techniques of a recipe whose number format it can express → its precision for them."""
    skips: ClassVar[bool] = False
    """True if it leaves the layers that such a step skips at higher precision."""
    largest_batch: ClassVar[bool] = False
    """True if it plans memory ahead, for a largest batch size."""
    largest_context: ClassVar[bool] = False
    """True if the package holds a language model's cache, for a largest number of tokens."""
    fixed: ClassVar[str | None] = None
    """Why it takes the example's sizes alone, where it does."""
    settings_of_layers: ClassVar[bool] = False
    """True if `settings` are per operator, each by "module, operator"."""
    named: ClassVar[bool] = False
    """True if `values` have the operators' own keys, instead of their position within their kind."""
    levels: ClassVar[tuple[str, ...]] = ()
    """Levels of the processor's family for which a package of machine code can be built."""
    delegates: ClassVar[Mapping[str, Delegate]] = {}
    """The runtime's delegates by name; the first is the default."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Why it cannot run here and the command that mends that, or None. Imports none of its libraries."""
        return None

    @classmethod
    def unwritable(cls) -> str | None:
        """The same of what only writing a package takes."""
        return None

    @classmethod
    def write(cls, subject: Subject, precision: str, folder: Path) -> Written:
        """Write the package into the empty `folder`. Raises `RefusedTechnique` where the format has no such model."""
        raise NotImplementedError

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        """Open a package as its users would, on this many threads. Raises `ArtifactError`."""
        raise NotImplementedError

    @classmethod
    def values(cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor]) -> Values:
        """Return the values that the package's own operators compute for a call; empty if its runtime does not report
        them.
        """
        return {}

    @classmethod
    def times(
        cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor], threads: int
    ) -> list[dict[str, float]]:
        """Time of each kind of operator in each of PROFILED calls, as the runtime counts it; empty where not."""
        return []

    @classmethod
    def weights(cls, folder: Path) -> dict[str, Tensor]:
        """The package's own weights by the names that the model has for them; empty where they cannot be read."""
        return {}

    @classmethod
    def settings(cls, folder: Path) -> dict[str, Any]:
        """Return the package's contents in place of a graph; empty if it has one."""
        return {}

    @classmethod
    def reweighted(cls, folder: Path, spec: CallSpec, weights: dict[str, Tensor]) -> Run | None:
        """The package with these weights in place of its own; None where its runtime takes none."""
        return None

    @classmethod
    def format_of(cls, steps: Sequence[Step]) -> Format | None:
        """The first of a recipe's steps that there is a precision for, if its skip list can be honoured."""
        for step in steps:
            if step.name in cls.formats:
                found = Format(step=step, precision=cls.formats[step.name])
                return found if cls.skips or not found.skip else None
        return None

    @classmethod
    def check_delegate(cls, name: str | None) -> str:
        """The delegate that is asked for, or the target's own, "" where it has none.

        Raises `UnknownName` for one that it lacks, and `WorkloadError` for one that nothing can be lowered to here.
        """
        if not cls.delegates:
            if name is not None:
                raise WorkloadError(f"{cls.name} has no delegates", found=f"--delegate {name}")
            return ""
        chosen = next(iter(cls.delegates)) if name is None else name
        if chosen not in cls.delegates:
            raise unknown("delegate", chosen, cls.delegates, next="leave --delegate out for the first")
        if reason := cls.delegates[chosen].missing():
            raise WorkloadError(f"nothing can be lowered to '{chosen}' here", found=reason)
        return chosen

    @classmethod
    def precisions(cls, delegate: str) -> tuple[str, ...]:
        """Those of a delegate, the one to take first."""
        return cls.delegates[delegate].precisions if delegate else tuple(cls.tolerances)

    @classmethod
    def check_precision(cls, precision: str | None, delegate: str = "") -> str:
        """The precision that is asked for, or the first. Raises `RefusedTechnique` for one that there is not."""
        own = cls.precisions(delegate)
        if precision is None:
            return own[0]
        if precision not in own:
            by = f" for {delegate}" if delegate else ""
            raise RefusedTechnique(f"{cls.name} has no precision '{precision}'{by}", allowed=", ".join(own))
        return precision


class GraphTarget(ExportTarget):
    """A target that takes the exported graph."""

    @classmethod
    def write(cls, subject: Subject, precision: str, folder: Path) -> Written:
        return cls.convert(subject.graph.program, subject.graph.spec, subject.target, precision, folder)

    @classmethod
    def convert(
        cls, program: ExportedProgram, spec: CallSpec, target: Target, precision: str, folder: Path
    ) -> Written:
        """Write a graph, which may be changed; `target` has the calls that calibrate."""
        raise NotImplementedError
