"""`torchwright transcribe --live`: raw samples from standard input, text as it settles."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchwright.cli.printing import say
from torchwright.core.errors import WorkloadError

if TYPE_CHECKING:
    from torchwright.models.speech.base import Recognizer

SAMPLE_BYTES = 2
BLOCK_BYTES = 8192
"""Read at once: a quarter of a second."""
WAITING = 2400
"""Blocks that wait at most, ten minutes; a machine that is further behind stops reading."""


def listen(recognizer: Recognizer, *, quiet: bool = False, **options: Any) -> None:
    """Print what is said on standard input until it ends; what has not settled is printed then, or at Ctrl-C.

    Where nothing was said, one line on standard error says what was heard instead, unless `quiet`.

    Raises `WorkloadError` for a model without live transcription, and for input that is not raw sound.
    """
    import numpy as np

    from torchwright.models.speech.live import STEP_SECONDS, Live
    from torchwright.models.speech.sound import RATE

    if sys.stdin.isatty():
        raise WorkloadError(
            "--live reads samples from standard input, which is a terminal",
            next="arecord -t raw -f S16_LE -r 16000 | torchwright transcribe --live --model DIR",
        )
    live, rest = Live(recognizer, **options), b""
    try:
        for data in _blocks(round(STEP_SECONDS * RATE) * SAMPLE_BYTES):
            data = rest + data
            whole = len(data) // SAMPLE_BYTES * SAMPLE_BYTES
            rest = data[whole:]
            _print(live.hear(np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768))
    finally:
        _print(live.rest())
        if live.instead is not None and not quiet:
            say(f"torchwright: no speech in standard input: {live.instead}", err=True)
    if rest:
        raise WorkloadError("standard input ends within a sample", found="an odd number of bytes")


def _blocks(least: int) -> Iterator[bytes]:
    """Yield received input whenever `least` bytes have come, and at the end; a thread reads meanwhile."""
    waiting = queue.Queue[bytes](WAITING)

    def read() -> None:
        while data := os.read(sys.stdin.fileno(), BLOCK_BYTES):
            waiting.put(data)
        waiting.put(b"")

    threading.Thread(target=read, name="read-sound", daemon=True).start()
    held, first = b"", True
    while data := waiting.get():
        held += data
        if first and len(held) >= 4:
            first = False
            if held[:4] == b"RIFF":
                raise WorkloadError(
                    "standard input is a WAV file, not raw samples",
                    next="give the file's name without --live",
                )
        if len(held) >= least and waiting.empty():
            yield held
            held = b""
    if held:
        yield held


def _print(text: str) -> None:
    if text:
        say(text)
