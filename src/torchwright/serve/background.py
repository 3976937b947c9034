"""`torchwright serve --wait-ready`: the server goes on in the background; the command ends when it takes requests."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchwright.core.escapes import escaped
from torchwright.core.paths import cache_folder
from torchwright.core.process.files import open_own

POLL_SECONDS = 0.05


def in_background(
    listening: socket.socket, url: str, say: Callable[[str], None], path: str = "/ready"
) -> int | None:
    """None in a new process, which is to serve; in the one that called, the exit code, once the other is ready.

    `say` is given the URL and the process id then, and nothing else. The server is ready when `path` says 200.
    """
    host, port = listening.getsockname()[:2]
    log = cache_folder() / "serve" / f"{port}.log"
    process = _detached(log)
    if process is None:
        return None
    listening.close()  # or it would go on to take connections for a server that has ended
    code = _wait(process, host, port, path, log)
    if not code:
        say(f"{url} {process}")
    return code


def _detached(log: Path) -> int | None:
    """Go on as a process of its own that writes to `log`: None in that process, and its id in the one that called."""
    sys.stdout.flush()
    sys.stderr.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    if pid := os.fork():
        return pid
    os.setsid()
    written = open_own(log, os.O_WRONLY | os.O_TRUNC, 0o600)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(descriptor, target)
    return None


def _wait(pid: int, host: str, port: int, path: str, log: Path) -> int:
    """Wait for the server of a process: 0 when it takes requests. Where it ends, say its log, and return its exit code.

    Whatever interrupts the wait ends the server.
    """
    try:
        while not _takes_requests(host, port, path):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                sys.stderr.write(escaped(log.read_text("utf-8", "replace")))
                return max(1, os.waitstatus_to_exitcode(status))
            time.sleep(POLL_SECONDS)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        raise
    return 0


def _takes_requests(host: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
