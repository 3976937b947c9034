"""A fleet's life: replicas, then the gateway, then the signal that ends all of them in the reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any

from torchwright.core.errors import WorkloadError
from torchwright.core.system import ending_signals, kill_descendants
from torchwright.serve.fleet.asking import Answer, ask
from torchwright.serve.fleet.gateway import Gateway, Place
from torchwright.serve.fleet.replicas import Replica
from torchwright.serve.fleet.status import StatusServer, application

LOOK_SECONDS = 0.1
"""Between two looks at the running requests of a fleet that ends."""
QUIET_LOOKS = 2
"""Looks in a row without a running request: one may fall between two requests of a busy client."""
KILL_SECONDS = 10.0
"""Longest that a replica may take to end once nothing runs."""


class Lines:
    """The lines of all children on standard error, each with the name of its child.

    While the fleet starts, a line that another child has said is left out: the same model has the same faults.
    """

    def __init__(self) -> None:
        self.starting = True
        self._said: set[str] = set()

    def relay(self, name: str, line: str) -> None:
        if self.starting and line in self._said:
            return
        if self.starting:
            self._said.add(line)
        sys.stderr.write(f"[{name}] {line}\n")  # at once: another thread's line comes before or after it
        sys.stderr.flush()


class Fleet:
    """Replicas of this machine or places elsewhere, and the gateway in front of them."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        places: Sequence[str],
        gateway: Gateway,
        lines: Lines,
        *,
        changed: asyncio.Event,
        keys: Sequence[str],
        hosts: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        """`changed` is set by replicas and gateway."""
        self._replicas, self._places, self._gateway, self._lines = replicas, places, gateway, lines
        self._keys, self._hosts, self._say = keys, hosts, say
        self._changed = changed
        self._stop, self._now = asyncio.Event(), asyncio.Event()

    async def run(self, status: socket.socket, announce: Callable[[], str]) -> None:
        """Serve until a signal; `announce` gives the line that says so when requests are taken.

        Raises `WorkloadError` for replicas that never were ready, and where none or no gateway is left.
        """
        app = application(self, keys=self._keys, hosts=self._hosts)
        server = StatusServer(app)
        with self._signals(asyncio.get_running_loop()):
            lives = [asyncio.create_task(each.live()) for each in self._replicas]
            serving = asyncio.create_task(server.serve(sockets=[status]))
            routing: asyncio.Task[None] | None = None
            try:
                await self._until(lambda: all(each.ever_ready for each in self._replicas))
                self._route()
                if not self._stop.is_set():
                    routing = asyncio.create_task(self._gateway.live())
                    await self._until(lambda: self._gateway.ready)
                if not self._stop.is_set():
                    self._say(announce())
                    self._lines.starting = False
                    await self._until(lambda: False)
            finally:
                await self._end(routing, lives)
                server.should_exit = True
                await asyncio.gather(serving, return_exceptions=True)

    def names(self) -> Sequence[str]:
        return [each.name for each in self._replicas] or list(self._places)

    async def ask_all(self, path: str) -> list[Answer]:
        key = self._keys[0] if self._keys else None
        places = [each.place for each in self._replicas] or self._places
        return await asyncio.gather(*(ask(place, path, key=key) for place in places))

    async def gateway_metrics(self) -> Answer:
        return await self._gateway.metrics()

    def restarts(self) -> dict[str, int]:
        servers = [(each.name, each.starts) for each in self._replicas]
        return {name: max(0, starts - 1) for name, starts in (*servers, ("gateway", self._gateway.starts))}

    @property
    def ready(self) -> bool:
        taken = not self._replicas or any(each.ready for each in self._replicas)
        return self._gateway.ready and taken and not self._stop.is_set()

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait for a condition or a signal, and keep the gateway's replicas up to date meanwhile."""
        stopping = asyncio.create_task(self._stop.wait())
        try:
            while not reached() and not self._stop.is_set():
                changing = asyncio.create_task(self._changed.wait())
                await asyncio.wait((changing, stopping), return_when=asyncio.FIRST_COMPLETED)
                changing.cancel()
                self._changed.clear()
                self._check()
                if self._gateway.starts:
                    self._route()
        finally:
            stopping.cancel()

    def _check(self) -> None:
        """Raise `WorkloadError` where the fleet cannot go on."""
        ended = [each for each in self._replicas if each.ended is not None]
        never = [each for each in ended if not each.ever_ready]
        if self._gateway.ended is not None:
            raise WorkloadError(self._gateway.ended, next="its lines above say why")
        if never:
            raise WorkloadError(f"{never[0].ended}", next="its lines above say why")
        if ended and len(ended) == len(self._replicas):
            raise WorkloadError(f"no replica is left: {ended[0].ended}", next="their lines above say why")

    def _route(self) -> None:
        """Tell the gateway which replicas take requests.

        Where none does it keeps the last ones: it answers 503 then, which clients try again, and 404 without any. It
        knows one model of a place, so that each adapter has places of its own.
        """
        mine = [
            Place(f"{each.name.replace(' ', '-')}-{each.starts}-{which}", place, model)
            for each in self._replicas
            if each.ready
            for which, (place, model) in enumerate(zip(each.places, self._gateway.models, strict=True))
        ]
        if places := mine or [Place(place, place) for place in self._places]:
            self._gateway.route_to(places)

    async def _end(self, routing: asyncio.Task[None] | None, lives: list[asyncio.Task[None]]) -> None:
        """End the gateway when the running requests have ended, and then the replicas; or all at once."""
        running = await self._gateway.running() if routing is not None else 0
        if self._stop.is_set():
            self._say(
                f"stopping after {running} running requests; Ctrl-C again stops at once"
                if running
                else "stopping"
            )
        if routing is not None:
            self._gateway.stop()
            await self._or_now(self._last_requests(routing))
            self._gateway.kill()
            await asyncio.gather(routing, return_exceptions=True)
        for replica in self._replicas:
            replica.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._or_now(_all(lives))
        kill_descendants()  # helpers that are still starting would end only once they look for their parent
        for replica in self._replicas:
            replica.kill()
        await asyncio.gather(*lives, return_exceptions=True)
        self._gateway.close()

    async def _last_requests(self, routing: asyncio.Task[None]) -> None:
        """Wait until nothing runs: the gateway itself keeps its port open for seconds more."""
        quiet = 0
        while quiet < QUIET_LOOKS and not routing.done():
            quiet = quiet + 1 if not await self._gateway.running() else 0
            await asyncio.sleep(LOOK_SECONDS)

    async def _or_now(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`, or for the signal that ends all at once."""
        working, now = asyncio.create_task(work), asyncio.create_task(self._now.wait())
        try:
            await asyncio.wait((working, now), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, now):
                task.cancel()
            await asyncio.gather(working, now, return_exceptions=True)

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """The first signal ends the fleet after its running requests, the second at once."""

        def take(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe((self._now if self._stop.is_set() else self._stop).set)

        signals = [each for each in ending_signals() if signal.getsignal(each) is not signal.SIG_IGN]
        before = {number: signal.signal(number, take) for number in signals}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old if old is not None else signal.SIG_DFL)


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)
