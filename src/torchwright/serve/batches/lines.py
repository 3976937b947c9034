"""The lines of a batch's files: requests in, answers and errors out, in OpenAI's form.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
{"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}}, "error": null}
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torchwright.serve.api_error import ApiError
from torchwright.serve.batches.records import BatchFault, Usage
from torchwright.serve.ids import new_id

CUSTOM_ID_CHARACTERS = 512
"""OpenAI's limit; every name of a batch is held in memory."""
FAULTS = 100
"""Faults of a file that are reported; somebody reads them."""


class Line(msgspec.Struct, kw_only=True):
    """A line as it must be; its body is read when its turn comes."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True)
class BatchRow:
    """One request of a batch."""

    custom_id: str
    body: bytes


class FileFaults(Exception):
    """A file that is not a batch's input."""

    def __init__(self, faults: list[BatchFault]) -> None:
        super().__init__(faults[0].message)
        self.faults = faults


def check(path: Path, endpoint: str, *, most_rows: int, most_bytes: int) -> int:
    """Return the number of requests of a file; raise `FileFaults` with what is wrong with its lines."""
    names, faults = set[str](), list[BatchFault]()
    for number, raw in _lines(path, most_bytes):
        fault = _fault(raw, endpoint, names, most_bytes)
        if fault is not None:
            code, message, param = fault
            faults.append(BatchFault(code=code, message=message, line=number, param=param))
        if len(names) > most_rows:
            text = f"the file has more than {most_rows} requests, which is the most"
            raise FileFaults([*faults, BatchFault(code="too_many_requests", message=text)])
        if len(faults) == FAULTS:
            break
    if not names and not faults:
        faults = [BatchFault(code="empty_file", message="the file has no requests")]
    if faults:
        raise FileFaults(faults)
    return len(names)


def rows(path: Path, most_bytes: int) -> Iterator[BatchRow]:
    """Yield the requests of a file that has passed `check`."""
    for _, raw in _lines(path, most_bytes):
        line = msgspec.json.decode(raw, type=Line)
        yield BatchRow(line.custom_id, bytes(line.body))


def answered(id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of a request that was answered, whatever the answer."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _written(id, response, None)


def error_body(error: ApiError) -> bytes:
    """Return an error as a response's body has it."""
    return msgspec.json.encode({"error": msgspec.json.decode(error.body())["error"]})


def unanswered(id: str, code: str, message: str) -> bytes:
    """Return the line of a request that was never asked."""
    return _written(id, None, {"code": code, "message": message})


class _Usage(msgspec.Struct):
    """The usage of an answer, by the names of any endpoint."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None
    input_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Answer


class _Output(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


def count(usage: Usage, body: bytes) -> None:
    """Add an answer's tokens."""
    _add(usage, msgspec.json.decode(body, type=_Answer))


def read_results(path: Path, usage: Usage) -> set[str]:
    """Return the custom ids of a file of results and add its tokens; from a line that was cut off on it is cut."""
    names, end = set[str](), 0
    if not path.exists():
        return names
    with path.open("r+b") as file:
        for raw in file:
            try:
                line = msgspec.json.decode(raw, type=_Output)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                break
            if not raw.endswith(b"\n"):
                break
            names.add(line.custom_id)
            if line.response is not None:
                _add(usage, line.response.body)
            end += len(raw)
        file.truncate(end)
    return names


def _add(usage: Usage, answer: _Answer) -> None:
    found = answer.usage
    if found is None:
        return
    before = found.prompt_tokens_details or found.input_tokens_details or {}
    after = found.completion_tokens_details or found.output_tokens_details or {}
    usage.input_tokens += found.prompt_tokens + found.input_tokens
    usage.output_tokens += found.completion_tokens + found.output_tokens
    usage.cached_tokens += before.get("cached_tokens") or 0
    usage.reasoning_tokens += after.get("reasoning_tokens") or 0


def _written(id: str, response: Any, error: Any) -> bytes:
    line = {"id": new_id("batch_req_"), "custom_id": id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _lines(path: Path, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty with its number; of one that is too long only the beginning."""
    number = 0
    with path.open("rb") as file:
        while raw := file.readline(most_bytes + 2):  # with its end, of one or two bytes
            number += 1
            more = raw
            while more and not more.endswith(b"\n"):
                more = file.readline(most_bytes)
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw := raw.strip():
                yield number, raw


def _fault(raw: bytes, endpoint: str, names: set[str], most_bytes: int) -> tuple[str, str, str | None] | None:
    """Return code, message and field of what is wrong with a line, and add its name to `names`."""
    if len(raw) > most_bytes:
        return "line_too_long", f"the line has more than {most_bytes} bytes, which is the most", None
    try:
        line = msgspec.json.decode(raw, type=Line)
    except msgspec.ValidationError as error:
        return "invalid_request", f"the line is no request: {error}", None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", f"the line is not valid JSON: {error}", None
    if not line.custom_id or len(line.custom_id) > CUSTOM_ID_CHARACTERS:
        return "invalid_custom_id", f"custom_id must have 1 to {CUSTOM_ID_CHARACTERS} characters", "custom_id"
    if line.custom_id in names:
        return "duplicate_custom_id", "another line has the same custom_id", "custom_id"
    names.add(line.custom_id)
    if line.method != "POST":
        return "invalid_method", "the method must be POST", "method"
    if line.url != endpoint:
        return "mismatched_url", f"the batch is for {endpoint}, and each line's url must be the same", "url"
    if not bytes(line.body).startswith(b"{"):
        return "invalid_body", "the body must be an object", "body"
    return None
