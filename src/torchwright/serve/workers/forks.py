"""A process that forks another for each job, so that a job can be ended at any place and leaves no memory behind.

`python -m MODULE FD FACTS`: what every job needs is loaded once, and found by each in shared memory. FD is a
socket whose messages bring a job's two sockets and its limits. The job reads its input from the first, to the end, and
writes its answer there; the second gets its exit code, and ends the job when it is closed at the other end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torchwright.core.process.orphans import be_killed_first, die_with_parent

LIMITS = struct.Struct("<dQB")
"""Limits of a job: seconds of processor time, bytes beyond its initial memory, and its niceness."""
CODE = struct.Struct("<i")
"""An exit code, negative for a signal."""
READY = b"r"
FAULT, OUT_OF_MEMORY = 1, 2
"""Exit codes of a job that raised, and of one that wanted more memory than it may have."""
NICE = 10
"""By how much jobs give way, usually: for the engine and the HTTP process somebody waits token by token."""
CHUNK = 1 << 20


def main(arguments: list[str], load: Callable[..., Callable[[bytes], bytes]]) -> None:
    """The process: `load` is given the FACTS and returns what does one job."""
    channel, facts = socket.socket(fileno=int(arguments[0])), arguments[1]
    do = load(*json.loads(facts))
    gc.collect()
    gc.freeze()  # a collection in a job would touch, and so copy, every page
    channel.send(READY)
    _Server(channel, do).run()


class _Server:
    def __init__(self, channel: socket.socket, do: Callable[[bytes], bytes]) -> None:
        self._channel, self._do = channel, do
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._jobs: dict[int, tuple[int, int, socket.socket]] = {}
        """(id, descriptor, socket for the exit code) of a job's process, by the descriptor and by the socket's."""

    def run(self) -> None:
        """Until the other end is closed; the jobs end with this process."""
        while True:
            ready, _ = self._poll.poll()[0]  # one at a time: what is done for it changes which there are
            if ready in self._jobs:
                self._look_after(ready)
            elif not self._begin():
                return

    def _begin(self) -> bool:
        """Fork for the next job; False at the end."""
        message, sockets, _, _ = socket.recv_fds(self._channel, LIMITS.size, 2)
        if not message:
            return False
        data, status_socket = (socket.socket(fileno=descriptor) for descriptor in sockets)
        server = os.getpid()
        pid = os.fork()
        if not pid:
            self._channel.close()
            for _, _, other in self._jobs.values():
                other.close()
            status_socket.close()
            _work(self._do, data, server, *LIMITS.unpack(message))
        data.close()
        job = pid, os.pidfd_open(pid), status_socket
        for descriptor, events in (
            (job[1], select.POLLIN),
            (status_socket.fileno(), 0),
        ):  # a hang-up is always reported
            self._jobs[descriptor] = job
            self._poll.register(descriptor, events)
        return True

    def _look_after(self, ready: int) -> None:
        """A job has ended, or nobody waits for it any more."""
        pid, process, status_socket = self._jobs[ready]
        if ready == status_socket.fileno():
            signal.pidfd_send_signal(process, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        for descriptor in (process, status_socket.fileno()):
            self._poll.unregister(descriptor)
            del self._jobs[descriptor]
        os.close(process)
        with status_socket, contextlib.suppress(OSError):  # nobody may wait any more
            status_socket.send(
                CODE.pack(os.waitstatus_to_exitcode(status)), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            )


def limit(seconds: float, memory: int) -> None:
    """Have this process end after so much processor time, and fail to take more memory beyond its present."""
    import resource

    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def within_limits(do: Callable[[], object], seconds: float, memory: int) -> bool:
    """Do something in a fork that is thrown away; return whether it came to its end without an exception."""
    pid = os.fork()
    if not pid:
        code = FAULT
        try:
            limit(seconds, memory)
            do()
            code = 0
        except BaseException:
            code = FAULT
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _work(
    do: Callable[[bytes], bytes], data: socket.socket, server: int, seconds: float, memory: int, nice: int
) -> NoReturn:
    """In the child: one job, and never a return into the server's own lines."""
    code = FAULT
    try:
        die_with_parent(server)
        be_killed_first()
        os.nice(nice)
        limit(seconds, memory)
        data.sendall(do(_read(data)))
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _read(data: socket.socket) -> bytes:
    parts: list[bytes] = []
    while part := data.recv(CHUNK):
        parts.append(part)
    return b"".join(parts)
