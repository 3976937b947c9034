"""A run's data looked at before it is trained on: what is read of each file, skipped and refused."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from torchwright.train.data.documents import FileReport, form_of, read_documents, read_report
from torchwright.train.data.packing import cut_documents, document_starts
from torchwright.train.data.shards import DataError, Shards
from torchwright.train.data.text import Maker, expand, kind_of, token_shards, tokenize
from torchwright.train.model.foreign import ModelConfig, end_token, read_model_config
from torchwright.train.run.config.run import Run
from torchwright.train.run.runtime.corpus import check_form
from torchwright.train.run.runtime.source import write_source

READ_AT_ONCE = 1 << 22
"""Ids of a shard."""


@dataclass(kw_only=True)
class FileSurvey:
    """The content of a file of data."""

    file: Path
    source: str
    """The part of `data` that names it: train, validation, or a source's name."""
    holds: str
    """text, rows or ids."""
    refused: str | None = None
    """Why training would stop at it."""
    report: FileReport = field(default_factory=FileReport)
    longer: int = 0
    """Documents that do not fit into a window."""
    lost: int = 0
    """Those of them whose labels all lie behind it: training leaves them out."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Powers of two → documents of at most so many tokens, and more than half as many."""

    def add(self, tokens: int, context: int) -> None:
        """Count a document."""
        self.longer += tokens > context + 1
        power = 1 << max(tokens - 1, 0).bit_length()
        self.lengths[power] = self.lengths.get(power, 0) + 1


@contextmanager
def source_beside(run: Run, folder: Path) -> Generator[tuple[Path, ModelConfig]]:
    """A folder with the run's configuration and tokenizer, away from where the run will be."""
    with tempfile.TemporaryDirectory() as temporary:
        source = write_source(run, folder, Path(temporary))
        yield source, read_model_config(source)


def named_files(run: Run, folder: Path) -> Iterator[tuple[str, Path]]:
    """(part of `data`, file) of all that the run reads."""
    parts = {"train": run.data.train, "validation": run.data.validation}
    parts |= {name: mixed.files for name, mixed in (run.data.mixture or {}).items()}
    for name, patterns in parts.items():
        for path in expand(patterns, folder):
            yield name, path


def survey(run: Run, folder: Path) -> list[FileSurvey]:
    """Each file of the run, read as training reads it. Nothing is written, and one document is in memory at a time."""
    found = []
    with source_beside(run, folder) as (source, config):
        end = end_token(config)
        for name, path in named_files(run, folder):
            seen = FileSurvey(file=path, source=name, holds="")
            try:
                seen.holds = kind_of(path, run.data.text)
                if seen.holds == "ids":
                    _look_at_ids(seen, run, config, end)
                else:
                    _look_at_text(seen, run, config, Maker(source, end, run.rows_as))
                if run.out:  # files that no run names are only looked at
                    check_form(run, path, form_of(path) if seen.holds == "ids" else seen.report.form)
            except DataError as error:
                seen.refused = str(error)
            found.append(seen)
    return found


def _look_at_text(seen: FileSurvey, run: Run, config: ModelConfig, maker: Maker) -> None:
    if seen.holds == "text":
        tokens = highest = 0
        for ids in tokenize(seen.file, maker.tokenizer, maker.end):
            tokens, highest = tokens + len(ids), max(highest, int(ids.max(initial=0)))
        seen.report.documents, seen.report.tokens, seen.report.trained = 1, tokens, max(0, tokens - 1)
        seen.add(tokens, run.context)
    else:
        highest = 0
        for _, documents in read_documents(seen.file, maker.encoder, maker.how, seen.report):
            for document in documents:
                highest = max(highest, int(document.ids.max(initial=0)))
                seen.add(len(document.ids), run.context)
                beyond = len(document.ids) > run.context + 1
                seen.lost += beyond and not document.trained[: run.context + 1].any()
    if highest >= config.vocabulary:
        raise DataError(
            f"{seen.file} has a token that the model does not have",
            found=f"token {highest} by the tokenizer",
            allowed=f"0 to {config.vocabulary - 1}",
            next="take the tokenizer that belongs to the model",
        )


def _look_at_ids(seen: FileSurvey, run: Run, config: ModelConfig, end: int | None) -> None:
    shards = Shards([seen.file], config.vocabulary, run.data.ids)
    size = shards.sizes[0]
    for place in range(0, size, READ_AT_ONCE):
        shards.read(0, place, READ_AT_ONCE)
    starts = document_starts(shards, 0, end)
    for tokens in np.diff(starts, append=size).tolist():
        seen.add(tokens, run.context)
    seen.lost = cut_documents(shards, run.context, end).dropped
    told = shards.starts(0) is not None
    seen.report = FileReport(
        documents=len(starts),
        tokens=size,
        trained=int(shards.trained(0, 0, size).sum()) if told else size - len(starts),
    )


def pack(run: Run, folder: Path, out: Path) -> list[tuple[Path, FileReport | None]]:
    """Write the shards that training would make of the run's files of text and rows, with their checksums, into `out`.

    (shard, what became of its rows). What is token ids already stays where it is. Raises `DataError`.
    """
    with source_beside(run, folder) as (source, config):
        end = end_token(config)
        files = [path for _, path in named_files(run, folder) if kind_of(path, run.data.text) != "ids"]
        if not files:
            raise DataError("all of the data is token ids already", next="train on it as it is")
        if out.exists() and any(out.iterdir()):
            raise DataError(f"{out} is not empty", next="choose another folder")
        try:
            shards = token_shards(files, run.data.text, source, end, out, run.rows_as)
        except DataError:
            shutil.rmtree(out, ignore_errors=True)
            raise
    return [(path, read_report(path) if path.suffix == ".safetensors" else None) for path in shards]
