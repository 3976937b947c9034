"""The options of a run of `torchwright map`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchwright.core.errors import WorkloadError

TaskName = Literal["embed", "classify", "score", "transcribe", "generate", "openai"]
TASKS: tuple[TaskName, ...] = ("embed", "classify", "score", "transcribe", "generate", "openai")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and how it is opened; the options of `serve.options.EngineOptions` by the same names."""

    model: str | None = None
    """An artifact, a model folder or a hub id; None is the bundled language model."""
    trust: bool = False
    quantize: str | None = None
    kv: str | None = None
    dtype: str | None = None
    adapter: str | None = None
    kv_memory: int | None = None
    max_running: int = 64
    deterministic: bool | None = None
    """`EngineOptions.deterministic`."""
    served_name: str | None = None
    """The model's name in requests of OpenAI's form; its folder's without it."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options that change an answer: they are part of a part's name."""

    text_column: str | None = None
    pair_column: str | None = None
    keep: tuple[str, ...] = ()
    """Columns of the input that the output repeats."""
    truncate: bool = False
    """Cut texts that are longer than the model takes, instead of rejecting them."""
    all_labels: bool = False
    """Classifiers: the score of each label."""
    chat: bool = False
    """Language models: a text is a user's message."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Language models: fields of the request in OpenAI's form. Speech models: fields of `speech.Options`."""


@dataclass(frozen=True, kw_only=True)
class MapOptions:
    """A whole run."""

    model: ModelOptions
    task_name: TaskName | None = None
    """None: what the model is for."""
    task: TaskOptions = field(default_factory=TaskOptions)
    inputs: tuple[str, ...] = ()
    """Files and folders; `-` is standard input."""
    input_format: Literal["jsonl", "text"] | None = None
    """For files whose names do not tell."""
    out: Path = Path()
    output_format: Literal["jsonl", "parquet"] | None = None
    """The format of a folder; a file's name tells its own."""
    part_rows: int | None = None
    """Rows of one part; the task's own by default."""
    part_seconds: float | None = None
    """A part that takes longer is computed again in halves, and a row that does is rejected."""
    limit: int | None = None
    """Rows of the input, from the first on."""
    shard: tuple[int, int] = (0, 1)
    """This run's turn among several that share the parts: (place, count)."""
    workers: int | None = None
    threads: int | None = None
    """Threads of one worker."""
    ray: str | None = None
    """The address of a Ray cluster."""
    strict: bool = False
    """End at the first rejected row."""
    overwrite: bool = False
    """Remove what another run left in the output's place."""

    def __post_init__(self) -> None:
        place, count = self.shard
        if not 0 <= place < count:
            raise WorkloadError(f"--shard {place}/{count}", allowed="I/N with I from 0 to N - 1")
        if count > 1 and self.overwrite:
            raise WorkloadError(
                "--overwrite with --shard: each shard would remove the parts of the others",
                next=f"remove {self.out} first, with its .parts folder if it is a file, and leave --overwrite out",
            )
        if not self.inputs:
            raise WorkloadError("there is no input", next="name files or folders, or - for standard input")
        if self.inputs.count("-") > 1:
            raise WorkloadError("standard input is named twice")

    def answers(self) -> dict[str, Any]:
        """Return the options that change answers, as plain data."""
        model = asdict(self.model)
        for name in ("model", "trust", "kv_memory", "max_running"):
            del model[name]
        return {"model_options": model, **asdict(self.task), "request": dict(self.task.request)}
