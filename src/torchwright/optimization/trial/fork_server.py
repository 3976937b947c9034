# pyright: basic
"""Trials without a start: a process that holds what every trial begins with, and forks one for each.

Importing torch, its compiler and a model's code takes four seconds, a trial of a small change less than one. The
server runs no operator, so it has no OpenMP threads that a fork would lose; a trial finds what a new process would have
after the same lines, and shares its memory until it writes there.

Started as `python -m torchwright.optimization.trial.fork_server FD PARENT`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torchwright.core import system
from torchwright.core.process import interrupts
from torchwright.core.process.orphans import die_with_parent
from torchwright.hardware.devices import devices

REAP_SECONDS = 10.0
"""A killed process has ended by then, and a server that has nothing else to do has answered."""


def can_fork(device: str) -> bool:
    """Check whether trials on `device` may be forked; macOS's libraries do not survive it."""
    return system.forks() and devices.get(device).forks


def start(
    module: str, connection: socket.socket, log: BinaryIO, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`python -m MODULE FD PARENT`, which answers on `connection` and writes what it prints to `log`.

    It finds this package even where that is run from a checkout.
    """
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    process: subprocess.Popen[bytes] = subprocess.Popen(
        [sys.executable, "-m", module, str(connection.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": path} | dict(environment or {}),
        **system.handing([connection]),
        **system.apart(),
    )
    return process


class ForkServer:
    """Our end of the server. Every method raises `EOFError` or `ConnectionError` when it has ended."""

    def __init__(self, workload: Path, scratch: Path) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
        self._process = start("torchwright.optimization.trial.fork_server", theirs, self._log)
        theirs.close()
        self._socket = ours
        self._connection = system.connection(ours)
        self._has_answered = False
        try:
            self._connection.send_bytes(pickle.dumps({"workload": str(workload), "path": sys.path}))
        except BaseException:
            self.close()
            raise

    def fork(
        self, connection: socket.socket, log: BinaryIO, seconds: float, *, slowdown: float = 1.0
    ) -> Forked:
        """Fork a trial's process that answers on `connection` and writes what it prints to `log`.

        Raises `TimeoutError` after `seconds`, and ends the server: it would answer the next request with what this one
        asked for. With the server end the processes that it has forked, the original's among them. So a server that
        has forked before has `REAP_SECONDS` at least, times the machine's `slowdown`.
        """
        self._connection.send_bytes(pickle.dumps(("fork", None)))
        socket.send_fds(self._socket, [b"."], [connection.fileno(), log.fileno()])
        if not interrupts.answered(
            self._connection, max(seconds, REAP_SECONDS * slowdown if self._has_answered else 0.0)
        ):
            self.close()
            raise TimeoutError
        pid = pickle.loads(self._connection.recv_bytes())
        self._has_answered = True
        return Forked(self, pid)

    def wait(self, pid: int, seconds: float) -> int | None:
        """The exit code of a trial's process, as `subprocess` gives it, or None when it has not ended by then."""
        try:
            self._connection.send_bytes(pickle.dumps(("wait", (pid, seconds))))
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # it has ended, and all that it forked with it
            return system.KILLED

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it, and with it every process that it forked."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._socket.close()
        self._log.close()


class Forked:
    """A process that the server forked, with the two things that one asks of a `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, also when asked again; raises `subprocess.TimeoutExpired`."""
        seconds = REAP_SECONDS if timeout is None else timeout
        if self._code is None:  # the server can wait for a process once
            self._code = self._server.wait(self.pid, seconds)
        if self._code is None:
            raise subprocess.TimeoutExpired("a trial", seconds)
        return self._code


def serve(channel: socket.socket) -> None:
    """The server's own end: answer requests until the parent hangs up."""
    connection = system.connection(channel)
    session = _prepared(**pickle.loads(connection.recv_bytes()))
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    while True:
        try:
            request, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if request == "wait":
            connection.send_bytes(pickle.dumps(_reap(*arguments)))
            continue
        _, [ours, log], _, _ = socket.recv_fds(channel, 1, 2)
        server = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: BLAS libraries have some once imported, and bring them back themselves.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            channel.close()
            connection.close()
            _run_trial(session, server, ours, log)
        with contextlib.suppress(OSError):  # it may have ended already
            os.setpgid(pid, pid)
        os.close(ours)
        os.close(log)
        connection.send_bytes(pickle.dumps(pid))


def _prepared(*, workload: str, path: list[str]) -> Any:
    import torch

    torch.set_num_threads(1)  # copying a tensor would start threads, of which a child knows and has none
    import torch._inductor.compile_fx

    from torchwright.optimization.trial.session import TrialSession

    session = TrialSession()
    session.unpack(workload, path)
    return session


def _run_trial(session: Any, server: int, connection: int, log: int) -> None:
    """In the child: answer the search, and never return into the server's own lines."""
    from torchwright.optimization.trial import worker

    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        worker.work(connection, server, session)
        code = 0
    finally:
        os._exit(code)


def _reap(pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))
