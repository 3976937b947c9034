"""The run file's [data]: which files are read, and as what (no torch)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from torchwright.core.errors import TorchwrightError
from torchwright.train.data.documents import RowsAs
from torchwright.train.data.layouts import COLUMNS, Form


class RunError(TorchwrightError):
    """A run file that cannot be read, or that asks for what does not fit together."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Mixed(Section):
    """One source of several."""

    files: list[str] = Field(min_length=1)
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Its share of the windows is its part of all weights."""


class Data(Section):
    """The data. Fields with the default None were not in the first version, whose checkpoints stay valid."""

    train: list[str] = []
    """Files of text or rows, folders that `datasets` saved, token shards, and globs of them."""
    mixture: dict[str, Mixed] | None = None
    """Several sources by name, in place of `train`."""
    validation: list[str] = []
    hold_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of the training data that is held out in place of `validation`, 512 rows at the most."""
    text: list[str] = ["*.txt", "*.text", "*.md"]
    """Names of files that are plain text, all of which is trained on; what is neither text nor shard is refused."""
    begin_every: int = Field(default=0, ge=0)
    """The begin token leads every window whose place in the stream is a multiple of this number; 0 leads none."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of files and windows."""
    verify: bool = True
    """Check shards against the `checksums.json` of their folder when the run starts."""
    packing: Literal["stream", "documents"] | None = None
    """`stream`: all documents one after the other, cut into windows; `documents`: whole ones packed into windows, each
    attending to itself alone. By default `documents` where a part of the tokens is not trained on, else `stream`."""
    form: Form | None = None
    """Form of the rows; by default by their columns."""
    text_column: str | None = None
    messages_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    chosen_column: str | None = None
    rejected_column: str | None = None
    strict: bool | None = None
    """Stop before the run begins at a broken row; by default it is counted, reported and left out."""
    ids: Literal["uint16", "uint32"] | None = None
    """The type of bare token ids (*.bin)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.train) == bool(self.mixture):
            raise ValueError("give either `train` or `mixture`")
        if self.validation and self.hold_out is not None:
            raise ValueError("give either `validation` or `hold_out`")
        return self

    @property
    def validates(self) -> bool:
        """Check whether anything is held out."""
        return bool(self.validation) or self.hold_out is not None

    @property
    def rows_as(self) -> RowsAs:
        """Return how rows are read."""
        given = {name: getattr(self, f"{name}_column") for name in COLUMNS}
        columns = {name: column or name for name, column in given.items()}
        draw = None if self.hold_out is None else self.seed
        return RowsAs(form=self.form, columns=columns, strict=bool(self.strict), draw=draw)
