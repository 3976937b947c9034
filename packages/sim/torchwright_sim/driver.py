"""The host's side of a device's process: launches commands, waits for them, knows when it is lost."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchwright_sim import settings, wire
from torchwright_sim.order import Order, Use

MOST_PENDING = 256
"""Commands under way before their replies are read: a reply is small, and the socket holds thousands."""
_linalg: Any = torch.linalg
_KNOWN: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    IndexError,
    TypeError,
    NotImplementedError,
    ZeroDivisionError,
    OverflowError,
    _linalg.LinAlgError,
)
ERRORS = {each.__name__: each for each in _KNOWN}
"""Errors of operators by name; others are raised as RuntimeError."""


class DeviceLost(RuntimeError):
    """The device's process is gone, with all tensors that lay on it."""


@dataclass
class _Pending:
    """A command under way, with what it needs until it is done."""

    held: Any
    """Tensors whose memory it reads or writes: it must not be used again before."""
    finish: Callable[[dict[str, Any], bytearray], None] | None
    awaited: bool = False
    """The caller waits for the reply, and takes its error; otherwise the next one that waits does."""
    error: Exception | None = None


class Link:
    """One device. Its process is started with the first command."""

    def __init__(self, index: int, chosen: settings.Settings) -> None:
        self.index = index
        self.place = f"sim:{index}"
        self.chosen = chosen
        self.base: int = torch.ops.sim._base(index)
        self.order = Order(self.place)
        self.many_streams = False
        """More than one stream was used: only then can a synchronisation be missing."""
        self._lock = threading.RLock()
        self._connection: socket.socket | None = None
        self._lost: str | None = None
        self._launched: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._failed: Exception | None = None
        self._times: dict[tuple[int, int], float] = {}
        self._default = torch.float32
        self.pid: int | None = None

    # -------------------- commands

    def launch(
        self,
        kind: str,
        header: dict[str, Any],
        payload: Any = b"",
        *,
        stream: int | None = None,
        held: Any = None,
        finish: Callable[[dict[str, Any], bytearray], None] | None = None,
    ) -> tuple[int, int]:
        """Send a command to a stream, by default the current one; returns the stream and the command's number."""
        return self._launch(kind, header, payload, stream, _Pending(held, finish))

    def call(
        self, kind: str, header: dict[str, Any], payload: Any = b"", *, held: Any = None
    ) -> tuple[dict[str, Any], bytearray]:
        """Send a command to the current stream and return its reply; raises its error."""
        replies: list[tuple[dict[str, Any], bytearray]] = []
        pending = _Pending(held, lambda *reply: replies.append(reply), awaited=True)
        with self._lock:
            key = self._launch(kind, header, payload, None, pending)
            self._read(lambda: key not in self._pending)
        if pending.error is not None:
            raise pending.error
        return replies[0]

    def _launch(
        self, kind: str, header: dict[str, Any], payload: Any, stream: int | None, pending: _Pending
    ) -> tuple[int, int]:
        if stream is None:
            stream = int(torch.ops.sim._stream.default(self.index))
        with self._lock:
            connection = self._connected()
            self.many_streams = self.many_streams or stream != 0
            number = self._launched[stream] = self._launched.get(stream, 0) + 1
            self._pending[stream, number] = pending
            try:
                wire.send(connection, {"s": stream, "n": number, "k": kind, **header}, payload)
            except wire.Closed:
                self._lose()
            if len(self._pending) > MOST_PENDING:
                self._read(lambda: len(self._pending) <= MOST_PENDING // 2)
        return stream, number

    def check(self, operator: str, reads: list[int], writes: list[int]) -> None:
        """Name a missing synchronisation with what other streams did to the memory at these addresses."""
        if not self.many_streams or self.chosen.sync == "ignore":
            return
        stream = int(torch.ops.sim._stream.default(self.index))
        serial = torch.ops.sim._serial.default
        with self._lock:
            use = Use(stream, self._launched.get(stream, 0) + 1, operator)
            hazard = self.order.hazard(
                use, map(serial, filter(None, reads)), map(serial, filter(None, writes))
            )
        if hazard is None:
            return
        if self.chosen.sync == "error":
            raise RuntimeError(hazard)
        warnings.warn(hazard, stacklevel=2)

    def changed_default(self) -> str | None:
        """Return the name of PyTorch's default dtype if the device does not know it yet."""
        found = torch.get_default_dtype()
        if found is self._default:
            return None
        self._default = found
        return wire.name(found)

    # -------------------- streams and events

    def record(self, stream: int, timed: bool) -> int:
        """Return the number of the last command of a stream; a timed event has a command of its own."""
        with self._lock:
            if timed:

                def keep(reply: dict[str, Any], payload: bytearray) -> None:
                    self._times[stream, reply["n"]] = reply["ms"]
                    if len(self._times) > 4096:  # events that nobody asked for in a long time
                        del self._times[next(iter(self._times))]

                self.launch("mark", {}, stream=stream, finish=keep)
            number = self._launched.get(stream, 0)
            self.order.recorded(stream, number)
            return number

    def block(self, stream: int, other: Link, other_stream: int, number: int) -> None:
        """Have a stream wait for a command of another; for another device's the host waits."""
        if other is not self:
            other.wait(other_stream, number)
            return
        with self._lock:
            self.many_streams = True
            self.order.stream_waits(stream, other_stream, number)
            if other_stream != stream and self._done.get(other_stream, 0) < number:
                self.launch("await", {"on": [other_stream, number]}, stream=stream)

    def is_done(self, stream: int, number: int) -> bool:
        """Check whether a command, the stream's last one where negative, is done."""
        with self._lock:
            self._read_what_came()
            self._raise_failure()
            return self._done.get(stream, 0) >= (self._launched.get(stream, 0) if number < 0 else number)

    def wait(self, stream: int, number: int) -> None:
        """Wait for a command; for the last one of a stream, or of all, where the number, or the stream, is negative."""
        with self._lock:
            streams = list(self._launched) if stream < 0 else [stream]
            for each in streams:
                last = self._launched.get(each, 0) if number < 0 else number
                self._read(lambda each=each, last=last: self._done.get(each, 0) >= last)
                self.order.host_waited(each, last)
            self._raise_failure()

    def host_waited(self, stream: int, number: int) -> None:
        """Note that the caller has what a command gave: it has waited for it."""
        with self._lock:
            self.order.host_waited(stream, number)

    def reached(self, stream: int, number: int) -> float:
        """Return when a timed event was reached, in milliseconds."""
        self.wait(stream, number)
        if (stream, number) not in self._times:
            raise RuntimeError(
                f"the event of command {number} on stream {stream} of {self.place} has no time"
            )
        return self._times[stream, number]

    # -------------------- replies

    def _read(self, until: Callable[[], bool]) -> None:
        while not until():
            self._read_one()

    def _read_what_came(self) -> None:
        connection = self._connection
        while connection is not None and self._pending and _readable(connection):
            self._read_one()

    def _read_one(self) -> None:
        connection = self._connected()
        try:
            reply, payload = wire.receive(connection, self.chosen.memory)
        except wire.Closed:
            self._lose()
        key = reply["s"], reply["n"]
        pending = self._pending.pop(key)
        self._done[key[0]] = key[1]
        if "error" in reply:
            error = _error(*reply["error"])
            if pending.awaited:
                pending.error = error
            else:
                self._failed = self._failed or error
        elif pending.finish is not None:
            pending.finish(reply, payload)

    def _raise_failure(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    # -------------------- process

    def _connected(self) -> socket.socket:
        if self._lost is not None:
            raise DeviceLost(self._lost)
        if self._connection is None:
            self._connection = nursery().start(self)
        return self._connection

    def _lose(self) -> None:
        """Mark the device as lost and raise `DeviceLost`."""
        self._lost = (
            f"{self.place} is lost: its process {self.pid or ''} ended, with everything that lay in its memory; other "
            f"devices go on, and a new process has it again"
        )
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._pending.clear()
        raise DeviceLost(self._lost)

    def disown(self) -> None:
        """Leave the device to the process that this one was forked from."""
        self.close()
        self._lost = (
            f"{self.place} belongs to the process that this one was forked from; start this one with 'spawn'"
        )

    def close(self) -> None:
        """End the device's process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Nursery:
    """The process that device processes are forked from."""

    def __init__(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._host = here
        package = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with there:
            # It computes with the CPU alone: no device is registered there.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "torchwright_sim.nursery", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            )

    def start(self, link: Link) -> socket.socket:
        """Start a device's process and return the connection to it."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with there:
            try:
                socket.send_fds(self._host, [b"d"], [there.fileno()])
            except OSError as error:
                here.close()
                raise DeviceLost(
                    f"{link.place} cannot be started: its parent process is gone ({error})"
                ) from None
        chosen = link.chosen
        wire.send(
            here,
            {
                "name": link.place,
                "memory": chosen.memory,
                "threads": torch.get_num_threads(),
                "faults": chosen.on_device(link.index),
                "operator_faults": chosen.on_operators(),
            },
        )
        try:
            hello, _ = wire.receive(here, 0)
        except wire.Closed:
            here.close()
            raise DeviceLost(f"{link.place} cannot be started: its process ended at once") from None
        link.pid = hello["pid"]
        return here

    def disown(self) -> None:
        self._host.close()

    def close(self) -> None:
        self._host.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)


_starting = threading.Lock()
_nursery: list[Nursery] = []
_links: list[Link] = []


def nursery() -> Nursery:
    """Return this process's nursery, started at its first use."""
    with _starting:
        if not _nursery:
            _nursery.append(Nursery())
            atexit.register(stop)
        return _nursery[0]


def links() -> list[Link]:
    """Return this process's devices."""
    return _links


def link(index: int) -> Link:
    return _links[index]


def start(chosen: settings.Settings) -> None:
    """Know the devices; their processes start with their first command."""
    _links.extend(Link(index, chosen) for index in range(chosen.devices))


def stop() -> None:
    """End all device processes."""
    for each in _links:
        each.close()
    for each in _nursery:
        each.close()
    _nursery.clear()


def forget() -> None:
    """In a fork of the host: the devices are the parent's."""
    for each in _links:
        each.disown()
    for each in _nursery:
        each.disown()
    _nursery.clear()


os.register_at_fork(after_in_child=forget)


def _readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def _error(name: str, text: str) -> Exception:
    known = ERRORS.get(name)
    return (
        known(text)
        if known is not None
        else RuntimeError(text if name == "RuntimeError" else f"{name}: {text}")
    )
