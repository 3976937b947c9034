"""The servers of a fleet on this machine: each is started, watched, and started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
from collections.abc import Sequence

from torchwright.core.process.orphans import bound_command
from torchwright.serve.fleet.asking import ask
from torchwright.serve.fleet.child import Child, Relay
from torchwright.serve.fleet.cores import on_cores
from torchwright.serve.fleet.kept_alive import KeptAlive
from torchwright.serve.fleet.options import LOOPBACK
from torchwright.serve.options import ServerOptions

log = logging.getLogger("torchwright.serve")

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


class Replica(KeptAlive):
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
        super().__init__(f"replica {number}", relay=relay, changed=changed)
        self.number = number
        self._options, self._processors = options, processors
        self._ports = [0] * (1 + len(options.engine.adapters))
        self.ever_ready = False

    @property
    def place(self) -> str:
        """HOST:PORT of its server."""
        return self.places[0]

    @property
    def places(self) -> list[str]:
        """The place of its server, and one more of the same server for each adapter."""
        return [f"{LOOPBACK}:{port}" for port in self._ports]

    def _start(self) -> Child:
        listening = [self._listen(which) for which in range(len(self._ports))]
        numbers = [each.fileno() for each in listening]
        given = {
            "processors": list(self._processors),
            "listening": numbers,
            "engine": self._options.engine.to_json(),
            "server": {
                field.name: getattr(self._options, field.name)
                for field in dataclasses.fields(self._options)
                if field.name != "engine"
            },
        }
        with contextlib.ExitStack() as mine:
            for (
                each
            ) in listening:  # the replica has its own; with these open, a dead replica's clients would wait
                mine.enter_context(each)
            return Child.start(
                self.name,
                bound_command("torchwright.serve.fleet.replica_process", self.name),  # for who looks for it
                given=json.dumps(given).encode(),
                relay=self._relay,
                environment=on_cores(os.environ, self._processors),
                files=numbers,
            )

    def _listen(self, which: int) -> socket.socket:
        """Return a listening socket on that port of its last life, or on a free one where that is taken."""
        try:
            listening = _bound(self._ports[which])
        except OSError:
            listening = _bound(0)
        listening.listen(QUEUED)
        self._ports[which] = listening.getsockname()[1]
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

    def _given_up(self, early: int) -> str | None:
        return super()._given_up(early) if self.ever_ready else "before it was ready"

    def _become(self, ready: bool) -> None:
        self.ever_ready = self.ever_ready or ready
        super()._become(ready)


def _bound(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
    except OSError:
        bound.close()
        raise
    return bound
