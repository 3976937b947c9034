"""The contract of a task: rows in, an answer or a reason for each out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchwright.map.model import ModelKind
from torchwright.map.options import ModelOptions, TaskName, TaskOptions
from torchwright.map.sources import PICTURES, SOUNDS


@dataclass(frozen=True)
class Rejected:
    """A row without an answer."""

    reason: str
    body: dict[str, Any] | None = None
    """Its line among the rejected rows, where the task has a form of its own."""


Answer = dict[str, Any] | Rejected


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """All that a worker needs to open its task: plain data, which travels to other machines."""

    task: TaskName
    kind: ModelKind
    folder: str
    artifact: str | None
    model: ModelOptions
    options: TaskOptions
    name: str = ""
    """The model's name in answers of OpenAI's form."""


class Task(ABC):
    """One task on an opened model."""

    fields: ClassVar[dict[str, str]]
    """Fields of an answer → their types in Parquet: string, int, float, vector or json."""

    notices: Sequence[str] = ()

    @abstractmethod
    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        """Yield (place, answer) of every row, in any order."""

    def close(self) -> None:  # noqa: B027
        """Let go of threads and processes."""


@dataclass(frozen=True)
class TaskFacts:
    """The facts of a task that planning needs: no torch here."""

    part_rows: int
    """Rows of a part, a few seconds' work: what a killed worker loses, and within which texts are sorted."""
    columns: tuple[tuple[str, ...], ...]
    """Names of the columns that it reads, tried in turn: one tuple for each column."""
    media: frozenset[str] = frozenset()
    """Suffixes of the files that it reads as they are."""
    rows: bool = True
    """True if it reads tables and texts."""


TEXT_COLUMNS = (
    "text",
    "input",
    "sentence",
    "content",
    "body",
    "document",
    "passage",
    "prompt",
    "question",
    "title",
)
PROMPT_COLUMNS = (
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "question",
    "instruction",
    *TEXT_COLUMNS,
)
PAIRS = (
    ("text_1", "text_2"),
    ("sentence1", "sentence2"),
    ("query", "document"),
    ("query", "passage"),
    ("queries", "documents"),
    ("question", "answer"),
    ("anchor", "positive"),
    ("text", "pair"),
    ("text", "text_pair"),
    ("premise", "hypothesis"),
)
FILE_COLUMNS = ("file", "path", "file_name")
FACTS: dict[tuple[TaskName, ModelKind], TaskFacts] = {
    ("embed", "encoder"): TaskFacts(4096, (TEXT_COLUMNS,)),
    ("classify", "classifier"): TaskFacts(4096, (TEXT_COLUMNS,)),
    ("score", "encoder"): TaskFacts(2048, ()),
    ("score", "classifier"): TaskFacts(2048, ()),
    ("classify", "images"): TaskFacts(256, (("image", "image_path", *FILE_COLUMNS),), media=PICTURES),
    ("transcribe", "recognizer"): TaskFacts(
        16, (("audio", "audio_path", "sound", *FILE_COLUMNS),), media=SOUNDS
    ),
    ("generate", "writer"): TaskFacts(512, (PROMPT_COLUMNS,)),
    ("openai", "writer"): TaskFacts(512, ()),
    ("openai", "encoder"): TaskFacts(1024, ()),
}
