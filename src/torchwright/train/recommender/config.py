"""RUN.toml with kind = "recommender", checked by name and value before anything is built (no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from torchwright.train.run.config.data_section import RunError, Section
from torchwright.train.run.config.run import HeldOut, Positive, Rate, SampleRun, Share
from torchwright.train.run.config.run_file import parse_file, read_toml

PAGE = "docs/recommenders.md"
LABEL = "label"
NUMBERS, CATEGORIES = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
"""The columns of Criteo's files, in their order behind the label."""
FREE = ("samples", "evaluation", "checkpoint", "report", "threads", "out", "timeout_s", "log_every", "wandb")
"""Fields that may change when a run is continued; any other change makes it another run."""
Rows = Annotated[int, Field(ge=2, lt=2**31)]
"""Reserved rows of a table: the first is for missing values."""


class Dlrm(Section):
    """Clicks from numbers and categories (Naumov et al., 2019)."""

    dim: Positive = 16
    """The size of every embedding, and of the bottom layers' output for the numbers."""
    bottom: list[Positive] = Field(default=[64])
    """Widths of the hidden layers over the numbers."""
    top: list[Positive] = Field(default=[64])
    """Widths of the hidden layers over all products."""
    numbers: list[str] = Field(default=NUMBERS)
    categories: list[str] = Field(default=CATEGORIES, min_length=1)
    rows: Rows = 100_000
    """The rows of a table that `tables` does not name."""
    tables: dict[str, Rows] = Field(default={})
    """Column → rows of its table."""

    @property
    def columns(self) -> dict[str, int]:
        """Category → rows of its table."""
        return {name: self.tables.get(name, self.rows) for name in self.categories}

    @model_validator(mode="after")
    def _known(self) -> Self:
        unknown = sorted(set(self.tables) - set(self.categories))
        if unknown:
            raise ValueError(f"`tables` names '{unknown[0]}', which is none of `categories`")
        return self


class TwoTower(Section):
    """A two-tower model of items for users: a vector for each, from its columns, and products of the two."""

    user: dict[str, Rows] = Field(min_length=1)
    """Column → rows of its table."""
    item: dict[str, Rows] = Field(min_length=1)
    """Like `user`; the first column identifies items."""
    dim: Positive = 32
    """The size of every embedding, and of the vectors."""
    hidden: list[Positive] = Field(default=[64])
    """Widths of each tower's hidden layers."""
    temperature: Rate = 0.1
    """The temperature: the divisor of products of vectors of length 1."""

    @property
    def columns(self) -> dict[str, int]:
        """Category → rows of its table."""
        return self.user | self.item

    @model_validator(mode="after")
    def _apart(self) -> Self:
        both = sorted(set(self.user) & set(self.item))
        if both:
            raise ValueError(f"'{both[0]}' is a column of `user` and of `item`")
        return self


class Data(Section):
    """The input files."""

    train: list[str] = Field(min_length=1)
    """*.tsv, *.tsv.gz, *.parquet, and globs of them."""
    validation: list[str] = Field(default=[])
    header: bool = False
    """True if the first line of a TSV file names its columns; otherwise they are label, numbers, categories."""
    hexadecimal: bool = True
    """True if categories are hexadecimal numbers, as in Criteo's files; otherwise any text."""
    strict: bool = False
    """True if a broken row stops the run before it begins; by default it is counted, reported and left out."""


class DenseOptimizer(Section):
    """The optimizer of the dense layers: Adam."""

    lr: Rate = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Rate = 1e-8


class Embeddings(Section):
    """The tables in two dimensions, and how their rows move."""

    groups: Positive = 1
    """Copies of the tables; the processes of a group share one out."""
    sync_every: Positive = 1
    """Steps between two means over the copies."""
    flipped: bool = False
    """True if the processes of a group are neighbours, instead of those that hold the same part."""
    optimizer: Literal["rowwise_adagrad", "sgd", "adam"] = "rowwise_adagrad"
    lr: Rate = 0.05


class RecommenderEvaluation(HeldOut):
    """The evaluation on held-out rows."""

    samples: Positive = 1_000_000
    """Held-out rows of one evaluation, at most."""
    recall_at: list[Positive] = Field(default=[10, 100])
    """`two_tower`: how many items are looked at."""


class ReportSection(Section):
    """The measurements for the report at the end."""

    drift_steps: int = Field(default=32, ge=0)
    """Steps from the beginning in which `groups` and `sync_every` as given are compared with a single copy."""


class RecommenderRun(SampleRun):
    """A recommender's run file."""

    kind: Literal["recommender"]
    dlrm: Dlrm | None = None
    two_tower: TwoTower | None = None
    data: Data
    optimizer: DenseOptimizer = DenseOptimizer()
    embeddings: Embeddings = Embeddings()
    evaluation: RecommenderEvaluation = RecommenderEvaluation()
    report: ReportSection = ReportSection()

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.dlrm is None) == (self.two_tower is None):
            raise ValueError("give either [dlrm] or [two_tower]")
        return self

    @property
    def model(self) -> Dlrm | TwoTower:
        """The one that is given."""
        model = self.dlrm or self.two_tower
        assert model is not None
        return model

    def check_processes(self, world: int) -> None:
        """Raise `RunError` where the batch or the copies of the tables cannot be divided over the processes."""
        for what, count, field, ways in (
            ("rows of a step", self.batch, "processes", world),
            ("processes", world, "embeddings.groups", self.embeddings.groups),
        ):
            if count % ways:
                raise RunError(
                    f"{count} {what} cannot be divided evenly",
                    found=f"{ways} {field}",
                    next="change `batch`, `embeddings.groups` or the number of processes",
                )


def read_recommender(path: Path) -> RecommenderRun:
    """The run of a file. Raises `RunError`, or `UnknownName` with the nearest field, naming file and key."""
    run = parse_file(RecommenderRun, read_toml(path), str(path), PAGE)
    check_recommender(run)
    return run


def check_recommender(run: RecommenderRun) -> None:
    """Raise `RunError` for values that do not fit together."""
    every, sync = run.evaluation.every_steps, run.embeddings.sync_every
    if every % sync:
        raise RunError(
            "an evaluation between two syncs would measure copies that differ",
            found=f"evaluation.every_steps={every}, embeddings.sync_every={sync}",
            next=f"use a multiple of {sync} as evaluation.every_steps",
        )
    if run.evaluation.every_steps and not run.data.validation:
        raise RunError(
            "evaluation.every_steps is set, but there is nothing to evaluate", next="set data.validation"
        )
