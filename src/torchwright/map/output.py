"""The output of a run: a folder of parts, joined to one file where one is asked for.

    out/run.json                       the model, the task and the options; what was measured
    out/part-00000000-1f0c….jsonl      the answers of a part, in the order of the input
    out/part-00000000-1f0c….rejected   its rows without an answer, with the reasons
    out/rejected.jsonl                 those of all parts, once all are there
    out/finished.json                  the names of the parts, once they are joined to one file

For `-o answers.jsonl` the folder is `answers.jsonl.parts`; its parts go when they are joined. A part is written aside
and renamed, its rejected rows first: whoever sees the part sees them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torchwright.core.errors import DataError, WorkloadError
from torchwright.core.process.files import check_writable, replacing

OutputFormat = Literal["jsonl", "parquet"]
RUN, FINISHED, REJECTED, PARTS = "run.json", "finished.json", "rejected.jsonl", ".parts"
SUFFIXES: dict[str, OutputFormat] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
LEFTOVER_SECONDS = 3600.0
"""Age from which on a file that was written aside is what a killed run left: a part is written in seconds."""
COPY_BYTES = 1 << 20


class Output:
    """The place of a run's answers. `open` it before anything is computed."""

    def __init__(self, out: Path, form: OutputFormat | None) -> None:
        """Raises `WorkloadError` for a name whose suffix is not a format."""
        folder = out.is_dir() or not out.suffix
        if not folder and out.suffix.lower() not in SUFFIXES:
            raise WorkloadError(
                f"-o {out}: the name does not say a format",
                allowed=f"a folder, or a file that ends in {', '.join(SUFFIXES)}",
            )
        named = None if folder else SUFFIXES[out.suffix.lower()]
        if form is not None and named not in (None, form):
            raise WorkloadError(f"--format {form} does not fit -o {out}", next="leave one of the two out")
        self.form: OutputFormat = named or form or "jsonl"
        self.file = None if folder else out
        """The one file; None for a folder."""
        self.folder = out if folder else out.with_name(out.name + PARTS)
        self.rejected = out / REJECTED if folder else out.with_name(f"{out.stem}.{REJECTED}")
        self._run: dict[str, Any] = {}

    def owns(self, path: Path) -> bool:
        """Check whether a path, by whatever name, is a file of this output, which a run replaces and removes."""
        real = Path(os.path.realpath(path))
        files = {os.path.realpath(each) for each in (self.file, self.rejected) if each is not None}
        return str(real) in files or (
            _is_ours(real.name) and str(real.parent) == os.path.realpath(self.folder)
        )

    def open(self, run: dict[str, Any], *, overwrite: bool, write: bool = True) -> None:
        """Take the place for a run, or go on with what is there; without `write` nothing is changed.

        Raises `WorkloadError` where something else is there: other files, or answers of another model, task or options.
        """
        if overwrite and write:
            self._remove()
        there = None if overwrite else self._there()
        if there is not None and (different := _differences(there.get("job"), run)):
            raise WorkloadError(
                f"{self.file or self.folder} holds the answers of another run",
                found="; ".join(different),
                next="choose another place with -o, or say --overwrite",
            )
        self._run = {**(there or {}), "job": run}
        if write:
            check_writable(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_run()

    @property
    def finished(self) -> list[str] | None:
        """Names of the parts that were joined to the file; None where they are not, or only the first rows are."""
        try:
            return json.loads((self.folder / FINISHED).read_text("utf-8"))
        except FileNotFoundError:
            return None

    @property
    def measured(self) -> dict[str, float]:
        """Rows, bytes and seconds that earlier runs computed here."""
        return dict(self._run.get("measured", {}))

    def part(self, name: str) -> Path:
        return self.folder / f"{name}.{self.form}"

    def has(self, name: str) -> bool:
        """Check whether a part is there, or in the file that another shard has joined meanwhile."""
        if self.part(name).is_file():
            return True
        return self.file is not None and self.file.is_file() and name in (self.finished or ())

    def rejected_rows(self, name: str) -> int:
        """Rows of a part that have no answer."""
        try:
            return self._rejected_part(name).read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def write(self, name: str, answers: bytes, rejected: bytes) -> None:
        """Write a part; it is there as a whole, or not."""
        if rejected:
            _write(self._rejected_part(name), rejected)
        else:
            self._rejected_part(name).unlink(missing_ok=True)
        _write(self.part(name), answers)

    def note(self, **measured: float) -> None:
        """Add to what was measured."""
        with contextlib.suppress(OSError, ValueError):  # other shards note theirs
            self._run = json.loads((self.folder / RUN).read_text("utf-8"))
        before = self.measured
        more = {key: before.get(key, 0) + value for key, value in measured.items()}
        self._run["measured"] = before | more
        self._write_run()

    def join(self, names: Sequence[str], *, keep: bool) -> None:
        """Write the rejected rows of all parts, and for one file their answers; `keep` every part that is there.

        Several shards may find all parts there and join them at the same time. Each writes the same files, unless
        another has removed the parts: `FINISHED` is there before the first of them goes.
        """
        try:
            self._join_rejected(names)
            if self.file is not None:
                self._join_answers(names, self.file)
        except FileNotFoundError:
            if not self._is_whole(names):
                raise
            return
        if self.file is not None and not keep:
            _write(self.folder / FINISHED, json.dumps(names).encode())
        if not keep:
            self._remove_old(set() if self.file is not None else set(names))

    def _is_whole(self, names: Sequence[str]) -> bool:
        """Check whether the parts were joined to the one file."""
        return self.file is not None and self.file.is_file() and self.finished == list(names)

    def _join_answers(self, names: Sequence[str], file: Path) -> None:
        with replacing(file) as beside:
            if self.form == "parquet":
                _join_parquet([self.part(name) for name in names], beside)
            else:
                _concatenate([self.part(name) for name in names], beside)
            _settle(beside)

    def _there(self) -> dict[str, Any] | None:
        """Return the run that is there. Raises `WorkloadError` for anything else."""
        path = self.folder / RUN
        if path.is_file():
            try:
                return json.loads(path.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be read", found=str(error), next="--overwrite") from error
        other = self.file if self.file is not None and self.file.exists() else None
        if other is None and self.folder.is_dir():
            # Hidden: what other shards, which start at the same time, write aside.
            other = self.folder if any(path.name[0] != "." for path in self.folder.iterdir()) else None
        if other is not None:
            raise WorkloadError(
                f"{other} is there already, and no run of `torchwright map` wrote it",
                next="choose another place with -o, or say --overwrite",
            )
        return None

    def _remove(self) -> None:
        """Remove a run's files; of another folder only the files that take the names of ours."""
        if (self.folder / RUN).is_file():
            for path in self.folder.iterdir():
                if _is_ours(path.name):
                    path.unlink()
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        self.rejected.unlink(missing_ok=True)

    def _join_rejected(self, names: Sequence[str]) -> None:
        """Raises `FileNotFoundError` where another shard has joined the parts, so that some may be missing here."""
        parts = [path for name in names if (path := self._rejected_part(name)).is_file()]
        if parts:
            with replacing(self.rejected) as beside:
                _concatenate(parts, beside)
                if self._is_whole(names):
                    raise FileNotFoundError(self.folder)
        elif not self._is_whole(names):
            self.rejected.unlink(missing_ok=True)

    def _remove_old(self, kept: set[str]) -> None:
        """Remove parts of other names, which an earlier input had, and what killed runs left."""
        for path in list(self.folder.glob("part-*")):
            if path.name.partition(".")[0] not in kept:
                path.unlink(missing_ok=True)
        for path in list(self.folder.glob(".part-*")):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                    path.unlink()

    def _rejected_part(self, name: str) -> Path:
        return self.folder / f"{name}.rejected"

    def _write_run(self) -> None:
        _write(self.folder / RUN, (json.dumps(self._run, indent=2) + "\n").encode())


def _is_ours(name: str) -> bool:
    """Check whether a file in a run's folder has one of the names that runs give."""
    return name.startswith(("part-", ".part-")) or name in (RUN, FINISHED, REJECTED)


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as beside:
        beside.write_bytes(data)
        _settle(beside)


def _settle(path: Path) -> None:
    """Have a file's bytes on the disk before its name is: without that a loss of power leaves an empty file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _concatenate(parts: Sequence[Path], to: Path) -> None:
    with to.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, COPY_BYTES)


def _join_parquet(parts: Sequence[Path], to: Path) -> None:
    """Write the row groups of all parts into one file."""
    import pyarrow.parquet as parquet

    schema = parquet.read_schema(parts[0]) if parts else None
    if schema is None:
        raise DataError("the input has no rows, and a Parquet file of none has no columns")
    with parquet.ParquetWriter(to, schema) as writer:
        for part in parts:
            writer.write_table(parquet.read_table(part, schema=schema))


def _differences(before: Any, now: dict[str, Any]) -> list[str]:
    """Return each field, by its path, in which the run that is there differs from this one."""
    old, new = _flat("", before), _flat("", json.loads(json.dumps(now)))
    return [
        f"{name} was {json.dumps(old.get(name))[:80]} and is {json.dumps(new.get(name))[:80]}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return the leaves of nested objects by their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        path: leaf
        for key, inner in value.items()
        for path, leaf in _flat(f"{name}.{key}" if name else str(key), inner).items()
    }
