"""Standard output and error in any encoding: a character that the encoding lacks is written in ASCII.

Python raises UnicodeEncodeError for `→` under `PYTHONIOENCODING=latin-1` or a C locale without UTF-8 mode.
"""

from __future__ import annotations

import codecs
import io
import sys

from torchwright.report.ascii import to_ascii

HANDLER = "torchwright.ascii"
PLAIN = "torchwright_ascii"
"""ASCII under another name: click writes UTF-8 to a stream whose encoding is called ASCII."""


def tolerate_encodings() -> None:
    """Let `sys.stdout` and `sys.stderr` replace what their encodings lack. Call this once, in the command itself."""
    codecs.register_error(HANDLER, _replace)
    codecs.register(_find)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            plain = codecs.lookup(stream.encoding).name == "ascii"
            stream.reconfigure(encoding=PLAIN if plain else stream.encoding, errors=HANDLER)


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle one character. A byte of a file name that Python could not decode is written as that byte."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return to_ascii(character), error.start + 1


def _find(name: str) -> codecs.CodecInfo | None:
    if name != PLAIN:
        return None
    plain = codecs.lookup("ascii")
    return codecs.CodecInfo(
        plain.encode,
        plain.decode,
        plain.streamreader,
        plain.streamwriter,
        plain.incrementalencoder,
        plain.incrementaldecoder,
        name=PLAIN,
    )
