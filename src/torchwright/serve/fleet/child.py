"""A child process of the fleet: its output is passed on line by line, with its name in front."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchwright.core import system
from torchwright.core.process.waited import exit_code
from torchwright.serve.log import one_line

Relay = Callable[[str, str], None]
"""Called with the child's name and one of its lines, in a thread of the child's."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""Colors, which the gateway writes to a pipe as well."""
READ_BYTES = 64 * 1024
MOST_BYTES = 1024 * 1024
"""A line longer than that is passed on in pieces."""
LAST_LINES_SECONDS = 1.0
"""Time for the last lines of a child that has ended; what it has started may hold its pipe open."""


@dataclass
class Child:
    """A running child. A thread reads its output, another waits for its end, whoever else holds its pipe."""

    name: str
    process: subprocess.Popen[bytes]
    _reading: threading.Thread

    @classmethod
    def start(
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

        Secrets go this way: other users see a command line, and nobody else an input. The child has a session of its
        own, because Ctrl-C is for the fleet, which then drains. To be called in the thread that lives as long as the
        fleet: Linux ends a child with the thread that started it.
        """
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=files,
            **system.apart(),
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:  # one that has ended already says why
            process.stdin.write(given)
        reading = threading.Thread(
            target=_read, args=(name, process, relay), name=f"read {name}", daemon=True
        )
        reading.start()
        return cls(name, process, reading)

    async def ended(self) -> int:
        """Return the exit code once the process has ended and its last line was passed on; end what it has started."""
        return await exit_code(self.process, thread=f"wait {self.name}", finish=self._finish)

    def _finish(self) -> None:
        self.kill()
        self._reading.join(LAST_LINES_SECONDS)

    def ask_to_end(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        """End it and what it has started."""
        system.kill_all(self.process)


def _read(name: str, process: subprocess.Popen[bytes], relay: Relay) -> None:
    assert process.stdout is not None
    held = b""
    with process.stdout:
        while piece := os.read(process.stdout.fileno(), READ_BYTES):
            *lines, held = (held + piece).split(b"\n")
            if len(held) > MOST_BYTES:
                lines, held = [*lines, held], b""
            for line in lines:
                relay(name, _plain(line))
    if held:
        relay(name, _plain(held))


def _plain(line: bytes) -> str:
    return one_line(STYLE.sub("", line.decode("utf-8", "replace")).rstrip("\r"))
