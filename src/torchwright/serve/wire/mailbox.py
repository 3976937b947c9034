"""Messages from the engine for one request that the HTTP process has not yet taken."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from torchwright.serve.wire.messages import Failed, Reply, TokenOutput


@dataclass(frozen=True)
class Lost:
    """The request ends without an answer from the engine, for this reason."""

    reason: str


@dataclass(frozen=True)
class Dropped:
    """The request ends because its client has gone, or does not read."""

    reason: str


Item = TokenOutput | Reply | Failed | Lost | Dropped


class Mailbox:
    """The engine's messages for one request, in order. At most `capacity` items wait to be taken."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: list[Item] = []
        self._arrived = asyncio.Event()

    @property
    def full(self) -> bool:
        return len(self._items) >= self._capacity

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._arrived.set()

    async def take(self) -> list[Item]:
        """Everything that has come; waits until there is something."""
        await self._arrived.wait()
        items, self._items = self._items, []
        self._arrived.clear()
        return items
