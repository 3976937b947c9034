"""The technique contract, and the target that techniques transform.

A technique is a frozen dataclass: its fields are its options, its docstring is its row in the documentation. No
technique names another one. Order comes from `phase`; clashes come from `needs`, `gives` and `removes`, which are
sets of properties of the target (`linear`, `float32`, `float_weights`, `compiled`, …).
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique, unknown
from torchwright.core.records import Coverage, DeviceFacts, Interval, Step
from torchwright.core.registry import Registry
from torchwright.workloads.base import Workload

techniques: Registry[type[Technique]] = Registry(
    "technique",
    group="torchwright.techniques",
    builtins={
        "whole_graph": "torchwright.optimization.techniques.whole_graph:WholeGraph",
        "fold_batchnorm": "torchwright.optimization.techniques.fold_batchnorm:FoldBatchNorm",
        "channels_last": "torchwright.optimization.techniques.channels_last:ChannelsLast",
        "pointwise_linear": "torchwright.optimization.techniques.pointwise_linear:PointwiseLinear",
        "mask_decoder": "torchwright.optimization.techniques.mask_decoder:MaskDecoder",
        "dtype": "torchwright.optimization.techniques.dtype:Dtype",
        "fast_math": "torchwright.optimization.techniques.fast_math:FastMath",
        "packed_convolution": "torchwright.optimization.techniques.packed_convolution:PackedConvolution",
        "packed_recurrent": "torchwright.optimization.techniques.packed_recurrent:PackedRecurrent",
        "int8_static": "torchwright.optimization.techniques.int8_static:Int8Static",
        "int8_dynamic": "torchwright.optimization.techniques.int8_dynamic:Int8Dynamic",
        "int8_weight_only": "torchwright.optimization.techniques.int8_weight_only:Int8WeightOnly",
        "int4_weight_only": "torchwright.optimization.techniques.int4_weight_only:Int4WeightOnly",
        "torchao": "torchwright.optimization.techniques.torchao:TorchAO",
        "emulated_floats": "torchwright.optimization.techniques.emulated_floats:EmulatedFloats",
        "sparse24": "torchwright.optimization.techniques.sparse24:Sparse24",
        "attention": "torchwright.optimization.techniques.attention:SwitchAttention",
        "attention_backend": "torchwright.optimization.techniques.attention_backend:AttentionBackend",
        "dense_attention": "torchwright.optimization.techniques.dense_attention:DenseAttention",
        "grid_attention": "torchwright.optimization.techniques.grid_attention:GridAttention",
        "matmul_attention": "torchwright.optimization.techniques.matmul_attention:MatmulAttention",
        "compile": "torchwright.optimization.techniques.compile:Compile",
        "openvino": "torchwright.optimization.techniques.openvino:RunOpenVino",
        "onnxruntime": "torchwright.optimization.techniques.onnxruntime:RunOnnxRuntime",
        "native": "torchwright.optimization.techniques.native:Native",
        "native_speech": "torchwright.optimization.techniques.native_speech:NativeSpeech",
        "native_seq2seq": "torchwright.optimization.techniques.native_seq2seq:NativeSeq2Seq",
        "native_vision": "torchwright.optimization.techniques.native_vision:NativeVision",
        "w8a8": "torchwright.optimization.techniques.w8a8:W8A8",
        "w4a8": "torchwright.optimization.techniques.w4a8:W4A8",
        "w4a16": "torchwright.optimization.techniques.w4a16:W4A16",
        "kv8": "torchwright.optimization.techniques.kv8:KV8",
        "max_autotune": "torchwright.optimization.techniques.max_autotune:MaxAutotune",
        "regional": "torchwright.optimization.techniques.regional:Regional",
        "cuda_graphs": "torchwright.optimization.techniques.cuda_graphs:CudaGraphs",
        "step_caching": "torchwright.optimization.techniques.step_caching:StepCaching",
        "fused_qkv": "torchwright.optimization.techniques.fused_qkv:FusedQKV",
        "vae_tiling": "torchwright.optimization.techniques.vae_tiling:VaeTiling",
        "guidance_skip": "torchwright.optimization.techniques.guidance_skip:GuidanceSkip",
        "shape_buckets": "torchwright.optimization.techniques.shape_buckets:ShapeBuckets",
        "threads": "torchwright.optimization.techniques.threads:Threads",
        "allocator": "torchwright.optimization.techniques.allocator:Allocator",
        "draft": "torchwright.optimization.techniques.draft:Draft",
    },
)


class Phase(enum.IntEnum):
    """The order in which steps are applied to a model."""

    PROCESS = 0
    GRAPH = 1
    DTYPE = 2
    WEIGHTS = 3
    ATTENTION = 4
    CACHE = 5
    COMPILE = 6
    RUNTIME = 7


@dataclass(kw_only=True)
class Settings:
    """Runtime settings, apart from the model itself. Applied only inside a trial's own process."""

    engine: str = "eager"
    """A name in the registry of engines (`optimization/engines/base.py`)."""
    inductor: dict[str, Any] = field(default_factory=dict)
    """Overrides of torch._inductor.config, patched around compilation."""
    dynamic: bool | None = False
    """torch.compile's meaning: False is one graph per shape, True one graph for all, None decides by itself."""
    regional: bool = False
    parts: tuple[str, ...] = ()
    """Components whose calls are compiled where not all are."""
    mode: str | None = None
    threads: int | None = None
    allocator: str | None = None
    """For `devices.allocator.apply_allocator`, before the model runs."""
    options: dict[str, Any] = field(default_factory=dict)
    """The engine's own options, set by the technique that asks for it."""
    rewrites: list[Callable[[torch.fx.GraphModule], None]] = field(default_factory=list)
    """Changes to every exported graph before it is compiled, each in place."""
    endings: list[Callable[[], None]] = field(default_factory=list)
    """Changes, after all steps, to a model that no compiler takes."""


@dataclass(kw_only=True)
class Target:
    """A model on its way to being fast: what techniques read and change."""

    model: nn.Module
    workload: Workload
    device: DeviceFacts
    properties: set[str]
    settings: Settings = field(default_factory=Settings)
    compute_dtype: torch.dtype = torch.float32
    coverage: list[Coverage] = field(default_factory=list)
    kernel_seconds: dict[str, float] = field(default_factory=dict)
    """Micro-benchmark: seconds that all of the model's linear layers take in one pass, per kernel."""
    conversion: Path | None = None
    """Folder in which an engine finds what it made of the same model in another trial, or leaves it."""
    converted: float = 0.0
    """Seconds that making it took in this trial."""
    spared: float = 0.0
    """Seconds that it took in the trial that left it, where this one found it."""


@dataclass(frozen=True, kw_only=True)
class ServedGain:
    """Gains of a step that changes how an artifact is served, and not what it computes."""

    gains: dict[str, Interval]
    """Condition, in words → the speed-up there."""
    over: str
    """The way of serving that it is compared with."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One way to make a model faster or smaller."""

    name: ClassVar[str]
    phase: ClassVar[Phase]
    needs: ClassVar[frozenset[str]] = frozenset()
    """Properties the target must have."""
    gives: ClassVar[frozenset[str]] = frozenset()
    removes: ClassVar[frozenset[str]] = frozenset()
    least_gain: ClassVar[float] = 1.01
    """The speed-up over the best recipe without it that is worth having it."""
    tolerance: ClassVar[float] = 1e-4
    """Relative error of a small random model's outputs that is its nature; the default allows sums in another order.

    The contract tests hold it against this; what a user's model may lose is the budget's to say.
    """
    enables: ClassVar[bool] = False
    """True if its purpose is what it gives to others: dropped alone, it is tried again with each step that needs it."""
    runs_only: ClassVar[bool] = False
    """True if it changes how a process runs and not what an engine builds from the model."""
    keeps_pages: ClassVar[bool] = False
    """True if it saves only the cost of page faults."""
    served: ClassVar[bool] = False
    """True if it changes how the artifact is served, and not the model: `try_on` measures it after the search."""
    own_kernels: ClassVar[bool] = False
    """True if it runs on Torchwright's C++ kernels, which are compiled once for each version."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        """Why this device cannot run it at all and what would mend that, or None."""
        return None

    def variants(self, target: Target) -> Iterable[Self]:
        """Return the variants worth trying on this model and machine, most promising first."""
        return (self,)

    def refuse(self, target: Target) -> str | None:
        """The reason it cannot or need not run here, in words and with the number that decided, or None.

        Asked only where `available` names no reason.
        """
        return None

    def reshape(self, workload: Workload) -> Workload:
        """The workload asked in other calls for the same answers; `apply` finds it in `target.workload`."""
        return workload

    def apply(self, target: Target) -> None:
        """Change the target's model and settings, and call `cover`."""
        raise NotImplementedError

    def try_on(self, artifact: Path, workload: Mapping[str, Any], seconds: float) -> ServedGain:
        """Measure a step that is `served` on an artifact of a workload so described, within so many seconds.

        Raises a `TorchwrightError` where that is not possible.
        """
        raise NotImplementedError

    def files(self) -> dict[str, Path]:
        """Files that an artifact needs of a step that is `served`: path in the folder of its name → the file."""
        return {}

    def cover(
        self,
        target: Target,
        total: int,
        *,
        changed: int | None = None,
        unit: str = "modules",
        kernel: str = "",
        skipped: dict[str, str] | None = None,
    ) -> None:
        """Record the coverage of `apply`: all of `total` but what was skipped, unless `changed` is another number."""
        skipped = skipped or {}
        changed = total - len(skipped) if changed is None else changed
        coverage = Coverage(
            technique=self.name, changed=changed, total=total, unit=unit, kernel=kernel, skipped=skipped
        )
        target.coverage.append(coverage)

    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before the process starts."""
        return {}

    @property
    def required(self) -> frozenset[str]:
        """`needs`, and what these options need besides."""
        return self.needs

    @property
    def removed(self) -> frozenset[str]:
        """`removes`, and what these options remove besides."""
        return self.removes

    @property
    def expected_loss(self) -> float:
        """Relative error that these options may have on a small random model; 10 times as much is a wrong rewrite."""
        return self.tolerance

    @property
    def epsilon(self) -> float:
        """Relative error by which it rounds what it multiplies; 0 where numbers stay as they were.

        Only the order of trials comes from it: what rounds more than a step that lost too much will lose too much.
        """
        return 0.0

    @property
    def expected_gain(self) -> float | None:
        """Return the gain to expect where it pays, if it differs from its phase's or its engine's.

        Only the order of trials comes from it.
        """
        return None

    @property
    def calibrates(self) -> bool:
        """True if it reads the workload's calibration calls."""
        return False

    @property
    def errors_add(self) -> bool:
        """True if its layers' errors are independent, so that the model's is the root of the sum of their squares."""
        return False

    @property
    def rounds_between(self) -> bool:
        """True if it rounds between layers as well, even where layers are left alone."""
        return False

    @property
    def components(self) -> tuple[str, ...]:
        """Components of the model that it is for, by name; none is the whole model."""
        return ()

    @property
    def emulates(self) -> bool:
        """True if `emulate` shows most of its loss in eager code, without the engine that it converts the model for."""
        return False

    def emulate(self, target: Target) -> None:
        """Change the model, to which it was applied, so that eager code rounds as its engine does."""

    @property
    def conversion(self) -> Step | None:
        """Return the step that stands for all options with which its engine builds the same files and only runs them
        differently; None if the files are not kept for other trials."""
        return None

    def replaces(self, other: Technique) -> bool:
        """Check whether a recipe can hold only one of the two, because both are one technique with different
        options.
        """
        return self.name == other.name

    def covers(self, name: str) -> bool:
        """Check whether it may change the module of this name."""
        return True

    @property
    def is_open(self) -> bool:
        """Check whether it lacks an option that only measuring finds: asked for by name, its `variants`
        stand for it.
        """
        return False

    @property
    def kernel(self) -> str | None:
        """The micro-benchmarked kernel that linear layers would run on; lets the search skip what cannot pay."""
        return None

    @property
    def half(self) -> str | None:
        """The type of 16 bits that layers would be computed in; without instructions for it they would be slower."""
        return None

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        """Relative error that this technique causes in one module on input `x`; None where it changes nothing.

        Not asked where `errors_add`: what the stand-ins of several modules change of the whole model says more.
        """
        return None

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        """Return a module's replacement, to measure its effect on the whole model; None if there is none.

        `module_error` measures its effect on the module's own output.
        """
        return None

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        """The same technique with these modules left alone too; None where it knows no such thing."""
        return None

    def step(self) -> Step:
        """This technique as plain data: only the options that differ from their defaults."""
        options = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                options[item.name] = list(value) if isinstance(value, tuple) else value
        return Step(name=self.name, options=options)


@dataclass(frozen=True, kw_only=True)
class OptionRow:
    """One option of a technique, as the documentation and the CLI show it."""

    name: str
    type: str
    default: Any
    doc: str


@functools.cache
def describe(cls: type[Technique]) -> list[OptionRow]:
    """The options of a technique with their types, defaults and the docstrings that follow the fields."""
    docs = _field_docs(cls)
    hints = _hints(cls)
    return [
        OptionRow(name=f.name, type=_type_name(hints[f.name]), default=f.default, doc=docs.get(f.name, ""))
        for f in dataclasses.fields(cls)
    ]


def from_step(step: Step) -> Technique:
    """The technique a step names, with its options checked.

    Raises `UnknownName` for a technique or option that does not exist or a value it does not allow.
    """
    cls = techniques.get(step.name)
    rows = {row.name: row for row in describe(cls)}
    hints = _hints(cls)
    options = {}
    for key, value in step.options.items():
        if key not in rows:
            raise unknown(
                f"option of {step.name}", key, rows, next="`torchwright techniques` lists the options"
            )
        options[key] = _convert(step.name, key, value, hints[key])
    return cls(**options)


def parse_step(text: str) -> Step:
    """The step that the command line writes as `name` or `name:option=value,option=value`."""
    name, _, rest = text.partition(":")
    raw: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise RefusedTechnique(
                f"cannot read the option '{pair}' in '{text}'", allowed="TECHNIQUE:option=value,option=value"
            )
        raw[key.strip()] = value.strip()
    return from_step(Step(name=name.strip(), options=raw)).step()


def in_order(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps sorted by the phase of their technique; steps of one phase keep their order."""
    return tuple(sorted(steps, key=lambda step: techniques.get(step.name).phase))


def conversion_of(steps: Iterable[Step]) -> str | None:
    """Name of what these steps convert, the same for others that convert the same; None where nothing is shared."""
    changes = [(step, change) for step in in_order(steps) if not (change := from_step(step)).runs_only]
    if all(change.conversion is None for _, change in changes):
        return None
    text = "\n".join(str(change.conversion or step) for step, change in changes)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compiles(steps: Iterable[Step]) -> bool:
    """Check whether one of these steps is a compiler."""
    return any("compiled" in from_step(step).gives for step in steps)


def _convert(technique: str, key: str, value: Any, hint: Any) -> Any:
    """`value` (text from the command line, or JSON) as the type of the field."""
    bad = RefusedTechnique(
        f"'{value}' is not a value for the option '{key}' of {technique}", allowed=_type_name(hint)
    )
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:
        if value is None or value == "none":
            return None
        hint = next(a for a in args if a is not type(None))
        origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        by_text = {str(choice): choice for choice in args}
        if str(value) not in by_text:
            raise bad
        return by_text[str(value)]
    if hint is bool:
        by_text = {"true": True, "false": False, "1": True, "0": False}
        if str(value).lower() not in by_text:
            raise bad
        return by_text[str(value).lower()]
    if origin is tuple:
        parts = value.split("+") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            raise bad
        return tuple(part for part in parts if part)
    try:
        return hint(value)
    except (TypeError, ValueError):
        raise bad from None


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if type(None) in args:
        return " | ".join([*(_type_name(a) for a in args if a is not type(None)), "none"])
    if origin is tuple:
        return "names joined by +"
    return getattr(hint, "__name__", str(hint))


_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _field_docs(cls: type) -> dict[str, str]:
    """Docstrings written under dataclass fields, read from the source, those of base classes too."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            docs |= _field_docs(base)
    if not inspect.get_annotations(cls):  # no field of its own
        return docs
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[node.target.id] = inspect.cleandoc(str(after.value.value)).replace("\n", " ")
    return docs
