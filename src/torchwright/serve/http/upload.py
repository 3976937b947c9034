# pyright: reportMissingImports=false
"""A form with a file in it, read as it comes: the file goes to the disk, the other fields stay in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from starlette.requests import Request

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import FIELDS, MIB, Limits
from torchwright.serve.openai.transcription_request import TranslationRequest

FILE = "file"
"""The field that is written to the disk, whatever else its part says of itself."""
DISCARDED_BYTES = 64 * MIB
"""So much behind the limit is read, so that the client reads the refusal."""
PART_HEADER_BYTES = 8192
"""The most that the headers of one part may have: a name, a file name and a type."""


@dataclass(frozen=True)
class ReadForm:
    """A form whose file was written to the disk."""

    fields: dict[str, Any]
    """Values by name, lists of repeated fields, and the path of the file."""
    filename: str
    """The file's name as the client says it; empty without one."""


async def read_form(request: Request, path: Path, limits: Limits, hold: Callable[[int], None]) -> ReadForm:
    """Return the fields of a form, and write its file to `path`.

    `hold` is called with the number of bytes before they are written, and may refuse them. Raises `ApiError` for
    another content type (415), too many bytes (413), a slow body (408), and a malformed form (400).
    """
    boundary = _boundary(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.upload_bytes + DISCARDED_BYTES:
        raise _too_large(limits)  # the body is not read
    with path.open("wb", buffering=0) as file:
        form = _Form(boundary, file, limits.settings_bytes, hold)
        try:
            async with asyncio.timeout(limits.upload_seconds):
                size = 0
                async for chunk in _chunks(request, limits.body_seconds):
                    size += len(chunk)
                    if size <= limits.upload_bytes:
                        form.write(chunk)
                    elif size > limits.upload_bytes + DISCARDED_BYTES:
                        break
        except TimeoutError:
            raise ApiError(408, "the upload comes too slowly", code="timeout") from None
        if size > limits.upload_bytes:
            raise _too_large(limits)
        form.end()
    fields = form.fields | ({FILE: str(path)} if form.has_file else {})
    return ReadForm(fields, form.filename)


def _boundary(request: Request) -> bytes:
    from python_multipart.multipart import parse_options_header  # most servers read no forms

    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != TranslationRequest.media_type.encode():
        text = f"the content type is '{kind.decode('latin-1')}'; send {TranslationRequest.media_type}"
        raise ApiError(415, text, code="unsupported_content_type")
    if not options.get(b"boundary"):
        raise _no_form("its content type has no boundary")
    return options[b"boundary"]


async def _chunks(request: Request, seconds: float) -> AsyncIterator[bytes]:
    """The body's pieces, each of which must come within so many seconds."""
    stream = request.stream()
    while True:
        async with asyncio.timeout(seconds):
            chunk = await anext(stream, None)
        if chunk is None:
            return
        yield chunk


class _Form:
    """The parts of a body that is written to it piece by piece."""

    def __init__(self, boundary: bytes, file: BinaryIO, most: int, hold: Callable[[int], None]) -> None:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header

        self._fault, self._options = FormParserError, parse_options_header
        self._file, self._most, self._hold = file, most, hold
        self._name, self._header = "", b""
        self._headers, self._value = dict[bytes, bytes](), bytearray()
        self._header_bytes = 0
        self._bytes, self._parts, self._ended = 0, 0, False
        self._values = dict[str, list[str]]()
        self.has_file, self.filename = False, ""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_begin": self._headers_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _no_form(str(error)) from None

    @property
    def fields(self) -> dict[str, str | list[str]]:
        """Those that came once as texts, the others as lists."""
        return {name: found[0] if len(found) == 1 else found for name, found in self._values.items()}

    def write(self, chunk: bytes) -> None:
        """Parse a chunk; raises `ApiError` (400) for a malformed form."""
        try:
            self._parser.write(chunk)
        except self._fault as error:
            raise _no_form(str(error)) from None

    def end(self) -> None:
        """Raises `ApiError` (400) where the last part has no end."""
        if not self._ended:
            raise _no_form("it breaks off")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > FIELDS:
            raise _no_form(f"more than {FIELDS} fields")
        self._name, self._headers, self._value = "", {}, bytearray()
        self._header_bytes = 0

    def _headers_begin(self) -> None:
        self._header = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header += data[start:end].lower()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._headers[self._header] = self._headers.get(self._header, b"") + data[start:end]

    def _count_header(self, count: int) -> None:
        """Bound a part's headers: older versions of the parser do not, and each piece copies what came before."""
        self._header_bytes += count
        if self._header_bytes > PART_HEADER_BYTES:
            raise _no_form(f"a part has more than {PART_HEADER_BYTES} bytes of headers")

    def _on_headers(self) -> None:
        _, options = self._options(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if not self._name:
            raise _no_form("a part without a name")
        if b"filename" in options and self._name != FILE:
            raise invalid(f"'{self._name}' is a file; the file is '{FILE}'", self._name, "unknown_parameter")
        if self._name == FILE:
            if self.has_file:
                raise invalid(f"'{FILE}' is given twice", FILE)
            self.has_file = True
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._hold(end - start)
            self._file.write(data[start:end])
            return
        self._bytes += end - start
        if self._bytes > self._most:
            raise invalid(f"the fields beside '{FILE}' have more than {self._most} bytes", self._name)
        self._value += data[start:end]

    def _on_part_end(self) -> None:
        if self._name == FILE:
            return
        try:
            value = self._value.decode()
        except UnicodeDecodeError:
            raise invalid(f"'{self._name}' is no UTF-8", self._name) from None
        name = self._name.removesuffix("[]")
        self._values.setdefault(name, []).append(value)

    def _on_end(self) -> None:
        self._ended = True


def _no_form(why: str) -> ApiError:
    return invalid(f"the body is no form that can be read: {why}", code="invalid_form")


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413, f"the upload has more than {limits.upload_bytes} bytes, which is the most", code="body_too_large"
    )
