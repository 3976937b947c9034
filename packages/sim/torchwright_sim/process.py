"""A device's process: it owns the device's memory and computes on it with the CPU's operators.

Each stream that is used has a thread, which does the stream's commands in their order. Replies carry stream and number.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchwright_sim import wire
from torchwright_sim.evaluation import Evaluation, clean

NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap does not name: eight devices may have more memory than the machine."""


def serve(connection: socket.socket) -> None:
    """Do what the host asks over this connection until it is closed."""
    warnings.simplefilter("ignore")  # an operator's warning would be one of a process that nobody sees
    try:
        settings, _ = wire.receive(connection, 0)
        device = Device(connection, settings)
        wire.send(connection, {"pid": os.getpid()})
        device.run()
    except wire.Closed:
        pass


class Memory:
    """The device's memory: tensors in it by their place."""

    def __init__(self, capacity: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        self.bytes = mmap.mmap(-1, capacity, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    def tensor(self, place: wire.Place) -> torch.Tensor:
        """Return the tensor at a place, over the device's own memory."""
        if place.nbytes == 0:
            return torch.empty_strided(place.size, place.stride, dtype=place.dtype)
        block = torch.frombuffer(self.bytes, dtype=torch.uint8, count=place.nbytes, offset=place.offset)
        empty = torch.empty(0, dtype=place.dtype)
        found = empty.set_(block.untyped_storage(), place.start, place.size, place.stride)
        if place.conj:
            found = torch.conj(found)
        return torch.ops.aten._neg_view(found) if place.neg else found

    def move(self, to: int, source: int, count: int) -> None:
        ctypes.memmove(self.address + to, self.address + source, count)


class Device:
    """Streams of commands over one memory."""

    def __init__(self, connection: socket.socket, settings: dict[str, Any]) -> None:
        self.connection = connection
        self.memory = Memory(settings["memory"])
        self.evaluation = Evaluation(self.memory, settings["operator_faults"])
        self.threads: int = settings["threads"]
        self.faults: dict[str, int] = settings["faults"]
        self.place: str = settings["name"]
        self.commands = 0
        self.queues: dict[int, queue.SimpleQueue[Any]] = {}
        self.done: dict[int, int] = {}
        self.progress = threading.Condition()
        self.sending = threading.Lock()
        torch.set_num_threads(self.threads)

    def run(self) -> None:
        while True:
            header, payload = wire.receive(self.connection, len(self.memory.bytes))
            stream = header["s"]
            if stream not in self.queues:
                self.queues[stream] = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(self.queues[stream],), daemon=True).start()
            self.queues[stream].put((header, payload))

    def _work(self, commands: queue.SimpleQueue[Any]) -> None:
        torch._C._set_grad_enabled(False)
        torch.set_num_threads(self.threads)  # OpenMP has it for each thread
        results: dict[int, list[torch.Tensor]] = {}
        while True:
            header, payload = commands.get()
            stream, number = header["s"], header["n"]
            reply: dict[str, Any] = {"s": stream, "n": number}
            body: Any = b""
            try:
                said, body = self._do(header, payload, results)
                reply.update(said)
            except Exception as error:
                reply["error"] = [type(error).__name__, str(error)]
            with self.progress:
                self.done[stream] = number
                self.progress.notify_all()
            try:
                with self.sending:
                    wire.send(self.connection, reply, body)
            except wire.Closed:
                os._exit(0)

    def _do(
        self, header: dict[str, Any], payload: bytearray, results: dict[int, list[torch.Tensor]]
    ) -> tuple[dict[str, Any], Any]:
        command: Callable[..., tuple[dict[str, Any], Any]] = getattr(self, f"_do_{header['k']}")
        return command(header, payload, results)

    def _do_run(self, header: dict[str, Any], payload: bytearray, results: Any) -> tuple[dict[str, Any], Any]:
        fault = self._fault()
        said, made, state = self.evaluation.run(header, payload)
        if fault == "flip":
            self._flip(made or self.evaluation.written)
        if made:
            results[header["n"]] = made
        return said, state

    def _do_store(self, header: dict[str, Any], payload: Any, results: Any) -> tuple[dict[str, Any], Any]:
        made = results.pop(header["from"])
        for result, place in zip(made, header["to"], strict=True):
            self.memory.tensor(wire.Place.decode(place)).copy_(result)
        return {}, b""

    def _do_drop(self, header: dict[str, Any], payload: Any, results: Any) -> tuple[dict[str, Any], Any]:
        results.pop(header["from"], None)
        return {}, b""

    def _do_write(
        self, header: dict[str, Any], payload: bytearray, results: Any
    ) -> tuple[dict[str, Any], Any]:
        place = wire.Place.decode(header["to"])
        source = wire.from_raw(payload, wire.DTYPES[header["dtype"]], tuple(header["size"]))
        self.memory.tensor(place).copy_(source)
        return {}, b""

    def _do_read(self, header: dict[str, Any], payload: Any, results: Any) -> tuple[dict[str, Any], Any]:
        found = clean(self.memory.tensor(wire.Place.decode(header["from"])))
        return {}, wire.raw(found.contiguous())

    def _do_copy(self, header: dict[str, Any], payload: Any, results: Any) -> tuple[dict[str, Any], Any]:
        to, source = wire.Place.decode(header["to"]), wire.Place.decode(header["from"])
        self.memory.tensor(to).copy_(self.memory.tensor(source))
        return {}, b""

    def _do_move(self, header: dict[str, Any], payload: Any, results: Any) -> tuple[dict[str, Any], Any]:
        self.memory.move(header["to"], header["from"], header["count"])
        return {}, b""

    def _do_mark(self, header: dict[str, Any], payload: Any, results: Any) -> tuple[dict[str, Any], Any]:
        return {"ms": time.monotonic() * 1000}, b""

    def _do_sleep(self, header: dict[str, Any], payload: Any, results: Any) -> tuple[dict[str, Any], Any]:
        time.sleep(header["seconds"])
        return {}, b""

    def _do_await(self, header: dict[str, Any], payload: Any, results: Any) -> tuple[dict[str, Any], Any]:
        stream, number = header["on"]
        with self.progress:
            self.progress.wait_for(lambda: self.done.get(stream, 0) >= number)
        return {}, b""

    def _fault(self) -> str | None:
        """Count an operator, and do what was asked for its number."""
        with self.progress:
            self.commands += 1
            number = self.commands
        if self.faults.get("kill") == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faults.get("error") == number:
            raise RuntimeError(f"{self.place} reports an error (a fault that TORCHWRIGHT_SIM asked for)")
        return "flip" if self.faults.get("flip") == number else None

    def _flip(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel() and tensor.is_contiguous():
                tensor.view(-1)[:1].view(torch.uint8)[-1].bitwise_xor_(0x40)  # an exponent's high bit
                return
