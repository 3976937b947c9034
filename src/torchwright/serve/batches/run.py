"""One batch: its file is checked, its rows are answered and written as they come, and its results become files.

A row's line is written once, when its answer is final. After a restart the rows that have a line are not asked again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import msgspec

from torchwright.serve.api_error import ApiError
from torchwright.serve.batches import lines
from torchwright.serve.batches.lines import BatchRow, FileFaults
from torchwright.serve.batches.places import Places
from torchwright.serve.batches.records import BatchFault, Status, StoredBatch, Usage, now
from torchwright.serve.batches.store import Store
from torchwright.serve.limits import Limits

log = logging.getLogger("torchwright.serve")
RETRY = (429, 503)
"""The server is full, or the engine is not there: the row waits, and its batch's window bounds the wait."""
LINE_BYTES = 4096
"""A line's bytes in addition to its body."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to one row."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float = 1.0


class Host(Protocol):
    """The server, as far as batches care."""

    def ask(self, path: str, body: bytes) -> Awaitable[Reply]:
        """Answer one request, behind all interactive ones."""
        ...

    def places(self) -> int:
        """Return how many rows may be computed now; 0 while the engine is not ready."""
        ...

    @property
    def life(self) -> int:
        """The number of engines that have died."""
        ...

    async def ready(self, *, settled: bool) -> None:
        """Wait for the engine; `settled`, until its death would not count as one at the start."""
        ...


class BatchRun:
    """The work on one batch that has not ended."""

    def __init__(self, batch: StoredBatch, store: Store, host: Host, places: Places, limits: Limits) -> None:
        self._batch, self._store, self._host, self._places = batch, store, host, places
        self._limits = limits
        self._work: asyncio.Task[None] | None = None
        self._files = dict[bool, IO[bytes]]()
        """True for answers, False for errors → where their lines go."""
        self._done = set[str]()
        """Custom ids of rows that have a line."""
        self._suspects = list[BatchRow]()
        """Rows during which an engine died."""
        self._opening = threading.Lock()

    def cancel(self) -> None:
        """End with what there is."""
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """Run until the batch has ended. A cancellation from outside leaves it as it is, for the next server."""
        status: Status = "completed"
        try:
            status = await self._worked()
        except FileFaults as fault:
            status, self._batch.faults = "failed", fault.faults
        except ApiError as error:
            status = "failed"
            self._batch.faults = [BatchFault(code=error.code or "storage", message=error.message)]
        except OSError as error:
            log.exception("%s: its results cannot be written", self._batch.id)
            text = f"the results cannot be written: {error.strerror}"
            status, self._batch.faults = "failed", [BatchFault(code="storage", message=text)]
        except Exception:
            log.exception("%s: a fault in the server", self._batch.id)
            text = "a fault in the server; its log has the traceback"
            status, self._batch.faults = "failed", [BatchFault(code="internal_error", message=text)]
        finally:
            for file in self._files.values():
                file.close()
        await self._finish(status)

    async def _worked(self) -> Status:
        """Compute the rows; return the state in which the batch ends."""
        batch = self._batch
        if batch.ending is not None or batch.status == "cancelling":
            return batch.ending or "cancelled"
        self._work = asyncio.create_task(self._compute())
        try:
            async with asyncio.timeout(max(0.0, batch.expires - now())) as window:
                await self._work
        except TimeoutError:
            if not window.expired():
                raise
            await asyncio.to_thread(self._write_expired)
            return "expired"
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise
        finally:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        return "cancelled" if batch.status == "cancelling" else "completed"

    async def _compute(self) -> None:
        batch = self._batch
        if batch.status == "validating":
            batch.counts.total = await asyncio.to_thread(
                lines.check,
                self._source,
                batch.endpoint,
                most_rows=self._limits.batch_rows,
                most_bytes=self._most_bytes,
            )
            await self._become("in_progress")
        await asyncio.to_thread(self._open)
        try:
            async with asyncio.TaskGroup() as group:
                await self._start_rows(group)
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        await self._isolate()

    async def _start_rows(self, group: asyncio.TaskGroup) -> None:
        """Start each row that has no line yet, once there is a place."""
        rows = lines.rows(self._source, self._most_bytes)
        while True:
            await self._isolate()
            await self._places.enter()
            row = None
            try:
                row = await asyncio.to_thread(self._next, rows)
            finally:
                if row is None:
                    self._places.leave()
            if row is None:
                return
            group.create_task(self._answer(row)).add_done_callback(lambda _: self._places.leave())

    async def _answer(self, row: BatchRow) -> None:
        reply = await self._asked(row, settled=False)
        if reply is None:
            self._suspects.append(row)
        else:
            self._write(row, reply)

    async def _isolate(self) -> None:
        """Ask the rows during which an engine died again, each alone; one that ends another engine is an error."""
        while self._suspects:
            row = self._suspects.pop(0)
            async with self._places.alone():
                reply = await self._asked(row, settled=True)
            self._write(row, KILLED if reply is None else reply)

    async def _asked(self, row: BatchRow, *, settled: bool) -> Reply | None:
        """Return the final answer to a row, or None if the engine died meanwhile."""
        while True:
            await self._host.ready(settled=settled)
            life = self._host.life
            reply = await self._host.ask(self._batch.endpoint, row.body)
            if reply.status not in RETRY:
                return reply
            if reply.status == 503:
                await self._host.ready(settled=False)
                if self._host.life != life:
                    return None
            await asyncio.sleep(reply.retry_after_s)

    # Files: these run in threads, but for `_write`.

    @property
    def _source(self) -> Path:
        return self._store.path(self._store.files[self._batch.input_file_id])

    @property
    def _most_bytes(self) -> int:
        return self._limits.body_bytes + LINE_BYTES

    def _open(self) -> None:
        """Open the files of results, with what an earlier server wrote there."""
        with self._opening:
            if self._files:
                return
            batch, places = self._batch, self._store.results(self._batch)
            batch.usage = Usage()
            found = [lines.read_results(path, batch.usage) for path in places]
            batch.counts.completed, batch.counts.failed = map(len, found)
            self._done.update(*found)
            for path, good in zip(places, (True, False), strict=True):
                self._files[good] = path.open("ab")

    def _next(self, rows: Iterator[BatchRow]) -> BatchRow | None:
        return next((row for row in rows if row.custom_id not in self._done), None)

    def _write(self, row: BatchRow, reply: Reply) -> None:
        """Raises `ApiError` where the store is full, `OSError` where the disk is."""
        good = reply.status < 400
        self._put(row, good, lines.answered(row.custom_id, reply.status, reply.request_id, reply.body))
        if good:
            lines.count(self._batch.usage, reply.body)

    def _write_expired(self) -> None:
        """Give every row that has no line an error."""
        if self._batch.status == "validating":
            return
        self._open()
        rows = lines.rows(self._source, self._most_bytes)
        while (row := self._next(rows)) is not None:
            self._put(row, False, lines.unanswered(row.custom_id, "batch_expired", EXPIRED))

    def _put(self, row: BatchRow, good: bool, line: bytes) -> None:
        self._store.hold(len(line))
        self._files[good].write(line)
        self._files[good].flush()
        self._done.add(row.custom_id)
        counts = self._batch.counts
        counts.completed, counts.failed = counts.completed + good, counts.failed + (not good)

    # The end

    async def _finish(self, status: Status) -> None:
        batch = self._batch
        batch.ending = status
        await self._become("finalizing" if status == "completed" else batch.status)
        output, errors = self._store.results(batch)
        batch.output_file_id = await asyncio.to_thread(self._adopted, output, batch.output_name, "output")
        batch.error_file_id = await asyncio.to_thread(self._adopted, errors, batch.error_name, "errors")
        await self._become(status)
        counts = batch.counts
        log.info(
            "%s: %s, %d of %d requests answered, %d failed",
            batch.id, status, counts.completed, counts.total, counts.failed,
        )  # fmt: skip

    def _adopted(self, results: Path, id: str, kind: str) -> str | None:
        """Make a file of results that lines were written to; return its id, None for a file without lines."""
        if id in self._store.files:  # of a server that was killed before the batch's record was written
            return id
        if not results.exists():
            return None
        if not results.stat().st_size:
            results.unlink()
            return None
        name = f"{self._batch.id}_{kind}.jsonl"
        seconds = self._batch.output_seconds
        self._store.add(
            results, self._batch.owner, purpose="batch_output", filename=name, seconds=seconds, id=id
        )
        return id

    async def _become(self, status: Status) -> None:
        """Enter a state once it is on the disk: no client sees one that a restart takes back."""
        at: dict[Status, float] = {status: now(), **self._batch.at}
        await asyncio.to_thread(self._store.keep, msgspec.structs.replace(self._batch, status=status, at=at))
        self._batch.status, self._batch.at = status, at


KILLED = Reply(
    status=500,
    body=lines.error_body(
        ApiError(
            500,
            "the engine died twice while it computed this request, the second time without others of a batch",
            code="engine_died",
        )
    ),
    request_id="",
)
"""The answer to a row that ended an engine again when it was alone."""
EXPIRED = "the request was not answered before the completion window ended"
