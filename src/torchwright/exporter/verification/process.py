# pyright: basic
"""Our end of the process that runs a package."""

from __future__ import annotations

import json
import re
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any, Self

from torchwright.core import system
from torchwright.core.process import interrupts
from torchwright.optimization.trial.fork_server import start

SECONDS = 300.0
"""The time limit in seconds."""
COMPLAINT = re.compile(
    r"^\[(?!cpuinfo)[\w.]+:\d+\] (.*(?:not found|[Cc]heck failed|[Uu]nsupported|[Ff]ailed).*)$", re.MULTILINE
)
"""A line of ExecuTorch's log that says what is wrong."""
LONGEST = 300
"""The most characters of an error's text."""


class RunFailed(Exception):
    """The process crashed, hung, or could not open the package: the reason, in words."""


class Runner:
    """A package in a process of its own, or with `reference` the graph it was made from.

    With `artifact` it is Torchwright's own, as `tw.load` runs it, in the calls of the package.
    """

    def __init__(
        self, folder: Path, scratch: Path, *, reference: bool = False, artifact: Path | None = None
    ) -> None:
        self.scratch = scratch
        self._log = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
        ours, theirs = socket.socketpair()
        try:
            self._process = start("torchwright.exporter.verification.worker", theirs, self._log)
            self._connection = system.connection(ours)
        finally:
            ours.close()
            theirs.close()
        try:
            self.load_seconds: float = self.ask(
                "open",
                folder=str(folder),
                reference=reference,
                artifact=None if artifact is None else str(artifact),
            )["seconds"]
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, *, within: float = SECONDS, **arguments: Any) -> dict[str, Any]:
        """Return the answer. Raises `RunFailed` after a crash, or `within` seconds."""
        interrupts.check()
        try:
            self._connection.send_bytes(json.dumps({"do": what, **arguments}).encode())
            if not interrupts.answered(self._connection, within):
                raise RunFailed(f"not done after {within:.0f} s")
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise RunFailed(self._death()) from error
        for kind in ("failed", "refused"):
            if kind in answer and (reason := self._complaint()):
                answer[kind] = f"{answer[kind]} ({reason})"
        if "failed" in answer:
            raise RunFailed(answer["failed"])
        return answer

    def _complaint(self) -> str:
        """Return what the runtime has logged of its last failure: its error has a number alone (ExecuTorch)."""
        self._log.seek(0)
        said = COMPLAINT.findall(self._log.read().decode("utf-8", "replace"))
        return said[0][:LONGEST] if said else ""

    def close(self) -> None:
        system.kill_all(self._process)
        self._process.wait()
        self._connection.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _death(self) -> str:
        code = self._process.wait(10)
        return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
