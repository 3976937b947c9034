"""A child process of the fleet: its output is passed on line by line, with its name in front."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchwright.core import system
from torchwright.serve.log import one_line

Relay = Callable[[str, str], None]
"""Called with the child's name and one of its lines."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""Colors, which the gateway writes to a pipe as well."""
READ_BYTES = 64 * 1024
MOST_BYTES = 1024 * 1024
"""A line longer than that is passed on in pieces."""


@dataclass
class Child:
    """A running child, and the task that reads its output until it ends."""

    name: str
    process: asyncio.subprocess.Process
    _reading: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        given: bytes,
        relay: Relay,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
    ) -> Child:
        """Start a process that reads `given` from its standard input and has the descriptors `files`.

        Secrets go this way: other users see a command line, and nobody else an input. It has a session of its own,
        because Ctrl-C is for the fleet, which then drains.
        """
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            pass_fds=files,
            **system.apart(),
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already, and its lines say why
            process.stdin.write(given)
            await process.stdin.drain()
        process.stdin.close()
        return cls(name, process, asyncio.create_task(_read(name, process, relay)))

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def ended(self) -> int:
        """Return the exit code once the process has ended and its last line was passed on."""
        code = await self.process.wait()
        with contextlib.suppress(TimeoutError):  # a process of its own may hold the pipe open
            async with asyncio.timeout(1):
                await asyncio.shield(self._reading)
        return code

    def ask_to_end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """Return an exit code of asyncio's in words."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


async def _read(name: str, process: asyncio.subprocess.Process, relay: Relay) -> None:
    assert process.stdout is not None
    held = b""
    while piece := await process.stdout.read(READ_BYTES):
        *lines, held = (held + piece).split(b"\n")
        if len(held) > MOST_BYTES:
            lines, held = [*lines, held], b""
        for line in lines:
            relay(name, _plain(line))
    if held:
        relay(name, _plain(held))


def _plain(line: bytes) -> str:
    return one_line(STYLE.sub("", line.decode("utf-8", "replace")).rstrip("\r"))
