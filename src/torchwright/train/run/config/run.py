"""RUN.toml: everything that decides a training run, checked by name and value before anything is built (no torch).

Every path is relative to the run file. What is not said takes the default below.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from torchwright.train.data.documents import RowsAs
from torchwright.train.data.layouts import Form
from torchwright.train.layout import Layout
from torchwright.train.run.config.data_section import Data, Section
from torchwright.train.run.config.objective_section import Head, Preference
from torchwright.train.run.config.pipeline_section import PipelineSection

Precision = Literal[
    "fp32",
    "bf16",
    "float8_tensorwise",
    "float8_rowwise",
    "float8_rowwise_with_gw_hp",
    "mxfp8",
    "mxfp4",
]
Gather = Literal["float8"] | None
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
AnyRun = TypeVar("AnyRun", bound="RunFile")
FREE = (
    *(
        "tokens",
        "evaluation",
        "checkpoint",
        "layout",
        "pipeline",
        "threads",
        "out",
        "peak_tflops",
        "timeout_s",
        "wandb",
    ),
    "lora.merge",
    "experts.dispatch",
)
"""Fields that may change when a run is continued; any other field would make it another run."""
DECAY_FRACTION, MOMENTUM, BIAS_RATE = 0.2, 0.95, 1e-3
FEW_BITS = ("adamw8bit", "adamw4bit")
"""Optimizers whose moments are kept in blocks of codes, which cannot be cut anew for another layout."""


class Model(Section):
    """Which decoder is trained."""

    folder: str | None = None
    """A Hugging Face folder whose shape and weights the run starts from."""
    config: dict[str, Any] | None = None
    """The shape in the words of a config.json, for a model that starts from random weights."""
    tokenizer: str | None = None
    """A folder with tokenizer.json, copied into the folder of the trained weights; by default `folder`."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.folder is None) == (self.config is None):
            raise ValueError("give either `folder` or `config`")
        return self


class OptimizerSection(Section):
    """The optimizer."""

    name: Literal["adamw", "adamw8bit", "adamw4bit", "adafactor", "muon"] = "adamw"
    """`adamw8bit` and `adamw4bit` keep both moments in few bits (torchao); `adafactor` keeps a matrix's second moment
    as a row and a column, and no first; `muon` takes the layers' matrices, each expert's among them, and AdamW routers,
    norms, embedding and output layer."""
    lr: Rate = 3e-4
    """Peak learning rate."""
    adam_lr: Rate | None = None
    """`muon`: peak rate of what AdamW takes; by default `lr`."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Rate = 1e-8
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices; norms, biases and, under `muon`, the embedding and the output layer have none."""
    momentum: Share | None = None
    """`muon`: by default `MOMENTUM`."""


class Schedule(Section):
    """The factor on the peak learning rate, in tokens."""

    name: Literal["cosine", "wsd"] = "cosine"
    warmup_tokens: int = Field(default=0, ge=0)
    decay_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """`wsd`: share of all tokens over which the rate falls at the end; by default `DECAY_FRACTION`."""
    final: Share = 0.0
    """The factor of the last step."""
    decay_context: Positive | None = None
    """`wsd`: window length during the decay, where it differs."""


class Qat(Section):
    """Train with the rounding that the packed kernels do."""

    scheme: Literal["w4a8", "w8a8"]
    group_size: Literal[32, 64, 128] = 32
    """`w4a8` alone."""
    receipt_tokens: Positive = 512
    """Held-out tokens on which the receipt compares fake-quantized, converted and served logits."""


class Adapters(Section):
    """Train low-rank adapters on frozen weights."""

    r: Positive = 16
    """Rank: rows of A and columns of B."""
    alpha: Rate | None = None
    """An adapter's sum is multiplied by alpha / r; by default twice r."""
    dropout: Share = 0.0
    """Dropout of an adapter's inputs."""
    targets: list[str] = Field(default_factory=list)
    """Linear layers by the last part of their names in the model's files, as in "q_proj"; none given: all of them."""
    dora: bool = False
    """Train each row's length apart from its direction."""

    @property
    def strength(self) -> float:
        """Return alpha."""
        return 2.0 * self.r if self.alpha is None else self.alpha


class Lora(Adapters):
    """The adapters of a language model."""

    base: Literal["fp32", "bf16", "nf4", "int4"] | None = None
    """Type of the frozen weights; by default that of `precision`. Four bits are for the layers' matrices."""
    merge: bool = False
    """Write RUN/model at the end as well: the weights with the adapters in them."""


class Experts(Section):
    """Balance of a mixture of experts, and the way of tokens to experts in other processes."""

    balance: Literal["bias"] | Rate | None = None
    """The coefficient of a loss (`BalancingLoss`), or a bias that only chooses (`Balancing`)."""
    bias_rate: Rate | None = None
    """`bias`: how far a step moves an expert's; by default `BIAS_RATE`."""
    dispatch: Literal["all_to_all", "deep_ep"] = "all_to_all"
    """`deep_ep` is DeepEP's kernels, on cards that have them."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set & {"balance", "dispatch"}:
            raise ValueError("give `balance` or `dispatch`")
        return self


class HeldOut(Section):
    """The evaluation on held-out data; 0 steps means only at the end."""

    every_steps: int = Field(default=0, ge=0)


class EvaluationSection(HeldOut):
    """Measurements and samples during the run."""

    tokens: Positive = 65_536
    """Validation tokens of one evaluation, at most."""
    prompts: list[str] = Field(default_factory=list)
    """Beginnings of the sample texts; they need a tokenizer."""
    sample_tokens: Positive = 64


class Wandb(Section):
    """Tell the run's figures to Weights & Biases as well."""

    project: str
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes RUN/wandb, which `wandb sync` sends; `online` sends as the run goes, by the user's own login."""


class Checkpoint(Section):
    every_steps: int = Field(default=0, ge=0)
    """0: only at the end and when the run is asked to leave."""
    keep: Positive = 2
    """Whole checkpoints that are kept, the newest."""


class RunFile(Section):
    """The fields that run files of all kinds have."""

    out: str
    """The run's folder: checkpoints, metrics, ledger and the trained model."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights."""
    deterministic: bool = False
    """Make two such runs bitwise equal; slower if torch has quicker operators that are not deterministic."""
    threads: Positive | None = None
    """Threads of each process; by default torch's own choice."""
    timeout_s: Rate = 600.0
    """Seconds that a collective of a step may take before the run stops and reports why."""
    log_every: Positive = 10
    """Steps between two lines of metrics."""
    checkpoint: Checkpoint = Checkpoint()
    wandb: Wandb | None = None
    """Without it nothing is written for others or sent."""

    evaluation: HeldOut

    @property
    def evaluate_every(self) -> int:
        """Steps; 0 is only at the end."""
        return self.evaluation.every_steps

    @property
    def per_step(self) -> int:
        """Return the units of one optimizer step, over all processes."""
        raise NotImplementedError

    def check_processes(self, world: int) -> None:
        """Raise `TorchwrightError` for a number of processes on which the run cannot be."""
        raise NotImplementedError


class SampleRun(RunFile):
    """The fields of runs that count in samples."""

    samples: Positive
    """Samples to train on, all together; the data are read again when they end."""
    batch: Positive
    """Samples of one optimizer step, over all processes."""

    @property
    def per_step(self) -> int:
        return self.batch

    @property
    def steps(self) -> int:
        """Return the steps of the whole run."""
        return -(-self.samples // self.batch)


class Run(RunFile):
    """A language model's run file."""

    kind: Literal["language-model"] | None = None
    """Kind of the run; None is a language model too."""
    tokens: Positive
    """Tokens to train on, all together."""
    batch_tokens: Positive
    """Tokens of one optimizer step, over all processes."""
    context: Positive
    """Tokens of a window."""
    micro_batches: Positive = 1
    """Pieces in which each process computes its rows."""
    clip: Rate | None = 1.0
    """The largest norm of all gradients together; false in the file turns clipping off."""
    precision: Precision = "bf16"
    gather: Gather = None
    """With a float8 precision: the type in which processes that share parameters hand each other the matrices of float8
    layers; by default the type that the rest is gathered in."""
    recompute: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    """Compile each decoder layer and the loss with torch.compile."""
    peak_tflops: Rate | None = None
    """The peak that MFU is a share of, for each process; by default the rate that `doctor` measures."""
    model: Model
    data: Data
    optimizer: OptimizerSection = OptimizerSection()
    schedule: Schedule = Schedule()
    layout: dict[str, int] = Field(default_factory=dict)
    """Degrees of parallelism by axis."""
    pipeline: PipelineSection = PipelineSection()
    qat: Qat | None = None
    lora: Lora | None = None
    preference: Preference | None = None
    head: Head | None = None
    experts: Experts | None = None
    evaluation: EvaluationSection = EvaluationSection()

    @property
    def per_step(self) -> int:
        return self.batch_tokens

    @property
    def parallel(self) -> Layout:
        """The layout; raises `UnknownName` or `LayoutError`."""
        return Layout.from_degrees(self.layout)

    @property
    def keeps_model(self) -> bool:
        """Check whether RUN/model is written at the end; a run of adapters writes it if they are merged."""
        return self.lora is None or self.lora.merge

    @property
    def rows_as(self) -> RowsAs:
        """Return how rows are read: as [data] says, and as the objective needs them."""
        how = self.data.rows_as
        if self.needs is None:
            return how
        longest = min(self.context, self.schedule.decay_context or self.context)
        columns, labels = how.columns, ()
        if self.head is not None:
            columns, labels = {**columns, **self.head.columns}, tuple(self.head.labels or ())
        return replace(how, form=self.needs, columns=columns, longest=longest, labels=labels)

    @property
    def needs(self) -> Form | None:
        """Return the form of rows that the objective needs; None for any text."""
        if self.preference is not None:
            return "preference"
        return None if self.head is None else self.head.kind

    def check_processes(self, world: int) -> None:
        self.parallel.check_processes(world)

    def digest(self) -> str:
        """Return a digest of every value, to compare processes by."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()
