"""A run: the inputs are cut into parts, those that are missing are computed, and the answers are joined.

The journey of a row: `sources` reads its bytes. `plan` puts it into a part and names the part. `pool` or `cluster`
gives the part to a worker. There `compute` parses the row, answers it by a class of `tasks` and writes the answer as
bytes. `output` keeps the part under its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torchwright.core.errors import DataError, WorkloadError
from torchwright.core.process import interrupts
from torchwright.map.columns import choose
from torchwright.map.compute import Computed, OutputForm
from torchwright.map.model import MapModel, find_model
from torchwright.map.options import MapOptions, TaskName, TaskOptions
from torchwright.map.output import Output
from torchwright.map.pace import Pace, estimated
from torchwright.map.plan import Part, cut
from torchwright.map.pool import Executor, Pool, shared_out
from torchwright.map.sources import Source, open_sources
from torchwright.map.tasks.base import FACTS, TaskSpec
from torchwright.map.tasks.registry import fields_of

FORM = 1
"""The version of the answers' form: parts of another are computed again."""
NOTE_SECONDS = 30.0
"""Time between two notes of what was measured, which a killed run leaves for `--dry-run`."""


@dataclass(kw_only=True)
class Summary:
    """The result of a run, or of its plan."""

    task: str
    model: str
    out: str
    rows: int = 0
    """Rows of the parts that are this run's, those that were there already too."""
    rejected: int = 0
    parts: int = 0
    """Parts that are this run's."""
    parts_there: int = 0
    """Those of them that were there before."""
    computed_rows: int = 0
    computed_parts: int = 0
    missing_parts: int = 0
    """Parts that nobody has computed: other shards', or all of a dry run."""
    missing_rows: int = 0
    seconds: float = 0.0
    rows_per_s: float | None = None
    estimated_seconds: float | None = None
    """The missing parts' time in a dry run, at the pace that was measured in this place before."""
    joined: bool = False
    """True if all parts are there and the answers are whole."""
    rejected_file: str | None = None
    first_reason: str = ""
    """The reason for which the first row of this run was rejected."""


class Progress(Protocol):
    """The interface of what shows how far a run is."""

    def begin(self, bytes_total: int | None) -> None:
        """The plan is made; the inputs have so many bytes, None where that is not known."""
        ...

    def advance(self, *, bytes_read: int, rows: int, rejected: int, there: bool) -> None:
        """A part is done, now or by an earlier run (`there`)."""
        ...


def run(
    options: MapOptions, progress: Progress, notice: Callable[[str], None], *, dry: bool = False
) -> Summary:
    """Run `torchwright map`, or with `dry` only plan it; what was done is kept whatever ends the run.

    Raises `TorchwrightError` for inputs, models and outputs that cannot be used, and with `strict` for a rejected row.
    """
    job = Job(options)
    job.output.open(job.description(), overwrite=options.overwrite, write=not dry)
    progress.begin(job.bytes)
    if dry:
        return _planned(job)
    with interrupts.deferred():
        return _Run(job, progress, notice).all()


class Job:
    """A run's model, its inputs with their columns, its parts, and its output."""

    def __init__(self, options: MapOptions) -> None:
        self.options = options
        self.model: MapModel = find_model(options.model.model, options.task_name)
        self.task: TaskName = options.task_name or self.model.usual_task
        self._facts = FACTS[self.task, self.model.kind]
        self.output = Output(options.out, options.output_format)
        if self.task == "openai" and self.output.form == "parquet":
            raise WorkloadError("answers in OpenAI's form are lines of JSON", next="-o NAME.jsonl")
        self._check_requests(options.task)
        self._check_places()
        self.sources: list[Source] = open_sources(options.inputs, options.input_format, self._facts.media)
        wanted = options.task.keep or None
        self.columns, kept = choose(self.sources, self.task, self._facts, options.task, wanted)
        self.spec = TaskSpec(
            task=self.task,
            kind=self.model.kind,
            folder=str(self.model.folder.absolute()),
            artifact=str(self.model.artifact.absolute()) if self.model.artifact else None,
            model=replace(options.model, model=self._absolute_target()),
            options=self.columns,
            name=options.model.served_name or self.model.name,
        )
        self.form = OutputForm(
            form=self.output.form, fields=fields_of(self.spec), keep=kept, files=len(self.sources) > 1
        )
        self.identity = self._identity()

    @property
    def bytes(self) -> int | None:
        """Bytes of all inputs; None where one does not say, or where only the first rows are read."""
        sizes = [source.size for source in self.sources]
        return None if None in sizes or self.options.limit else sum(size or 0 for size in sizes)

    def description(self) -> dict[str, Any]:
        """Return what the output's folder says of the run: another run there is refused by it."""
        return {
            "form": FORM,
            "task": self.task,
            "model": self.model.digest,
            "options": {
                **self.options.answers(),
                "columns": [self.columns.text_column, self.columns.pair_column],
            },
            "output": {"form": self.form.form, "keep": self.form.keep, "files": self.form.files},
        }

    def parts(self) -> Iterator[Part]:
        """Yield every part of the input; once."""
        rows = self.options.part_rows or self._facts.part_rows
        return cut(self.sources, self.identity, rows=rows, limit=self.options.limit)

    def is_ours(self, part: Part) -> bool:
        """Check whether this shard computes a part."""
        place, count = self.options.shard
        return part.index % count == place

    def workers(self) -> int:
        """Return how many parts are computed at the same time; of a cluster what was asked for."""
        if self.options.ray is not None:
            return self.options.workers or 1
        return shared_out(self.options.workers, self.options.threads, self.model.threads)[0]

    def executor(self) -> Executor:
        """Start what computes."""
        workers, threads = self.options.workers, self.options.threads
        if self.options.ray is not None:
            from torchwright.map.cluster import Cluster

            each = threads or self.model.threads or 1
            return Cluster(
                self.options.ray,
                self.spec,
                self.form,
                workers=workers,
                threads=each,
                part_seconds=self.options.part_seconds,
            )
        count, each = shared_out(workers, threads, self.model.threads)
        return Pool(self.spec, self.form, workers=count, threads=each, part_seconds=self.options.part_seconds)

    def _identity(self) -> str:
        text = json.dumps(self.description(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _absolute_target(self) -> str | None:
        """Return the target by a name that a process with another working folder understands."""
        target = self.options.model.model
        if target is None:
            return None
        return str((self.model.artifact or self.model.folder).absolute())

    def _check_places(self) -> None:
        """Raise `WorkloadError` for an output that is or has an input, or would be one of the next run."""
        out = Path(os.path.realpath(self.options.out))
        for word in self.options.inputs:
            path = Path(word)
            inside = path.is_dir() and out.is_relative_to(os.path.realpath(path))
            if word != "-" and (inside or self.output.owns(path)):
                raise WorkloadError(
                    f"-o {self.options.out} is an input, has one among its files, or lies inside of one: {word}",
                    next="choose another place",
                )

    def _check_requests(self, task: TaskOptions) -> None:
        """Refuse options that the task would ignore."""
        given = {
            "--truncate": task.truncate and self.model.kind not in ("encoder", "classifier"),
            "--all-labels": task.all_labels and self.task != "classify",
            "--chat": task.chat and self.task != "generate",
            "--pair-column": task.pair_column is not None and self.task not in ("score", "classify"),
            "options of generation": bool(task.request) and self.task not in ("generate", "transcribe"),
            "--keep": bool(task.keep) and self.task == "openai",
        }
        if clash := [name for name, there in given.items() if there]:
            raise WorkloadError(f"{', '.join(clash)} would change nothing: the task is '{self.task}'")
        model = self.options.model
        for name in ("quantize", "kv", "dtype", "adapter"):
            if getattr(model, name) is not None and self.model.artifact is not None:
                raise WorkloadError(f"--{name} is for models that are not optimized; an artifact has its own")
            if getattr(model, name) is not None and self.model.kind not in ("writer", "recognizer"):
                raise WorkloadError(f"--{name} is for language and speech models")


def _planned(job: Job) -> Summary:
    """Read the inputs and count what is there and what is missing."""
    found, missing_bytes = _summary(job), 0
    done = set(job.output.finished or ())
    for part in job.parts():
        interrupts.check()
        if not job.is_ours(part):
            continue
        found.parts += 1
        found.rows += len(part.records)
        if part.name in done or job.output.has(part.name):
            found.parts_there += 1
            found.rejected += job.output.rejected_rows(part.name)
        else:
            found.missing_parts += 1
            found.missing_rows += len(part.records)
            missing_bytes += _bytes(part)
    if measured := job.output.measured:
        rest = estimated(measured, missing_bytes, job.workers())
        found.estimated_seconds, found.rows_per_s = rest or (None, None)
    return found


def _bytes(part: Part) -> int:
    return sum(len(record.raw) for record in part.records)


def _summary(job: Job) -> Summary:
    return Summary(
        task=job.task,
        model=job.options.model.model or "bundled",
        out=str(job.output.file or job.output.folder),
    )


class _Run:
    """The loop of one run."""

    def __init__(self, job: Job, progress: Progress, notice: Callable[[str], None]) -> None:
        self._job, self._progress, self._notice = job, progress, notice
        self._output, self._found = job.output, _summary(job)
        self._executor: Executor | None = None
        self._told = 0
        self._noted = time.monotonic()
        self._pace: Pace | None = None

    def all(self) -> Summary:
        """Compute what is missing, and join the answers if every part is there."""
        begun = time.monotonic()
        if (finished := self._finished()) is not None:
            return finished
        names, complete = list[str](), True
        try:
            for part in self._job.parts():
                interrupts.check()
                names.append(part.name)
                if self._output.has(part.name):
                    self._keep(part)
                elif self._job.is_ours(part):
                    self._found.parts += 1
                    self._found.rows += len(part.records)
                    self._begin(part)
                else:
                    complete = False
                    self._found.missing_parts += 1
            if self._pace is not None:
                self._pace.all_begun()
            while self._executor is not None and self._executor.running():
                self._collect()
        finally:
            self._note()
            if self._executor is not None:
                self._executor.close()
        self._found.seconds = time.monotonic() - begun
        if self._found.computed_rows:
            self._found.rows_per_s = self._found.computed_rows / self._found.seconds
        if complete or all(self._output.has(name) for name in names):
            self._output.join(names, keep=self._job.options.limit is not None)
            self._found.joined = True
        else:  # unless another shard has found all parts there first
            self._found.joined = self._output.finished == names
        if self._found.joined:
            self._found.missing_parts = 0
            if self._output.rejected.is_file():
                self._found.rejected_file = str(self._output.rejected)
        return self._found

    def _finished(self) -> Summary | None:
        """Return the summary of answers that an earlier run has joined, None where there is something to do.

        Raises `DataError` where the input is another since then.
        """
        done, file = self._output.finished, self._output.file
        if done is None or file is None or not file.is_file():
            return None
        found, begun = self._found, time.monotonic()
        for place, part in enumerate(self._job.parts()):
            interrupts.check()
            if place >= len(done) or part.name != done[place]:
                raise DataError(
                    f"{file} is whole, and the input is another now, from row {part.first_row:,} on",
                    next="choose another place with -o, or say --overwrite; a folder (-o DIR) keeps equal parts",
                )
            found.parts += 1
            found.rows += len(part.records)
            self._progress.advance(bytes_read=part.bytes_read, rows=len(part.records), rejected=0, there=True)
        if found.parts < len(done):
            raise DataError(f"{file} is whole, and the input has fewer rows now", next="say --overwrite")
        found.parts_there, found.joined, found.seconds = found.parts, True, time.monotonic() - begun
        if self._output.rejected.is_file():
            found.rejected_file = str(self._output.rejected)
            found.rejected = self._output.rejected.read_bytes().count(b"\n")
        return found

    def _keep(self, part: Part) -> None:
        """Count a part that is there."""
        rejected = self._output.rejected_rows(part.name)
        self._check_strict(part, rejected, None)
        if self._job.is_ours(part):
            self._found.parts += 1
            self._found.parts_there += 1
            self._found.rows += len(part.records)
            self._found.rejected += rejected
        self._progress.advance(
            bytes_read=part.bytes_read, rows=len(part.records), rejected=rejected, there=True
        )

    def _begin(self, part: Part) -> None:
        """Give a part to a worker, once one is free."""
        if self._executor is None:
            self._executor = self._job.executor()
            self._pace = Pace(self._job.workers())
        while self._executor.free() < 1:
            self._collect()
        assert self._pace is not None
        self._pace.begin()
        self._executor.submit(part)
        self._collect(0.0)

    def _collect(self, seconds: float = interrupts.POLL_SECONDS) -> None:
        """Write the parts that are done."""
        assert self._executor is not None
        interrupts.check()
        for part, computed in self._executor.finished(seconds):
            self._take(part, computed)
        for text in self._executor.notices[self._told :]:
            self._notice(text)
        self._told = len(self._executor.notices)

    def _take(self, part: Part, computed: Computed) -> None:
        found = self._found
        self._output.write(part.name, computed.answers, computed.rejected)
        found.computed_parts += 1
        found.computed_rows += computed.rows
        found.rejected += computed.rejected_rows
        found.first_reason = found.first_reason or computed.reason
        assert self._pace is not None
        self._pace.take(rows=computed.rows, size=_bytes(part), computed_seconds=computed.seconds)
        if time.monotonic() - self._noted > NOTE_SECONDS:
            self._note()
        self._progress.advance(
            bytes_read=part.bytes_read, rows=computed.rows, rejected=computed.rejected_rows, there=False
        )
        self._check_strict(part, computed.rejected_rows, computed.reason)

    def _check_strict(self, part: Part, rejected: int, reason: str | None) -> None:
        """Raise `DataError` for a part with rejected rows, where `strict` is asked for."""
        if self._job.options.strict and rejected:
            raise DataError(
                f"{rejected} of rows {part.rows} were rejected, and --strict ends the run",
                found=reason,
                next="mend the rows, or go on without --strict; what is done is kept",
            )

    def _note(self) -> None:
        """Keep what was measured since the last note."""
        if self._pace is not None and (measured := self._pace.note()):
            self._output.note(**measured)
        self._noted = time.monotonic()
