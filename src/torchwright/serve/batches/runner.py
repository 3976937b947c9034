"""All batches of a server: begun when they are created, gone on with after a restart, cancelled, and forgotten."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from torchwright.serve.api_error import ApiError
from torchwright.serve.batches.places import Places
from torchwright.serve.batches.records import StoredBatch, now
from torchwright.serve.batches.run import BatchRun, Host
from torchwright.serve.batches.store import Store
from torchwright.serve.limits import Limits

log = logging.getLogger("torchwright.serve")
EXPIRY_SECONDS = 60.0
"""Between two looks for files whose time has come: their times are hours and days."""


class Batches:
    """The batches of one server, over a store. `start` it with the server, and `close` it before the engine."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self.store, self._limits = store, limits
        self._host: Host | None = None
        self._places = Places(self._limit)
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._expiring: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self, host: Host) -> None:
        """Go on with the batches that have not ended."""
        self._host = host
        self._expiring = asyncio.create_task(self._expire())
        for batch in self.store.batches.values():
            if not batch.ended:
                self._begin(batch)

    async def create(self, batch: StoredBatch) -> None:
        """Begin a batch; raises `ApiError` (429) where too many have not ended."""
        unended = sum(not other.ended for other in self.store.batches.values())
        if unended >= self._limits.batches_open:
            raise ApiError(
                429,
                f"{unended} batches have not ended, which is the most",
                code="too_many_batches",
                headers={"Retry-After": "60"},
            )
        self.store.batches[batch.id] = batch  # its input is not deleted from now on
        try:
            await asyncio.to_thread(self.store.keep, batch)
        except OSError:
            del self.store.batches[batch.id]
            raise
        self._begin(batch)

    async def cancel(self, batch: StoredBatch) -> dict[str, Any]:
        """Let a batch end with the rows that it has; return how clients read it at that moment.

        Raises `ApiError` (409) for one that ends already.
        """
        if batch.status == "cancelling":
            return batch.public()
        if batch.status not in ("validating", "in_progress"):
            raise ApiError(409, f"the batch is {batch.status}", param="batch_id", code="batch_ended")
        batch.status = "cancelling"
        batch.at["cancelling"] = now()
        if run := self._runs.get(batch.id):
            run[0].cancel()
        found = batch.public()
        await asyncio.to_thread(self.store.keep, batch)
        return found

    def stop(self) -> None:
        """Give the rows in progress up, and begin no others: the next server computes them."""
        self._stopped = True
        for _, task in self._runs.values():
            task.cancel()

    async def close(self) -> None:
        self.stop()
        tasks = [task for _, task in self._runs.values()]
        if self._expiring is not None:
            self._expiring.cancel()
            tasks.append(self._expiring)
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    @property
    def running(self) -> int:
        """Rows that are being computed."""
        return self._places.running

    def _limit(self) -> int:
        return 0 if self._host is None else self._host.places()

    def _begin(self, batch: StoredBatch) -> None:
        if self._stopped or self._host is None:
            return
        run = BatchRun(batch, self.store, self._host, self._places, self._limits)
        task = asyncio.create_task(run.run())
        self._runs[batch.id] = run, task
        task.add_done_callback(lambda _: self._ended(batch, task))

    def _ended(self, batch: StoredBatch, task: asyncio.Task[None]) -> None:
        del self._runs[batch.id]
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("%s: a fault in the server; it goes on at the next start", batch.id, exc_info=fault)

    async def _expire(self) -> None:
        while True:
            await asyncio.to_thread(self.store.expire)
            await asyncio.sleep(EXPIRY_SECONDS)
