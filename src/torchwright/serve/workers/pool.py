"""Work that would hold the loop, in processes that can be ended: a bounded number at once, and the slow ones apart.

workers = Workers("torchwright.serve.http.read_worker", [folder], WorkLimits(seconds=5.0))
answer = await workers.run(job)

A job first gets `quick_seconds` of processor time in one of several places. One that needs more begins again in a place
that only slow ones wait for. It delays the others by no more than that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from dataclasses import dataclass
from typing import Any

from torchwright.core.process.orphans import bound_command
from torchwright.serve.api_error import ApiError, unavailable
from torchwright.serve.limits import MIB
from torchwright.serve.workers.forks import CHUNK, CODE, FAULT, LIMITS, NICE, READY

log = logging.getLogger("torchwright.serve")

QUICK_SECONDS = 0.5
QUICK_PLACES, SLOW_PLACES = 2, 1
SLOW_WAITING = 8
"""Slow jobs that wait; each may take seconds."""
START_SECONDS = 60.0
LARGE = 4 * MIB
"""Bytes of an answer whose copy would hold the loop for milliseconds."""
WALL_SECONDS = 60.0
"""A job has so long in all; its limit is of processor time, which on a busy machine takes longer to get."""


class Unfinished(Exception):
    """A job was ended before it had its answer; the text says which limit it reached."""


@dataclass(frozen=True, kw_only=True)
class WorkLimits:
    """The limits on jobs of one kind."""

    seconds: float
    """Seconds of processor time."""
    quick_seconds: float = QUICK_SECONDS
    """The first part of that time, in a place for quick jobs."""
    memory_bytes: int = 1024 * MIB
    """Beyond what every job begins with."""
    waiting: int = 32
    """Jobs that wait; the next is a 429."""


class Workers:
    """A process that forks one for each job, started when it is first needed, and the queues before it."""

    def __init__(self, module: str, facts: list[Any], limits: WorkLimits) -> None:
        self._module, self._facts, self._limits = module, facts, limits
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._quick = asyncio.Semaphore(QUICK_PLACES)
        self._slow = asyncio.Semaphore(SLOW_PLACES)
        self._waiting = self._slow_waiting = 0

    async def run(self, job: bytes, *, waiting: int | None = None, nice: int = NICE) -> bytes:
        """Return a job's answer; `waiting` replaces the limit of jobs that wait, `nice` is the job's.

        Raises `Unfinished` for one that takes too much time or memory, and `ApiError`: 429 when too many wait, 500 for
        a fault.
        """
        limits = self._limits
        if self._waiting >= (limits.waiting if waiting is None else waiting):
            raise _too_many(self._waiting)
        self._waiting += 1
        try:
            async with self._quick:
                answer = await self._fork(job, min(limits.quick_seconds, limits.seconds), nice)
            if answer is None and limits.seconds > limits.quick_seconds:
                answer = await self._run_slow(job)
        finally:
            self._waiting -= 1
        if answer is None:
            raise Unfinished(f"it takes longer than {limits.seconds:g} s of processor time")
        return answer

    async def start(self) -> None:
        """Start the process, so that the first job does not wait for it; raises `ApiError` where it does not start."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            await self.close()
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel.setblocking(False)
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *bound_command(self._module, str(theirs.fileno()), json.dumps(self._facts)),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the server, which ends its workers itself
                )
            try:
                async with asyncio.timeout(START_SECONDS):
                    said = await asyncio.get_running_loop().sock_recv(self._channel, len(READY))
            except (TimeoutError, OSError):
                said = b""
            if said != READY:
                await self.close()
                raise ApiError(500, f"the process {self._module} did not start")

    async def close(self) -> None:
        """End the process and its jobs."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _run_slow(self, job: bytes) -> bytes | None:
        if self._slow_waiting >= SLOW_WAITING:
            raise _too_many(self._slow_waiting)
        self._slow_waiting += 1
        try:
            async with self._slow:
                return await self._fork(job, self._limits.seconds, NICE)
        finally:
            self._slow_waiting -= 1

    async def _fork(self, job: bytes, seconds: float, nice: int) -> bytes | None:
        """The answer of a process that is given a job and so much processor time; None when that was too little."""
        await self.start()
        assert self._channel is not None
        data, theirs = socket.socketpair()
        status_socket, status_writer = socket.socketpair()
        with data, status_socket:
            try:
                with theirs, status_writer:
                    limits = LIMITS.pack(seconds, self._limits.memory_bytes, nice)
                    socket.send_fds(self._channel, [limits], [theirs.fileno(), status_writer.fileno()])
                async with asyncio.timeout(WALL_SECONDS):
                    answer, code = await _exchange(data, status_socket, job)
            except TimeoutError:
                return None
            except OSError:
                code = None
        if code == 0:
            return answer
        if code == -signal.SIGPROF:
            return None
        log.warning("a job of %s ended with the code %s", self._module, code)
        if code is None:
            await self.close()
            raise unavailable("the process that reads requests has ended, and is started again")
        if code == FAULT:
            raise ApiError(500, "a fault in the server; its log has the traceback", code="internal_error")
        raise Unfinished(f"it takes more memory than {self._limits.memory_bytes} bytes")


async def _exchange(data: socket.socket, status_socket: socket.socket, job: bytes) -> tuple[bytes, int]:
    """(the answer, the exit code) of a job's process; raises `ConnectionError` where the server has ended too."""
    loop = asyncio.get_running_loop()
    for ours in (data, status_socket):
        ours.setblocking(False)
    parts: list[bytes] = []
    try:
        await loop.sock_sendall(data, job)
        data.shutdown(socket.SHUT_WR)
        while part := await loop.sock_recv(data, CHUNK):
            parts.append(part)
    except ConnectionError:
        pass  # its exit code says why it did not read or write to the end
    code = await loop.sock_recv(status_socket, CODE.size)
    if not code:
        raise ConnectionResetError
    # A large picture's 76 MB are joined in a thread, where `join` lets go of the interpreter's lock.
    large = sum(map(len, parts)) > LARGE
    answer = await asyncio.to_thread(b"".join, parts) if large else b"".join(parts)
    return answer, CODE.unpack(code)[0]


def _too_many(waiting: int) -> ApiError:
    return ApiError(
        429,
        f"{waiting} requests wait to be read; come again",
        code="queue_full",
        headers={"Retry-After": "1"},
    )
