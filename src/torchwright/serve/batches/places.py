"""Who may ask the engine now: rows of all batches together, within a limit that moves with the interactive load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

LOOK_SECONDS = 0.05
"""Between two looks at the limit, which others move; a row that ends is noticed at once."""


class Places:
    """The rows that are being computed. Rows come in the order in which they asked, so that batches take turns."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit` gives how many rows may be computed at the same time, 0 for none."""
        self._limit, self._turn, self._alone = limit, asyncio.Lock(), asyncio.Lock()
        self._ended = asyncio.Event()
        """Set when a row has ended."""
        self.running = 0
        self._suspects = 0

    async def enter(self) -> None:
        """Wait for a place; `leave` it."""
        async with self._turn:
            while self._suspects or self.running >= self._limit():
                await self._look()
            self.running += 1

    def leave(self) -> None:
        self.running -= 1
        self._ended.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the only place: no other row of a batch is computed meanwhile."""
        self._suspects += 1  # nobody enters from now on
        try:
            async with self._alone:
                while self.running or not self._limit():
                    await self._look()
                yield
        finally:
            self._suspects -= 1
            self._ended.set()

    async def _look(self) -> None:
        """Wait for the end of a row, or for the time of the next look."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._ended.wait()
