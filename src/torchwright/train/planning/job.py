"""A training job, and one layout for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from torchwright.core.errors import TorchwrightError, unknown
from torchwright.train.layout import Layout

Precision = Literal[
    "fp32", "bf16", "float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "mxfp8"
]
Gather = Literal["float8"] | None
Optimizer = Literal["adamw", "adamw8bit"]
Recompute = Literal["none", "selective", "full"]

OPTIMIZER_BYTES: dict[str, float] = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}
"""State of one parameter: two moments in float32, or in 8 bits with a float32 scale for each 256 (torchao)."""


class JobError(TorchwrightError):
    """A batch, context or type of number that cannot be planned for."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one optimizer step, independent of the layout."""

    tokens_per_step: int
    context: int
    precision: Precision = "bf16"
    gather: Gather = None
    """The type in which FSDP gathers float8 layers' matrices, where it is not the activations'."""
    optimizer: Optimizer = "adamw"
    compile: bool = True
    """Layers are compiled: element-wise operators are fused, and fewer of their results kept."""
    compile_loss: bool = True
    """So is the loss of a compiled job, as the trainer does it; torchtitan's was not, when it published its rows."""

    def __post_init__(self) -> None:
        if self.gather is not None and not self.precision.startswith("float8"):
            raise JobError(
                f"matrices are gathered in {self.gather} where layers round them so",
                found=f"precision {self.precision}",
                next="use precision float8_tensorwise or float8_rowwise, or gather as the layers compute",
            )
        if self.context < 1 or self.tokens_per_step < 1:
            raise JobError("tokens per step and context must be at least 1")
        if self.tokens_per_step % self.context:
            raise JobError(
                f"{self.tokens_per_step} tokens a step are no whole number of sequences of {self.context}",
                found=f"{self.tokens_per_step / self.context:.2f} sequences",
                next=f"use {max(1, round(self.tokens_per_step / self.context)) * self.context} tokens a step",
            )

    @property
    def sequences(self) -> int:
        """Sequences of one step, over all devices."""
        return self.tokens_per_step // self.context

    @property
    def width(self) -> int:
        """Bytes of an activation and of a gathered parameter."""
        return 4 if self.precision == "fp32" else 2

    @property
    def rate(self) -> str:
        """The type of number whose peak rate the linear layers run at."""
        # MX formats are emulated: what is rounded is multiplied in bfloat16.
        return {"fp32": "float32", "bf16": "bfloat16", "mxfp8": "bfloat16"}.get(self.precision, "float8")

    @property
    def fused_loss(self) -> bool:
        return self.compile and self.compile_loss


def make_job(
    tokens_per_step: int,
    context: int,
    precision: str,
    optimizer: str,
    *,
    compile: bool,
    gather: Gather = None,
) -> Job:
    """A job from words; raises `UnknownName` and `JobError`."""
    if precision not in get_args(Precision):
        raise unknown("precision", precision, get_args(Precision))
    if optimizer not in OPTIMIZER_BYTES:
        raise unknown("optimizer", optimizer, OPTIMIZER_BYTES)
    return Job(
        tokens_per_step=tokens_per_step,
        context=context,
        precision=cast(Precision, precision),
        gather=gather,
        optimizer=cast(Optimizer, optimizer),
        compile=compile,
    )


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """A layout and how its devices go through their part of the batch."""

    layout: Layout
    micro_batch: int
    """Sequences that a device computes at once."""
    micro_batches: int
    """Micro-batches of a device in a step."""
    recompute: Recompute
    interleave: int = 1
    """Pieces of a pipeline stage that lie apart, so that micro-batches fill the stages sooner."""

    @property
    def bubble(self) -> float:
        """Return how long a stage waits in a step, in micro-batches (Narayanan et al., 2021)."""
        return (self.layout.pp - 1) / self.interleave

    def tokens(self, job: Job) -> int:
        """Tokens of a micro-batch on one device; tensor-parallel neighbours share them."""
        return self.micro_batch * job.context // self.layout.cp
