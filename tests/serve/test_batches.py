"""Files and batches without a server: exact rows whatever ends the work, and everything bounded."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchwright.core.errors import WorkloadError
from torchwright.serve.api_error import ApiError
from torchwright.serve.batches import lines
from torchwright.serve.batches.lines import FileFaults
from torchwright.serve.batches.records import StoredBatch, StoredFile
from torchwright.serve.batches.run import Reply
from torchwright.serve.batches.runner import Batches
from torchwright.serve.batches.store import Store
from torchwright.serve.ids import new_id
from torchwright.serve.limits import Limits

CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
WAIT_SECONDS = 20.0


class FakeHost:
    """Answers a row with its own body; `refuse` may give another answer, by body and how often it was asked before."""

    def __init__(self, refuse: Callable[[dict[str, Any], int], Reply | None] = lambda body, n: None) -> None:
        self._refuse = refuse
        self.asked = Counter[int]()
        self.life, self.limit = 0, 4
        self.now: set[int] = set()
        self.together: list[set[int]] = []
        self.settled = 0

    async def ask(self, path: str, body: bytes) -> Reply:
        said = json.loads(body)
        row = said["row"]
        self.asked[row] += 1
        self.now.add(row)
        self.together.append(set(self.now))
        try:
            await asyncio.sleep(said.get("seconds", 0))
            reply = self._refuse(said, self.asked[row] - 1)
            return reply or Reply(
                status=200, body=json.dumps({"row": row, "usage": USAGE}).encode(), request_id=f"req-{row}"
            )
        finally:
            self.now.discard(row)

    def places(self) -> int:
        return self.limit

    async def ready(self, *, settled: bool) -> None:
        self.settled += settled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    made = Store(folder, Limits())
    yield made
    made.close()


def line(row: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{row}", "method": "POST", "url": url, "body": {"row": row, **body}}


def text(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def added(store: Store, data: bytes, owner: str = "") -> StoredFile:
    with store.incoming() as path:
        store.hold(len(data))
        path.write_bytes(data)
        return store.add(path, owner, purpose="batch", filename="in.jsonl", seconds=3600)


def batch_of(file: StoredFile, *, seconds: float = 3600, owner: str = "") -> StoredBatch:
    now = time.time()
    return StoredBatch(
        id=new_id("batch_"),
        owner=owner,
        endpoint=CHAT,
        input_file_id=file.id,
        completion_window="1h",
        created=now,
        expires=now + seconds,
        output_seconds=3600,
    )


def read(store: Store, id: str | None) -> dict[str, Any]:
    """Custom id → line."""
    if id is None:
        return {}
    found = [json.loads(raw) for raw in store.path(store.files[id]).read_bytes().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def driven(
    store: Store, host: FakeHost, work: Callable[[Batches], Awaitable[None]], limits: Limits | None = None
):
    """Run `work` with the batches of a store, and stop them as a server does."""

    async def main() -> None:
        batches = Batches(store, limits or Limits())
        batches.start(host)
        try:
            await work(batches)
        finally:
            batches.stop()
            await asyncio.gather(*(task for _, task in batches._runs.values()), return_exceptions=True)
            assert batches._expiring is not None
            batches._expiring.cancel()
            await asyncio.gather(batches._expiring, return_exceptions=True)

    asyncio.run(main())


def run_whole(
    store: Store, host: FakeHost, data: bytes, limits: Limits | None = None, **more: Any
) -> StoredBatch:
    batch = batch_of(added(store, data), **more)

    async def work(batches: Batches) -> None:
        await batches.create(batch)
        await until(lambda: batch.ended)

    driven(store, host, work, limits)
    return batch


def test_rows_are_answered_and_errors_are_apart(store: Store) -> None:
    refused = Reply(status=400, body=b'{"error": {"message": "no"}}', request_id="req-x")
    host = FakeHost(lambda body, _: refused if body["row"] % 5 == 0 else None)
    batch = run_whole(store, host, text(*map(line, range(50))))
    assert batch.status == "completed"
    assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (50, 40, 10)
    good, bad = read(store, batch.output_file_id), read(store, batch.error_file_id)
    assert good.keys() == {f"r{row}" for row in range(50) if row % 5}
    assert bad.keys() == {f"r{row}" for row in range(0, 50, 5)}
    assert good["r7"]["response"] == {
        "status_code": 200,
        "request_id": "req-7",
        "body": {"row": 7, "usage": USAGE},
    }
    assert good["r7"]["error"] is None
    assert good["r7"]["id"].startswith("batch_req_")
    assert bad["r5"]["response"] == {
        "status_code": 400,
        "request_id": "req-x",
        "body": {"error": {"message": "no"}},
    }
    assert batch.usage.public()["total_tokens"] == 200
    assert batch.usage.public()["input_tokens_details"] == {"cached_tokens": 40}
    assert max(map(len, host.together)) <= host.limit
    public = batch.public()
    assert all(public[f"{name}_at"] for name in ("in_progress", "finalizing", "completed"))
    assert public["failed_at"] is None
    assert public["errors"] is None


def test_a_batch_without_errors_has_no_error_file(store: Store) -> None:
    batch = run_whole(store, FakeHost(), text(line(1)))
    assert batch.error_file_id is None
    assert batch.output_file_id is not None


def test_a_batch_of_errors_alone_completes_without_an_output_file(store: Store) -> None:
    host = FakeHost(lambda body, _: Reply(status=404, body=b"{}", request_id=""))
    batch = run_whole(store, host, text(line(1), line(2)))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert read(store, batch.error_file_id).keys() == {"r1", "r2"}


@pytest.mark.parametrize("kills", [0, 1, 3])
def test_a_restart_asks_only_for_rows_without_a_line(folder: Path, kills: int) -> None:
    """The server is stopped after some rows, `kills` times, and once a line is cut off as by a kill."""
    data = text(*(line(row, seconds=0.01) for row in range(30)))
    store, asked = Store(folder, Limits()), Counter[int]()
    batch = batch_of(added(store, data))
    store.keep(batch)
    for stop in (*range(kills), None):
        host = FakeHost()

        async def work(batches: Batches, stop: int | None = stop) -> None:
            found = batches.store.batches[batch.id]
            done = 6 * (stop + 1) if stop is not None else 30
            await until(lambda: found.counts.completed >= done and (stop is not None or found.ended))

        driven(store, host, work)
        store.close()
        if stop == 0:
            with (folder / "batches" / f"{batch.id}.output").open("r+b") as file:
                file.truncate(file.seek(0, os.SEEK_END) - 10)
        store, asked = Store(folder, Limits()), asked + host.asked
    found = store.batches[batch.id]
    assert (found.status, found.counts.completed) == ("completed", 30)
    assert read(store, found.output_file_id).keys() == {f"r{row}" for row in range(30)}
    assert found.usage.output_tokens == 60
    # Rows in progress are computed twice, and the one whose line was cut off.
    assert sum(asked.values()) <= 30 + kills * 4 + (kills > 0)
    store.close()


def test_a_kill_while_results_become_files_leaves_them_once(folder: Path) -> None:
    store = Store(folder, Limits())
    batch = run_whole(store, FakeHost(), text(line(1), line(2)))
    whole = batch.output_file_id
    store.close()
    # As if it had been killed before the last record was written, and before the file's own.
    path = folder / "batches" / f"{batch.id}.json"
    record = json.loads(path.read_bytes()) | {"status": "finalizing", "output_file_id": None}
    for moved in (False, True):
        path.write_text(json.dumps(record))
        if moved:
            (folder / "files" / f"{whole}.data").rename(folder / "batches" / f"{batch.id}.output")
        store, host = Store(folder, Limits()), FakeHost()
        found = store.batches[batch.id]
        driven(store, host, lambda _, found=found: until(lambda: found.ended))
        assert found.output_file_id == whole
        assert read(store, whole).keys() == {"r1", "r2"}
        assert not host.asked
        store.close()


def test_a_cancelled_batch_keeps_what_it_has(store: Store) -> None:
    rows = [line(row) for row in range(4)] + [line(row, seconds=60) for row in range(4, 20)]
    batch = batch_of(added(store, text(*rows)))

    async def work(batches: Batches) -> None:
        await batches.create(batch)
        await until(lambda: batch.counts.completed == 4)
        await batches.cancel(batch)
        assert batch.status == "cancelling"
        await until(lambda: batch.ended)
        await until(lambda: not batches.running)
        with pytest.raises(ApiError, match="the batch is cancelled") as error:
            await batches.cancel(batch)
        assert error.value.status == 409

    driven(store, FakeHost(), work)
    assert batch.status == "cancelled"
    assert read(store, batch.output_file_id).keys() == {"r0", "r1", "r2", "r3"}
    assert batch.public()["cancelling_at"]
    assert batch.public()["cancelled_at"]


def test_what_is_left_when_the_window_ends_expires_row_by_row(store: Store) -> None:
    rows = [line(0)] + [line(row, seconds=60) for row in range(1, 8)]
    batch = run_whole(store, FakeHost(), text(*rows), seconds=0.5)
    assert batch.status == "expired"
    assert read(store, batch.output_file_id).keys() == {"r0"}
    left = read(store, batch.error_file_id)
    assert left.keys() == {f"r{row}" for row in range(1, 8)}
    assert left["r3"]["response"] is None
    assert left["r3"]["error"]["code"] == "batch_expired"


def test_rows_wait_for_room_and_for_the_engine(store: Store) -> None:
    def busy(body: dict[str, Any], before: int) -> Reply | None:
        status = {0: 429, 1: 503}.get(before)
        if status is None:
            return None
        return Reply(status=status, body=b"{}", request_id="", retry_after_s=0.01)

    batch = run_whole(store, FakeHost(busy), text(*map(line, range(6))))
    assert (batch.counts.completed, batch.counts.failed) == (6, 0)


def test_a_row_that_ends_the_engine_twice_is_an_error_and_no_other_is(store: Store) -> None:
    host = FakeHost()

    def dies(body: dict[str, Any], before: int) -> Reply | None:
        if body["row"] == 3:
            host.life += 1
            for other in host.now - {3}:
                lost.add(other)
        if body["row"] == 3 or body["row"] in lost:
            lost.discard(body["row"])
            return Reply(status=503, body=b"{}", request_id="", retry_after_s=0)
        return None

    lost = set[int]()
    host._refuse = dies
    batch = run_whole(
        store, host, text(*(line(row, seconds=0.05 if row != 3 else 0.02) for row in range(12)))
    )
    assert (batch.status, batch.counts.completed, batch.counts.failed) == ("completed", 11, 1)
    bad = read(store, batch.error_file_id)
    assert bad["r3"]["response"]["status_code"] == 500
    assert bad["r3"]["response"]["body"]["error"]["code"] == "engine_died"
    assert host.asked[3] == 2
    assert {3} in host.together  # the second time it was alone
    assert host.settled >= 1


def test_batches_take_turns(store: Store) -> None:
    order = list[str]()
    host = FakeHost(lambda body, _: order.append(body["batch"]))
    host.limit = 2
    data = {name: text(*(line(row, batch=name, seconds=0.01) for row in range(20))) for name in "ab"}
    batches = [batch_of(added(store, data[name])) for name in "ab"]

    async def work(running: Batches) -> None:
        for batch in batches:
            await running.create(batch)
        await until(lambda: all(batch.ended for batch in batches))

    driven(store, host, work)
    assert order.index("b") < 10
    assert "a" in order[-10:]


def test_rows_wait_while_no_place_is_free(store: Store) -> None:
    host = FakeHost()
    host.limit = 0
    batch = batch_of(added(store, text(line(1))))

    async def work(batches: Batches) -> None:
        await batches.create(batch)
        await until(lambda: batch.status == "in_progress")
        await asyncio.sleep(0.2)
        assert not host.asked
        host.limit = 1
        await until(lambda: batch.ended)

    driven(store, host, work)
    assert batch.status == "completed"


FAULTS = {
    "invalid_json_line": b"{]\n",
    "invalid_request": text({"custom_id": 1, "method": "POST", "url": CHAT, "body": {}}),
    "invalid_request (a list)": b"[1, 2]\n",
    "invalid_request (null)": b"null\n",
    "invalid_request (nothing else)": b'{"custom_id": "a"}\n',
    "duplicate_custom_id": text(line(1), line(1)),
    "invalid_method": text(line(1) | {"method": "GET"}),
    "mismatched_url": text(line(1, url="/v1/embeddings")),
    "invalid_body": text(line(1) | {"body": []}),
    "invalid_custom_id": text(line(1) | {"custom_id": ""}),
    "empty_file": b"\n \n",
    "too_many_requests": text(*map(line, range(5))),
    "line_too_long": text(line(1, long="x" * 5000)),
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_file_that_is_no_batch_fails_with_the_line_and_the_reason(tmp_path: Path, code: str) -> None:
    (tmp_path / "in").write_bytes(FAULTS[code])
    with pytest.raises(FileFaults) as fault:
        lines.check(tmp_path / "in", CHAT, most_rows=4, most_bytes=4096)
    assert fault.value.faults[-1].code == code.partition(" ")[0]


def test_a_failed_batch_says_why(store: Store) -> None:
    host = FakeHost()
    batch = run_whole(store, host, text(line(1)) + b"nonsense\n" + text(line(1)))
    assert batch.status == "failed"
    found = batch.public()
    assert [(each["line"], each["code"]) for each in found["errors"]["data"]] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
    ]
    assert found["failed_at"]
    assert found["output_file_id"] is None
    assert not host.asked


def test_marks_of_other_systems_and_blank_lines_are_no_faults(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + text(line(1), line(2)).replace(b"\n", b"\r\n\r\n") + text(line(3)).rstrip()
    (tmp_path / "in").write_bytes(data)
    assert lines.check(tmp_path / "in", CHAT, most_rows=4, most_bytes=4096) == 3
    assert [row.custom_id for row in lines.rows(tmp_path / "in", 4096)] == ["r1", "r2", "r3"]


def test_a_full_store_fails_the_batch_and_keeps_its_rows(folder: Path) -> None:
    limits = Limits(stored_bytes=4000)
    store = Store(folder, limits)
    batch = run_whole(store, FakeHost(), text(*map(line, range(20))), limits)
    assert batch.status == "failed"
    assert batch.faults[0].code == "storage_full"
    assert 0 < len(read(store, batch.output_file_id)) < 20
    assert store.bytes <= 4000
    store.close()


def test_the_store_is_bounded_and_counts_again_after_a_restart(folder: Path) -> None:
    store = Store(folder, Limits(stored_files=2, stored_bytes=100))
    one = added(store, b"x" * 60)
    with pytest.raises(ApiError, match="more than 100 bytes") as error:
        added(store, b"x" * 60)
    assert error.value.status == 413
    added(store, b"x" * 40)
    with pytest.raises(ApiError, match="delete some") as error:
        added(store, b"")
    assert error.value.status == 429
    store.close()
    store = Store(folder, Limits(stored_bytes=100))
    assert store.bytes == 100
    assert next(iter(store.files)) == one.id
    store.delete(store.file(one.id, ""))
    assert store.bytes == 40
    assert not list((folder / "incoming").iterdir())
    store.close()


def test_too_many_batches_that_have_not_ended_are_refused(store: Store) -> None:
    host = FakeHost()
    host.limit = 0
    file = added(store, text(line(1)))

    async def work(batches: Batches) -> None:
        await batches.create(batch_of(file))
        with pytest.raises(ApiError, match="1 batches have not ended"):
            await batches.create(batch_of(file))
        with pytest.raises(ApiError, match="reads the file; cancel it first") as error:
            store.delete(file)
        assert error.value.status == 409

    driven(store, host, work, Limits(batches_open=1))


def test_files_and_batches_grow_old(folder: Path) -> None:
    store = Store(folder, Limits())
    batch = run_whole(store, FakeHost(), text(line(1)))
    assert batch.output_file_id is not None
    store.files[batch.output_file_id].expires = time.time() - 1
    with pytest.raises(ApiError, match="there is no file"):
        store.file(batch.output_file_id, "")
    store.expire()
    assert batch.output_file_id not in store.files
    assert batch.id in store.batches
    batch.at["completed"] = time.time() - Limits().stored_seconds - 1
    store.expire()
    assert not store.batches
    assert [path.name for path in (folder / "batches").iterdir()] == []
    store.close()


def test_one_server_uses_a_folder(store: Store, folder: Path) -> None:
    with pytest.raises(WorkloadError, match="used by another server"):
        Store(folder, Limits())


def test_a_folder_that_others_write_to_is_not_used(tmp_path: Path) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(WorkloadError, match="what clients send would be kept there"):
        Store(place, Limits())


def test_nobody_else_reads_the_folder_and_keys_are_not_in_it(store: Store, folder: Path) -> None:
    owner = store.owner(b"secret")
    file = added(store, b"x", owner)
    assert owner != store.owner(b"other") != store.owner(None) == ""
    with pytest.raises(ApiError, match="there is no file"):
        store.file(file.id, store.owner(b"other"))
    for name in ("files", "batches", "incoming"):
        assert (folder / name).stat().st_mode & 0o077 == 0
    assert all(b"secret" not in path.read_bytes() for path in folder.rglob("*") if path.is_file())
