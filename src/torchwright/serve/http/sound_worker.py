"""The process that reads sound files: `python -m torchwright.serve.http.sound_worker FD FACTS` (`forks.py`).

Files are untrusted and may crash the libraries that read them, so each file has a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import msgspec

from torchwright.core.errors import TorchwrightError
from torchwright.models.speech.sound import BLOCK, RATE, opened
from torchwright.models.speech.sound_error import SoundError
from torchwright.serve.workers import forks


class SoundJob(msgspec.Struct, frozen=True):
    """A sound file, and where its samples shall be: mono float32 at 16 kHz."""

    path: str
    samples: str


class SoundRead(msgspec.Struct, frozen=True):
    """The number of bytes of samples and notices for the user, or what is wrong with the file."""

    bytes: int = 0
    notices: tuple[str, ...] = ()
    fault: str | None = None


def load(most_seconds: int) -> Callable[[bytes], bytes]:
    """Return the reader of sounds up to `most_seconds`: a `SoundJob` in MessagePack to a `SoundRead`."""
    for package in ("soundfile", "soxr", "av"):  # once, and not in every job
        if find_spec(package) is not None:
            import_module(package)

    def read(data: bytes) -> bytes:
        job = msgspec.msgpack.decode(data, type=SoundJob)
        try:
            return msgspec.msgpack.encode(_write(job, most_seconds))
        except TorchwrightError as error:
            return msgspec.msgpack.encode(SoundRead(fault=str(error)))

    return read


def _write(job: SoundJob, most_seconds: int) -> SoundRead:
    """Write the samples; raises `SoundError` for what cannot be read or is too long."""
    done, most = 0, most_seconds * RATE
    with opened(job.path, until_fault=True) as sound, Path(job.samples).open("wb") as file:
        while len(block := sound.window(done, BLOCK)):
            done += len(block)
            if done > most or (sound.seconds or 0) > most_seconds:
                raise SoundError("the sound is too long", allowed=f"{most_seconds} seconds")
            file.write(block.tobytes())
        if sound.fault is not None:
            raise sound.fault
        notices = tuple(sound.notices)
    if not done:
        raise SoundError("the sound is empty", found="0 samples")
    return SoundRead(done * block.itemsize, notices)


if __name__ == "__main__":
    forks.main(sys.argv[1:], load)
