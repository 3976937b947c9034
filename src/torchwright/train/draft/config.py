"""RUN.toml with kind = "draft", checked before anything is built (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from torchwright.train.layout import Layout
from torchwright.train.run.config import run as language
from torchwright.train.run.config.check import check_run
from torchwright.train.run.config.data_section import Data, RunError, Section
from torchwright.train.run.config.run import EvaluationSection, HeldOut, Positive, Rate, Run, RunFile, Share
from torchwright.train.run.config.run_file import parse_file, read_toml, with_settings

KIND = "draft"
METHODS = ("eagle3", "mtp")
MOST_TOKENS = 32_000
"""Tokens that a head proposes where its file names no number, as in the heads that EAGLE's authors published."""
FREE = (
    *("tokens", "evaluation", "checkpoint", "layout", "threads", "out", "timeout_s", "log_every", "wandb"),
    "features",
)
"""Fields that may change when a run is continued; any other field would make it another run."""


class Target(Section):
    """The language model that the head will propose tokens to, as it will be served."""

    folder: str
    """A Hugging Face folder, GGUF file or hub id whose family runs on Torchwright's own decoder."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    quantize: str | None = None
    """The scheme that it will be served in, as `serve --quantize`."""


class HeadSection(Section):
    """The head that is trained."""

    method: Literal["eagle3", "mtp"] = "eagle3"
    """`mtp` is the layer that checkpoints of some families hold behind their last one."""
    start: str | None = None
    """A folder of a head that is trained further; its shape and vocabulary are kept. A target's own MTP layer needs
    none."""
    vocabulary: Positive | None = None
    """Tokens that it can propose, the data's most frequent; by default `MOST_TOKENS`, or all of fewer."""
    layers: list[int] | None = Field(default=None, min_length=3, max_length=3)
    """The layers of the target whose inputs it reads; by default an early, the middle and a late one."""
    feed_forward: Positive | None = None
    """Width of its feed-forward block; by default the target's."""
    steps: Positive = 4
    """Tokens that training lets it propose one after the other (EAGLE-3's training-time test)."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of a step's loss relative to the step before; EAGLE-3's value."""


class Features(Section):
    """The path of the target's hidden states to the trainer."""

    producers: int = Field(default=0, ge=0, le=64)
    """Processes that compute them ahead, each with a target of its own; 0 computes them in the training process."""
    threads: Positive | None = None
    """Threads of each producer; by default PyTorch's choice."""


class Regenerate(Section):
    """Replace the data's answers by the target's own."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0 is greedy."""
    tokens: Positive = 256
    """New tokens of one answer, at most."""
    prompt_tokens: Positive = 32
    """Tokens at the start of a plain text that the target continues."""


class DraftOptimizer(Section):
    """The optimizer: AdamW."""

    lr: Rate = 1e-4
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Rate = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of matrices; norms have none."""


class Schedule(Section):
    """The factor on the peak learning rate, in tokens."""

    name: Literal["cosine", "wsd"] = "cosine"
    warmup_tokens: int = Field(default=0, ge=0)
    decay_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """`wsd`: share of all tokens over which the rate falls at the end; by default `DECAY_FRACTION` of text runs."""
    final: Share = 0.0
    """The factor of the last step."""


class DraftEvaluation(HeldOut):
    """The evaluation on held-out data."""

    tokens: Positive = 65_536
    """Held-out tokens of one evaluation, at most."""
    served_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Seconds, about, in which the target is served with the trained head and without; 0 leaves that out."""


class DraftRun(RunFile):
    """A draft head's run file."""

    kind: Literal["draft"]
    tokens: Positive
    """Tokens to train on, all together."""
    batch_tokens: Positive
    """Tokens of one optimizer step, over all processes."""
    context: Positive
    """Tokens of a window."""
    micro_batches: Positive = 1
    """Pieces in which each process computes its rows."""
    clip: Rate | None = 0.5
    """The largest norm of all gradients together, EAGLE-3's value; false in the file turns clipping off."""
    precision: Literal["fp32", "bf16"] = "bf16"
    target: Target
    head: HeadSection = HeadSection()
    features: Features = Features()
    regenerate: Regenerate | None = None
    data: Data
    optimizer: DraftOptimizer = DraftOptimizer()
    schedule: Schedule = Schedule()
    layout: dict[str, int] = Field(default_factory=dict)
    """dp_replicate and dp_shard."""
    evaluation: DraftEvaluation = DraftEvaluation()

    @property
    def per_step(self) -> int:
        return self.batch_tokens

    @property
    def parallel(self) -> Layout:
        """The layout; raises `UnknownName` or `LayoutError`."""
        return Layout.from_degrees(self.layout)

    def check_processes(self, world: int) -> None:
        self.parallel.check_processes(world)

    @property
    def text(self) -> Run:
        """The language model's run that reads the same windows of the same data, step by step."""
        return Run(
            out=self.out,
            tokens=self.tokens,
            batch_tokens=self.batch_tokens,
            context=self.context,
            micro_batches=self.micro_batches,
            precision=self.precision,
            model=language.Model(folder=self.target.folder),
            data=self.data,
            schedule=language.Schedule(**self.schedule.model_dump()),
            layout=self.layout,
            evaluation=EvaluationSection(**self.evaluation.model_dump(exclude={"served_s"})),
        )


def check_merge(run: DraftRun) -> None:
    """Raise `RunError` where `--merge` puts nothing into a model."""
    if run.head.method != "mtp":
        raise RunError(
            "--merge puts an MTP layer into a copy of its model", found=run.head.method, next="leave it out"
        )


def read_draft(path: Path, settings: Mapping[str, Any] | None = None) -> DraftRun:
    """The run of a file, as `read_run` for language models."""
    return parse_draft(with_settings(read_toml(path), settings or {}), str(path))


def parse_draft(data: dict[str, Any], source: str) -> DraftRun:
    """A run from plain data; `source` is named in errors."""
    if data.get("clip") is False:  # TOML has no null
        data = {**data, "clip": None}
    run = parse_file(DraftRun, data, source)
    _check(run)
    return run


def _check(run: DraftRun) -> None:
    """Raise `RunError` or `LayoutError` for values that do not fit together."""
    check_run(run.text)
    layout = run.parallel
    if layout.pp * layout.cp * layout.tp * layout.ep > 1:
        raise RunError(
            "a run of kind draft divides windows over processes, not layers",
            found=str(layout),
            allowed="dp_replicate and dp_shard",
        )
    if run.context <= run.head.steps + 1:
        raise RunError(
            f"windows of {run.context} tokens are too short for head.steps={run.head.steps}",
            allowed=f"a context of {run.head.steps + 2} or more",
        )
    if run.features.threads is not None and not run.features.producers:
        raise RunError("features.threads is for producers, and there are none", next="set features.producers")
    if run.regenerate is not None and (run.data.begin_every or run.data.packing == "stream"):
        raise RunError(
            "[regenerate] makes whole documents, and the data are read as a stream",
            found="data.begin_every or data.packing",
            next="leave both out",
        )
    for field in ("vocabulary", "layers", "feed_forward"):
        if getattr(run.head, field) is None:
            continue
        if run.head.method == "mtp":
            raise RunError(
                f"head.{field} is for heads of EAGLE-3: an MTP layer is as the target's own layers",
                next="leave it out",
            )
        if run.head.start is not None:
            raise RunError(
                f"head.{field} does not go with head.start, whose head has one", next="leave it out"
            )
