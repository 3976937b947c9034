"""A child of the fleet over all of its processes' lives: started, watched, and started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from torchwright.core.process.waited import how_it_ended
from torchwright.serve.fleet.child import Child, Relay

log = logging.getLogger("torchwright.serve")

EARLY_SECONDS = 10.0
"""A shorter life is an early end: of a replica counted from when it was ready."""
EARLY_ENDS = 4
"""After so many early ends in a row a child is not started again."""
BACKOFF_SECONDS = (0.1, 0.3, 2.0, 10.0)
"""Before the next start, by the number of early ends."""


class KeptAlive:
    """Starts its child again after each end, until `stop` or until `_given_up`."""

    def __init__(self, name: str, *, relay: Relay, changed: asyncio.Event) -> None:
        """`changed` is set whenever `ready` or `ended` is another."""
        self.name = name
        self._relay, self._changed = relay, changed
        self.child: Child | None = None
        self.ready = False
        """True while it takes requests."""
        self.ended: str | None = None
        """The reason why it is not started again."""
        self.starts = 0
        self._stopping = asyncio.Event()

    async def live(self) -> None:
        """Start it, and again after each end."""
        loop, early = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            self.starts += 1
            self.child = child = self._start()
            watching = asyncio.create_task(self._watch(child))
            code = await child.ended()
            watching.cancel()
            since = await _result(watching)
            self._become(False)
            if self._stopping.is_set():
                return
            how = how_it_ended(code)
            early = 0 if since is not None and loop.time() - since >= EARLY_SECONDS else early + 1
            if when := self._given_up(early):
                self.ended = f"{self.name} ended {when} ({how})"
                self._changed.set()
                return
            log.warning("%s ended (%s) and is started again", self.name, how)
            with contextlib.suppress(TimeoutError):
                pause = BACKOFF_SECONDS[min(early, len(BACKOFF_SECONDS) - 1)]
                await asyncio.wait_for(self._stopping.wait(), pause)

    def stop(self) -> None:
        """Let running requests finish and end it, for good."""
        self._stopping.set()
        if self.child is not None:
            self.child.ask_to_end()

    def kill(self) -> None:
        """End it at once and for good."""
        self._stopping.set()
        if self.child is not None:
            self.child.kill()

    def _start(self) -> Child:
        raise NotImplementedError

    async def _watch(self, child: Child) -> float | None:
        """Call `_become` as it is ready or not, until cancelled; return when this life began to count, if it did."""
        raise NotImplementedError

    def _given_up(self, early: int) -> str | None:
        """Return when it ended, in words, if it is not started again after so many early ends in a row."""
        return f"{early} times in a row" if early >= EARLY_ENDS else None

    def _become(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._changed.set()


async def _result(watching: asyncio.Task[float | None]) -> float | None:
    try:
        return await watching
    except asyncio.CancelledError:  # before it began
        return None
