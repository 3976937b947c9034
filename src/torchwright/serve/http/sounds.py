"""Uploaded sounds: a bounded number of them, in temporary files that go with their requests."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from torchwright.core.process import folders
from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.http.sound_worker import SoundJob, SoundRead
from torchwright.serve.limits import Limits
from torchwright.serve.workers.pool import Unfinished, Workers, WorkLimits


class Sounds:
    """The place of a server's temporary files. `close` it at the end."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._folder = folders.make_temporary()  # of mode 0700; what a server that was killed left goes first
        self.open = 0
        self.held_bytes = 0
        self.workers = Workers(
            "torchwright.serve.http.sound_worker",
            [limits.sound_seconds],
            WorkLimits(
                seconds=limits.sound_read_seconds,
                memory_bytes=limits.sound_memory_bytes,
                waiting=limits.sounds,
            ),
        )

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[SoundUpload]:
        """A folder for one request; raises `ApiError` (429) where there are too many."""
        if self.open >= self._limits.sounds:
            raise _full(f"{self.open} sounds are being transcribed")
        self.open += 1
        place = SoundUpload(self, Path(tempfile.mkdtemp(dir=self._folder.path)))
        try:
            yield place
        finally:
            place.remove()
            self.open -= 1

    def hold(self, count: int) -> None:
        """Account for bytes on the disk; raises `ApiError` (429) where there are too many."""
        if self.held_bytes + count > self._limits.sounds_bytes:
            raise _full("the sounds that are being transcribed take too much room")
        self.held_bytes += count

    async def close(self) -> None:
        """End the process that reads them, and remove everything."""
        await self.workers.close()
        self._folder.remove()


class SoundUpload:
    """One request's upload and its samples."""

    def __init__(self, sounds: Sounds, folder: Path) -> None:
        self._sounds, self._folder, self._held = sounds, folder, 0
        self.upload, self.samples = folder / "file", folder / "samples"

    def hold(self, count: int) -> None:
        """Account for bytes before they are written."""
        self._sounds.hold(count)
        self._held += count

    async def read(self) -> tuple[str, ...]:
        """Turn the upload, which goes, into samples. Returns what the client should know of the sound.

        Raises `ApiError` (400) with what is wrong with it.
        """
        job = msgspec.msgpack.encode(SoundJob(str(self.upload), str(self.samples)))
        try:
            answer = await self._sounds.workers.run(job)
        except Unfinished as unfinished:
            raise invalid(f"the sound cannot be read: {unfinished}", "file", "request_limit") from None
        found = msgspec.msgpack.decode(answer, type=SoundRead)
        if found.fault is not None:
            raise invalid(found.fault, "file", "invalid_audio")
        self.upload.unlink()
        self._release()
        self.hold(found.bytes)
        return found.notices

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        self._sounds.held_bytes -= self._held
        self._held = 0


def _full(text: str) -> ApiError:
    return ApiError(429, text, code="queue_full", headers={"Retry-After": "1"})
