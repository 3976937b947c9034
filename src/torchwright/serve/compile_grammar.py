"""Grammars on their way to the engine: compiled in a process of their own, within limits, and remembered by content."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Literal

import msgspec

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import MIB, Limits
from torchwright.serve.messages import Ready

log = logging.getLogger("torchwright.serve")

REMEMBERED_BYTES = 64 * MIB
START_SECONDS = 60.0
HEADER = struct.Struct("<I")
"""The length of a frame."""
WHITESPACE = 24
"""Characters of white space between two parts of JSON at most, so that a weak model cannot write it for ever."""
Kind = Literal["json", "regex", "choice", "grammar", "tools"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar to be compiled; `text` is a schema, regex, list of texts (JSON), EBNF or structural tag (tools)."""

    kind: Kind
    text: str


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled grammar as JSON, or why there is none."""

    json: str | None = None
    fault: str | None = None


class GrammarCompiler:
    """One worker process, started when it is first needed, killed when a grammar takes too long."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[Job, Compiled] = OrderedDict()
        self._known_bytes = 0
        self._running: set[asyncio.Task[Compiled]] = set()

    async def compile(self, job: Job, ready: Ready, param: str) -> str:
        """The compiled grammar as JSON; `param` names the request's field in errors.

        Raises `ApiError`: 400 for a grammar that is wrong, too large or too slow, 429 when too many wait.
        """
        limits = self._limits
        size = len(job.text.encode())
        if size > limits.grammar_bytes:
            raise invalid(
                f"'{param}' has {size} bytes; at most {limits.grammar_bytes} are compiled",
                param,
                "grammar_limit",
            )
        if not ready.stop_ids:
            raise invalid(
                f"'{param}' needs a model that names an end-of-text token", param, "unsupported_parameter"
            )
        found = self._known.get(job)
        if found is None:
            if self._waiting >= limits.grammars_waiting:
                raise ApiError(429, "too many grammars wait to be compiled", headers={"Retry-After": "1"})
            # A client that leaves must not disturb the exchange with the worker.
            task = asyncio.create_task(self._compile(job, ready))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            found = await asyncio.shield(task)
        if found.json is None:
            raise invalid(f"'{param}' cannot be used: {found.fault}", param, "invalid_grammar")
        return found.json

    async def warm(self, ready: Ready) -> None:
        """Start the worker, so that the first request does not wait for it."""
        async with self._turn:
            await self._started(ready)

    async def close(self) -> None:
        """End the worker."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _compile(self, job: Job, ready: Ready) -> Compiled:
        self._waiting += 1
        try:
            async with self._turn:
                if (found := self._known.get(job)) is None:
                    found = await self._exchange(job, ready)
                    self._remember(job, found)
                return found
        finally:
            self._waiting -= 1

    async def _exchange(self, job: Job, ready: Ready) -> Compiled:
        seconds = self._limits.grammar_seconds
        process = await self._started(ready)
        try:
            async with asyncio.timeout(seconds):
                answer = await _answer(process, msgspec.msgpack.encode(job))
        except TimeoutError:
            await self.close()
            return Compiled(fault=f"it takes longer than {seconds:g} s to compile")
        except (asyncio.IncompleteReadError, ConnectionError):
            log.warning("the grammar worker ended while it compiled a grammar of kind %s", job.kind)
            await self.close()
            return Compiled(fault="it takes more memory than a grammar may")
        compiled = msgspec.msgpack.decode(answer, type=Compiled)
        size = len(compiled.json or "")
        if size > self._limits.grammar_compiled_bytes:
            most = self._limits.grammar_compiled_bytes
            return Compiled(fault=f"compiled it has {size} bytes, and at most {most} are taken")
        return compiled

    async def _started(self, ready: Ready) -> asyncio.subprocess.Process:
        """The worker, ready for a grammar."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        facts = [str(self._folder), ready.vocabulary, ready.stop_ids, self._limits.grammar_memory_bytes]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "torchwright.serve.grammar_worker",
            json.dumps(facts),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the server, which ends its workers itself
        )
        probe = msgspec.msgpack.encode(Job(kind="choice", text='["a"]'))
        try:
            async with asyncio.timeout(START_SECONDS):
                await _answer(self._process, probe)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await self.close()
            raise ApiError(500, "grammars cannot be compiled now: the worker did not start") from error
        return self._process

    def _remember(self, job: Job, compiled: Compiled) -> None:
        """Faults are remembered too, so that a grammar that is too slow is slow once."""
        self._known[job] = compiled
        self._known_bytes += _bytes(job, compiled)
        while self._known_bytes > REMEMBERED_BYTES:
            self._known_bytes -= _bytes(*self._known.popitem(last=False))


async def _answer(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(HEADER.pack(len(frame)) + frame)
    await process.stdin.drain()
    (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return await process.stdout.readexactly(length)


def _bytes(job: Job, compiled: Compiled) -> int:
    return len(job.text) + len(compiled.json or compiled.fault or "")
