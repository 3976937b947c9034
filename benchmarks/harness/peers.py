"""Contenders in processes of their own that answer lines of JSON. Only the standard library is imported.

A peer may run in another interpreter, and without torch: next to it some libraries take twice as long.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness.run import in_short, last_line

SECONDS = 300.0


class Refused(RuntimeError):
    """A peer could not do what was asked, and goes on."""


class Died(RuntimeError):
    """A peer ended, or did not answer in time."""


class Peer:
    """A process of `python -m MODULE ARGUMENT…` that calls `serve`."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        seconds: float = SECONDS,
    ) -> None:
        """Start the peer and wait for its `hello`; `seconds` is the limit of that. Raises `Died`."""
        command = [python, "-m", module, *map(str, arguments)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        try:
            self.hello = self._answer(seconds)
        except BaseException:
            self.close()
            raise

    def ask(self, *question: Any) -> Any:
        """Return the answer to a question. Raises `Refused` where the call failed, `Died` where the process did."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._died("ended") from error
        return self._answer(SECONDS)

    def close(self) -> None:
        """End the peer and the processes that it started: vLLM's workers outlive it otherwise, and go on spinning."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._process.kill()
            raise self._died(f"did not answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._died("ended")
        found = json.loads(line)
        if "refused" in found:
            raise Refused(found["refused"])
        return found["answer"]

    def _died(self, how: str) -> Died:
        status = self._process.wait()
        self._errors.seek(0)
        last = last_line(self._errors.read().decode(errors="replace"))
        return Died(f"the process {how} (status {status}): {last[:150]}")


def serve(start: Callable[[], tuple[Any, Callable[..., Any]]]) -> None:
    """Run a peer's side: `start` returns its `hello` and the function that answers questions."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print, and some below Python
    hello, answer = start()
    print(json.dumps({"answer": hello}), file=replies)
    for line in sys.stdin:
        try:
            found = {"answer": answer(*json.loads(line))}
        except Exception as error:
            found = {"refused": in_short(error)}
        print(json.dumps(found), file=replies)
    os._exit(0)  # threads that run in the background may not end by themselves


def serve_one_of(kinds: Mapping[str, Callable[[str, int], Callable[..., Any]]], *warm: Any) -> None:
    """Run a peer's side for the arguments KIND PATH THREADS; `warm` is the question that it answers first."""

    def start() -> tuple[None, Callable[..., Any]]:
        kind, path, threads = sys.argv[1:4]
        answer = kinds[kind](path, int(threads))
        answer(*warm)
        return None, answer

    serve(start)
