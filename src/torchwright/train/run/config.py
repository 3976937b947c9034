"""RUN.toml: everything that decides a training run, checked by name and value before anything is built (no torch).

Every path is relative to the run file. What is not said takes the default below.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from torchwright.errors import TorchwrightError, unknown
from torchwright.train.data.documents import RowsAs
from torchwright.train.data.forms import Form
from torchwright.train.layout import Layout
from torchwright.train.run.data_section import Data, RunError, Section
from torchwright.train.run.objective_section import OF_ONE_LOSS, Head, Preference
from torchwright.train.run.pipeline_section import Pipeline, check_pipeline

Precision = Literal[
    "fp32",
    "bf16",
    "float8_tensorwise",
    "float8_rowwise",
    "float8_rowwise_with_gw_hp",
    "mxfp8",
    "mxfp4",
]
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
)
"""What may change when a run is continued; anything else would make it another run."""
DECAY_FRACTION, MOMENTUM = 0.2, 0.95
FEW_BITS = ("adamw8bit", "adamw4bit")
"""Optimizers whose moments are kept in blocks of codes, which cannot be cut anew for another layout."""
OF_ONE = (
    ("schedule", "decay_fraction", "wsd"),
    ("schedule", "decay_context", "wsd"),
    ("optimizer", "adam_lr", "muon"),
    ("optimizer", "momentum", "muon"),
)
"""Section, field and the one name with which the field says anything; None where it is not given."""


class Model(Section):
    """Which decoder is trained."""

    folder: str | None = None
    """A Hugging Face folder whose shape and weights the run starts from."""
    config: dict[str, Any] | None = None
    """The shape in the words of a config.json, for a model that starts from random weights."""
    tokenizer: str | None = None
    """A folder with tokenizer.json, copied beside the trained weights; by default `folder`."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.folder is None) == (self.config is None):
            raise ValueError("give either `folder` or `config`")
        return self


class Optimizer(Section):
    """How parameters move."""

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
    """Of matrices; norms, biases and, under `muon`, the embedding and the output layer have none."""
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


class Lora(Section):
    """Train low-rank adapters beside frozen weights."""

    r: Positive = 16
    """Rank: rows of A and columns of B."""
    alpha: Rate | None = None
    """What an adapter adds is multiplied by alpha / r; by default twice r."""
    dropout: Share = 0.0
    """Of an adapter's inputs."""
    targets: list[str] = Field(default_factory=list)
    """Linear layers by the last part of their names in the model's files, as in "q_proj"; none given: all of them."""
    dora: bool = False
    """Train each row's length apart from its direction."""
    base: Literal["fp32", "bf16", "nf4", "int4"] | None = None
    """What the frozen weights are kept in; by default what `precision` says. With four bits the layers' matrices."""
    merge: bool = False
    """Whether RUN/model is written at the end as well: the weights with the adapters in them."""

    @property
    def strength(self) -> float:
        """alpha."""
        return 2.0 * self.r if self.alpha is None else self.alpha


class Experts(Section):
    """How a mixture of experts is kept in balance."""

    balance: Rate
    """Coefficient of the balancing loss (`BalancingLoss`)."""


class Evaluation(Section):
    """What is measured and shown on the way; 0 steps means only at the end."""

    every_steps: int = Field(default=0, ge=0)
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
    """What a run file of any kind says."""

    out: str
    """The run's folder: checkpoints, metrics, ledger and the trained model."""
    seed: int = Field(default=0, ge=0)
    """Of the initial weights."""
    deterministic: bool = False
    """Whether two such runs are equal to the bit; slower where torch has quicker operators that are not."""
    threads: Positive | None = None
    """Of each process; by default torch's own choice."""
    timeout_s: Rate = 600.0
    """How long a collective of a step may take before the run stops and says why."""
    log_every: Positive = 10
    """Steps between two lines of metrics."""
    checkpoint: Checkpoint = Checkpoint()
    wandb: Wandb | None = None
    """Without it nothing is written for others or sent."""

    @property
    def evaluate_every(self) -> int:
        """Steps; 0 is only at the end."""
        raise NotImplementedError

    def check_processes(self, world: int) -> None:
        """Raise `TorchwrightError` for a number of processes on which the run cannot be."""
        raise NotImplementedError


class Run(RunFile):
    """A language model's run file."""

    kind: Literal["language-model"] | None = None
    """What is trained; None is a language model too."""
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
    recompute: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    """Compile each decoder layer and the loss with torch.compile."""
    peak_tflops: Rate | None = None
    """What MFU is a share of, for each process; by default the rate that `doctor` measures."""
    model: Model
    data: Data
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    layout: dict[str, int] = Field(default_factory=dict)
    """Degrees of parallelism by axis."""
    pipeline: Pipeline = Pipeline()
    qat: Qat | None = None
    lora: Lora | None = None
    preference: Preference | None = None
    head: Head | None = None
    experts: Experts | None = None
    evaluation: Evaluation = Evaluation()

    @property
    def parallel(self) -> Layout:
        """The layout; raises `UnknownName` or `LayoutError`."""
        return Layout.from_degrees(self.layout)

    @property
    def keeps_model(self) -> bool:
        """Whether RUN/model is written at the end; a run of adapters writes it where they are merged."""
        return self.lora is None or self.lora.merge

    @property
    def rows_as(self) -> RowsAs:
        """How rows are read: as the data says, and as what is minimized needs them."""
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
        """What rows have to hold for what is minimized; None: any text."""
        if self.preference is not None:
            return "preference"
        return None if self.head is None else self.head.kind

    @property
    def evaluate_every(self) -> int:
        return self.evaluation.every_steps

    def check_processes(self, world: int) -> None:
        self.parallel.check_processes(world)

    def digest(self) -> str:
        """Of every value, to compare processes by."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()


def read_run(path: Path) -> Run:
    """The run of a file. Raises `RunError`, or `UnknownName` with the nearest field, naming file and key."""
    run = parse_run(read_toml(path), str(path))
    check_run(run)
    return run


def read_toml(path: Path) -> dict[str, Any]:
    """What a run file of any kind says; raises `RunError` where there is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(
            f"there is no run file {path}", next="see docs/train.md for one to begin with"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise RunError(f"{path} is not a TOML file", found=str(error)) from error


def parse_run(data: dict[str, Any], source: str = "the run") -> Run:
    """A run from plain data; `source` is named in errors."""
    if data.get("clip") is False:  # TOML has no null
        data = {**data, "clip": None}
    return parse_file(Run, data, source)


def parse_file(kind: type[AnyRun], data: dict[str, Any], source: str, page: str = "docs/train.md") -> AnyRun:
    """A run of any kind from plain data; `page` has all of its fields. Raises as `read_run`."""
    try:
        # Through JSON's rules, by which a list may stand for a tuple.
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise _readable(error, kind, source, page) from error
    except TypeError as error:  # a date or a time, which TOML has and JSON has not
        raise RunError(f"{source} holds a value of an unexpected type", found=str(error)) from error


def check_run(run: Run) -> None:
    """Raise `RunError` or `LayoutError` for values that do not fit together."""
    layout = run.parallel
    for context in {run.context, run.schedule.decay_context or run.context}:
        step = context * layout.batch_ways * run.micro_batches
        if run.batch_tokens % step:
            raise RunError(
                f"batch_tokens={run.batch_tokens} cannot be divided",
                found=f"windows of {context} tokens x {layout.batch_ways} parts of the batch (dp_replicate x dp_shard) "
                f"x {run.micro_batches} micro-batches = {step}",
                next=f"use a multiple of {step}, or fewer micro_batches",
            )
        if context % (layout.cp * layout.tp):
            raise RunError(
                f"windows of {context} tokens cannot be divided over cp={layout.cp} x tp={layout.tp} processes",
                next=f"use a multiple of {layout.cp * layout.tp} as `context` and `decay_context`",
            )
        if run.data.begin_every and run.data.packing == "documents":
            raise RunError(
                "data.begin_every leads windows of a stream, and data.packing is 'documents'",
                next="leave one of them out",
            )
        if run.data.begin_every and context == 1:
            raise RunError("data.begin_every leaves no room for text in windows of 1 token")
    asked_for = {
        "lora": run.lora is not None,
        "qat": run.qat is not None,
        "compile": run.compile,
        "recompute": run.recompute != "none",
    }
    check_pipeline(run.pipeline, layout, run.micro_batches, asked_for)
    for section, field, name in OF_ONE:
        part = getattr(run, section)
        if getattr(part, field) is not None and part.name != name:
            raise RunError(f"{section}.{field} is for {section} '{name}'", found=part.name)
    rates = (run.optimizer.betas, run.optimizer.eps)
    if run.optimizer.name == "adafactor" and rates != (Optimizer().betas, Optimizer().eps):
        raise RunError(
            "optimizer.betas and optimizer.eps are AdamW's", found="adafactor", next="leave them out"
        )
    if run.qat and run.precision not in ("fp32", "bf16"):
        raise RunError(
            "qat rounds to the kernels' integers and does not go with another low precision",
            found=f"precision={run.precision}",
            allowed="fp32, bf16",
        )
    if run.qat and run.compile:
        raise RunError("qat searches its scales in code that is not compiled", next="set compile = false")
    if layout.tp * layout.ep > 1 and run.qat:
        raise RunError(
            "the layout divides matrices that qat rounds as a whole",
            found=str(layout),
            allowed="tp=1 and ep=1 with qat",
        )
    if layout.tp > 1 and run.precision.startswith("float8"):
        raise RunError(
            "the layout divides matrices that float8 scales by their largest value",
            found=f"{layout}, precision={run.precision}",
            allowed="tp=1 with float8; mxfp8 and mxfp4 scale blocks of 32 values, and go with tp",
        )
    if run.lora is not None:
        _check_lora(run)
    if run.needs is not None:
        _check_objective(run)
    if run.data.validation and run.evaluation.tokens < run.context:
        raise RunError(
            f"evaluation.tokens={run.evaluation.tokens} holds no window",
            found=f"context={run.context}",
            next=f"set evaluation.tokens to {run.context} or more, or leave data.validation out",
        )
    if run.evaluation.prompts and layout.cp > 1:
        raise RunError("sample text is written by whole sequences", found=f"cp={layout.cp}", allowed="cp=1")
    if run.evaluation.every_steps and not (run.data.validation or run.evaluation.prompts):
        raise RunError(
            "evaluation.every_steps is set, but there is nothing to evaluate",
            next="set data.validation or evaluation.prompts",
        )


def _check_lora(run: Run) -> None:
    """Raise `RunError` for what does not go with adapters."""
    layout = run.parallel
    if run.model.folder is None:
        raise RunError("lora adapts a trained model", next="set model.folder, or leave [lora] out")
    if run.qat is not None or run.precision not in ("fp32", "bf16"):
        raise RunError(
            "lora does not go with qat, float8 and MX formats",
            found="qat" if run.qat else f"precision={run.precision}",
            allowed="precision fp32 or bf16, and lora.base nf4 or int4 for fewer bits",
        )
    if layout.tp * layout.ep > 1:
        raise RunError(
            "adapters lie beside whole matrices, and the layout divides them",
            found=str(layout),
            allowed="dp_replicate, dp_shard and cp with lora",
        )


def _check_objective(run: Run) -> None:
    """Raise `RunError` for what does not go with another loss than that of the next token."""
    section = "preference" if run.head is None else "head"
    for field, loss in OF_ONE_LOSS:
        if run.preference and getattr(run.preference, field) is not None and run.preference.loss != loss:
            raise RunError(f"preference.{field} is for the loss '{loss}'", found=run.preference.loss)
    for fault in run.head.faults if run.head else ():
        raise RunError(fault)
    layout = run.parallel
    refused = [
        ("model.config", run.model.folder is None, "a trained model: set model.folder"),
        ("layout", layout.pp * layout.cp * layout.tp * layout.ep > 1, "dp_replicate and dp_shard"),
        ("qat", run.qat is not None, "no [qat]"),
        ("data.form", run.data.form not in (None, run.needs), f"rows of {run.needs}: leave data.form out"),
        ("data.packing", run.data.packing == "stream", "whole rows: leave data.packing out"),
        ("data.begin_every", run.data.begin_every > 0, "leave data.begin_every out"),
    ]
    if run.head is not None:
        refused += [
            ("preference", run.preference is not None, "one of them"),
            ("lora", run.lora is not None, "all weights trained: leave [lora] out"),
            ("precision", run.precision not in ("fp32", "bf16"), "fp32, bf16"),
            ("compile", run.compile, "compile = false"),
            ("evaluation.prompts", bool(run.evaluation.prompts), "leave evaluation.prompts out"),
        ]
    for field, asked, allowed in refused:
        if asked:
            raise RunError(f"[{section}] does not go with this `{field}`", allowed=allowed)


def with_merge(run: Run) -> Run:
    """The run with `lora.merge`; raises `RunError` where there is nothing to merge."""
    if run.lora is None:
        raise RunError(
            "--merge puts adapters into a model, and the run has no [lora]", next="leave --merge out"
        )
    return run.model_copy(update={"lora": run.lora.model_copy(update={"merge": True})})


def changed_fields(old: dict[str, Any], new: dict[str, Any], ignore: tuple[str, ...] = ()) -> list[str]:
    """`name: old → new` of each field that differs, within tables as `table.name`; those of `ignore` may."""
    changed: list[str] = []
    for name in sorted({*old, *new}):
        one, other = old.get(name), new.get(name)
        if name in ignore or one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            inside = tuple(part.removeprefix(f"{name}.") for part in ignore if part.startswith(f"{name}."))
            changed += [f"{name}.{field}" for field in changed_fields(one, other, inside)]
        else:
            changed.append(f"{name}: {_short(one)} → {_short(other)}")
    return changed


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _readable(error: ValidationError, kind: type[BaseModel], source: str, page: str) -> TorchwrightError:
    """The first fault as one sentence; an unknown field before others, since it may be a missing one misspelt."""
    errors = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section = _section(kind, first["loc"][:-1])
        return unknown(f"field of {source}", where, _names(section, first["loc"][:-1]))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    given = first.get("input")
    found = f"{where} = {_short(given)}" if isinstance(given, str | int | float | bool) else None
    message = first["msg"].removeprefix("Value error, ")
    return RunError(f"{source}: {where or 'the file'}: {message}{more}", found=found, next=f"see {page}")


def _section(kind: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    """The model of the section at `path`."""
    section = kind
    for part in path:
        if field := section.model_fields.get(str(part)):  # else a name in a table of sections
            kinds = _within(field.annotation)
            section = next(
                (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), section
            )
    return section


def _within(annotation: Any) -> list[Any]:
    """A type and those that it is made of."""
    return [annotation, *(kind for part in get_args(annotation) for kind in _within(part))]


def _names(section: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    prefix = "".join(f"{part}." for part in path)
    return [f"{prefix}{name}" for name in section.model_fields]
