"""The servers of a fleet on this machine: each is started, watched, and started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence

from torchwright.serve.fleet.asking import ask
from torchwright.serve.fleet.child import Child, Relay, how_it_ended
from torchwright.serve.fleet.cores import on_cores
from torchwright.serve.options import ServerOptions

log = logging.getLogger("torchwright.serve")

LOOPBACK = "127.0.0.1"
QUEUED = 2048
"""Connections that wait in the kernel, as many as a server of its own has."""
STARTING_PAUSE_SECONDS, PAUSE_SECONDS = 0.1, 1.0
"""Between two looks at a replica that loads its model, and at one that serves."""
PROBE_TIMEOUT_SECONDS = 5.0
SILENT_SECONDS = 20.0
"""A process that answers no probe for so long is taken from the gateway, whose own probes have left it out before."""
HANG_SECONDS = 60.0
"""A process that answers no probe for so long hangs, and is killed. Its callbacks take milliseconds, but a burst of
requests on a busy machine keeps the loop from a probe for ten seconds."""
EARLY_SECONDS = 10.0
"""An end sooner than this after the replica was ready, or before, is an early one."""
EARLY_ENDS = 4
"""After so many early ends in a row a replica is not started again."""
BACKOFF_SECONDS = (0.1, 0.3, 2.0, 10.0)
"""Before the next start, by the number of early ends."""


class Replica:
    """One server of the fleet, over all of its processes' lives."""

    def __init__(
        self,
        number: int,
        options: ServerOptions,
        processors: Sequence[int],
        *,
        relay: Relay,
        changed: asyncio.Event,
    ) -> None:
        """`changed` is set whenever `ready` or `ended` is another."""
        self.number, self.name = number, f"replica {number}"
        self._options, self._processors = options, processors
        self._relay, self._changed = relay, changed
        self._port = 0
        self.child: Child | None = None
        self.ready = False
        """True while it takes requests."""
        self.ever_ready = False
        self.ended: str | None = None
        """The reason why it is not started again."""
        self.starts = 0
        self._stopping = asyncio.Event()

    @property
    def place(self) -> str:
        """HOST:PORT of its server."""
        return f"{LOOPBACK}:{self._port}"

    async def live(self) -> None:
        """Start it, again after each end, until `stop`, an end before it was ever ready, or too many early ends."""
        loop, early = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            self.child = child = self._start()
            watching = asyncio.create_task(self._watch(child))
            code = await child.ended()
            watching.cancel()
            ready_at = await _result(watching)
            self._become(False)
            if self._stopping.is_set():
                return
            how = how_it_ended(code)
            early = 0 if ready_at is not None and loop.time() - ready_at >= EARLY_SECONDS else early + 1
            if not self.ever_ready or early >= EARLY_ENDS:
                when = "before it was ready" if not self.ever_ready else f"{early} times in a row"
                self.ended = f"{self.name} ended {when} ({how})"
                self._changed.set()
                return
            log.warning("%s ended (%s) and is started again", self.name, how)
            with contextlib.suppress(TimeoutError):
                pause = BACKOFF_SECONDS[min(early, len(BACKOFF_SECONDS) - 1)]
                await asyncio.wait_for(self._stopping.wait(), pause)

    def stop(self) -> None:
        """Let its requests finish and end it, for good."""
        self._stopping.set()
        if self.child is not None:
            self.child.ask_to_end()

    def kill(self) -> None:
        """End it at once and for good."""
        self._stopping.set()
        if self.child is not None:
            self.child.kill()

    def _start(self) -> Child:
        listening = self._listen()
        given = {
            "parent": os.getpid(),
            "processors": list(self._processors),
            "listening": listening.fileno(),
            "engine": self._options.engine.to_json(),
            "server": {
                field.name: getattr(self._options, field.name)
                for field in dataclasses.fields(self._options)
                if field.name != "engine"
            },
        }
        self.starts += 1
        with listening:  # the replica has its own; with this one open, a dead replica's clients would wait
            return Child.start(
                self.name,
                [
                    sys.executable,
                    "-m",
                    "torchwright.serve.fleet.replica_process",
                    self.name,
                ],  # for who looks for it
                given=json.dumps(given).encode(),
                relay=self._relay,
                environment=on_cores(os.environ, self._processors),
                files=[listening.fileno()],
            )

    def _listen(self) -> socket.socket:
        """Return a listening socket on the port of its last life, or on a free one where that is taken."""
        try:
            listening = _bound(self._port)
        except OSError:
            listening = _bound(0)
        listening.listen(QUEUED)
        self._port = listening.getsockname()[1]
        return listening

    async def _watch(self, child: Child) -> float | None:
        """Note whether it takes requests, and kill it where it hangs, until cancelled; returns when it first did."""
        loop = asyncio.get_running_loop()
        ready_at: float | None = None
        heard: float | None = None
        try:
            while True:
                answer = await ask(self.place, "/ready", seconds=PROBE_TIMEOUT_SECONDS)
                now = loop.time()
                heard = now if answer.status else heard
                if answer.status or (heard is not None and now - heard > SILENT_SECONDS):
                    self._become(answer.status == 200)
                if self.ready and ready_at is None:
                    ready_at = now
                if heard is not None and now - heard > HANG_SECONDS:
                    log.error("%s has answered nothing for %.0f s; it is killed", self.name, HANG_SECONDS)
                    child.kill()
                await asyncio.sleep(PAUSE_SECONDS if ready_at is not None else STARTING_PAUSE_SECONDS)
        except asyncio.CancelledError:
            return ready_at

    def _become(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready, self.ever_ready = ready, self.ever_ready or ready
            self._changed.set()


def _bound(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
    except OSError:
        bound.close()
        raise
    return bound


async def _result(watching: asyncio.Task[float | None]) -> float | None:
    try:
        return await watching
    except asyncio.CancelledError:  # before it began
        return None
