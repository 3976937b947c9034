"""One part: its records parsed, answered and written as bytes. The same in a worker process and on a cluster."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchwright.core.rows import DataRow
from torchwright.map.output import OutputFormat
from torchwright.map.plan import Part
from torchwright.map.sources import parse
from torchwright.map.tasks.base import Answer, Rejected, Task

LONGEST_KEPT = 2000
"""Characters of a rejected row that are repeated next to the reason."""
LARGEST_INTEGER = 2**63 - 1
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class OutputForm:
    """The form in which answers are written."""

    form: OutputFormat
    fields: dict[str, str]
    """Fields of an answer → types in Parquet; none where answers are lines of their own form (OpenAI's)."""
    keep: dict[str, str] = field(default_factory=dict)
    """Columns of the input that are repeated → types in Parquet."""
    files: bool = False
    """True if there are several inputs, so that a row says which is its own."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A part's answers as they are written."""

    index: int
    answers: bytes
    rejected: bytes
    rows: int
    rejected_rows: int
    seconds: float
    reason: str = ""
    """The reason of the first rejected row."""


def compute(task: Task, part: Part, form: OutputForm) -> Computed:
    """Return the answers of a part, in the order of its records."""
    begun = time.perf_counter()
    rows = [parse(record, part.kind) for record in part.records]
    answers: list[Answer] = [Rejected(row.fault or "the row has no answer") for row in rows]
    good = [place for place, row in enumerate(rows) if row.fault is None]
    for inner, answer in task.answer([rows[place].values for place in good]) if good else ():
        answers[good[inner]] = answer
    written, faults = list[dict[str, Any]](), list[bytes]()
    reason = ""
    for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        if not isinstance(answer, Rejected):
            answer = _writable(_placed(part, place, row, answer, form))
        if isinstance(answer, Rejected):
            reason = reason or answer.reason
            faults.append(_rejected(part, place, row, answer))
        else:
            written.append(answer)
    return Computed(
        index=part.index,
        answers=_written(written, form),
        rejected=b"".join(faults),
        rows=len(rows),
        rejected_rows=len(faults),
        seconds=time.perf_counter() - begun,
        reason=reason,
    )


def rejected(part: Part, reason: str, form: OutputForm) -> Computed:
    """Return a part of which every row is rejected for one reason."""
    faults = [
        _rejected(part, place, parse(record, part.kind), Rejected(reason))
        for place, record in enumerate(part.records)
    ]
    return Computed(
        index=part.index,
        answers=_written([], form),
        rejected=b"".join(faults),
        rows=len(faults),
        rejected_rows=len(faults),
        seconds=0.0,
        reason=reason,
    )


def joined(pieces: Sequence[Computed], form: OutputForm) -> Computed:
    """Return the pieces of one part, which are in the order of its rows, as one."""
    answers = [piece.answers for piece in pieces]
    return Computed(
        index=pieces[0].index,
        answers=b"".join(answers) if form.form == "jsonl" else _joined_parquet(answers),
        rejected=b"".join(piece.rejected for piece in pieces),
        rows=sum(piece.rows for piece in pieces),
        rejected_rows=sum(piece.rejected_rows for piece in pieces),
        seconds=sum(piece.seconds for piece in pieces),
        reason=next((piece.reason for piece in pieces if piece.reason), ""),
    )


def _placed(part: Part, place: int, row: DataRow, answer: dict[str, Any], form: OutputForm) -> Answer:
    """Return an answer with the place and the kept columns of its row."""
    if not form.fields:
        return answer
    found: dict[str, Any] = {"row": part.first_row + place}
    if form.files:
        found["file"] = part.source
    if part.kind == "path":
        found["file"] = row.values["file"]
    for name, kind in form.keep.items():
        value = row.values.get(name)
        if form.form == "parquet" and value is not None:
            value = _typed(value, kind)
            if value is None:
                return Rejected(
                    f"'{name}' is not {kind}, as in the first row, and a Parquet column has one type"
                )
        found[name] = value
    return found | answer


def _writable(answer: Answer) -> Answer:
    """Return an answer, or the reason why a column that it repeats cannot be written."""
    if isinstance(answer, Rejected):
        return answer
    numbers = [name for name, value in answer.items() if type(value) is int and abs(value) > LARGEST_INTEGER]
    return Rejected(f"'{numbers[0]}' is an integer of more than 64 bits") if numbers else answer


def _typed(value: Any, kind: str) -> Any:
    """Return a kept value as its column's type, None where it is another."""
    if kind == "json":
        return _encode(value).decode()
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type_name(value) == kind else None


def type_name(value: Any) -> str:
    """Return the type of a kept column in Parquet by its first value."""
    if isinstance(value, bool):
        return "bool"
    known = {int: "int", float: "float", str: "string"}
    return known.get(type(value), "json")


def _rejected(part: Part, place: int, row: DataRow, answer: Rejected) -> bytes:
    if answer.body is not None:
        return _encode(answer.body) + b"\n"
    raw = part.records[place].raw.decode("utf-8", "replace")
    said = {
        "row": part.first_row + place,
        "file": part.source,
        "line": row.number,
        "reason": answer.reason,
        "input": raw if part.kind != "path" else raw.rpartition("\n")[2],
    }
    said["input"] = said["input"][:LONGEST_KEPT]
    return _encode(said) + b"\n"


def _written(rows: Sequence[dict[str, Any]], form: OutputForm) -> bytes:
    return _jsonl(rows) if form.form == "jsonl" else _parquet(rows, form)


def _jsonl(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return a line for each row; NaN and infinities of kept columns become null, which JSON has instead."""
    return b"".join(_encode(row) + b"\n" for row in rows)


def _parquet(rows: Sequence[dict[str, Any]], form: OutputForm) -> bytes:
    import pyarrow
    import pyarrow.parquet

    types = {
        "string": pyarrow.string(),
        "json": pyarrow.string(),
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "vector": pyarrow.list_(pyarrow.float32()),
    }
    fields = [("row", types["int"]), *([("file", types["string"])] if form.files else [])]
    fields += [(name, types[kind]) for name, kind in (*form.keep.items(), *form.fields.items())]
    nested = {name for name, kind in form.fields.items() if kind == "json"}
    columns = {
        name: [_encode(row.get(name)).decode() if name in nested else row.get(name) for row in rows]
        for name, _ in fields
    }
    table = pyarrow.table(
        [pyarrow.array(columns[name], kind) for name, kind in fields], schema=pyarrow.schema(fields)
    )
    return _parquet_bytes(table)


def _joined_parquet(files: Sequence[bytes]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    return _parquet_bytes(
        pyarrow.concat_tables([pyarrow.parquet.read_table(io.BytesIO(file)) for file in files])
    )


def _parquet_bytes(table: Any) -> bytes:
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, compression="zstd")
    return file.getvalue()
