"""Files and batches over HTTP, with OpenAI's client and a fake engine."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import Trouble
from http_support import MODEL, Running, error, serving, submits, wait_until
from openai.types.chat import ChatCompletion
from starlette.routing import Router

from torchwright.serve.http.batch_host import BatchHost
from torchwright.serve.http.guard import Guard
from torchwright.serve.http.hosts import Hosts
from torchwright.serve.limits import Limits
from torchwright.serve.wire.messages import ToEngine

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)
SAYS = {"model": MODEL, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 6}
TEXT = {"model": MODEL, "prompt": "one two three", "max_tokens": 6}
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(batches=tmp_path_factory.mktemp("served") / "batches") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def client_of(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=30)


def text(*bodies: dict[str, Any], url: str = CHAT) -> bytes:
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def begun(client: openai.OpenAI, data: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def completed(client: openai.OpenAI, batch: Any) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def lines(client: openai.OpenAI, id: str | None) -> dict[str, Any]:
    assert id is not None
    return {line["custom_id"]: line for line in map(json.loads, client.files.content(id).text.splitlines())}


def test_a_batch_by_openais_client_from_upload_to_deletion(client: openai.OpenAI) -> None:
    file = client.files.create(file=("my requests.jsonl", text(SAYS, SAYS | {"n": 2})), purpose="batch")
    assert (file.filename, file.purpose, file.status) == ("my requests.jsonl", "batch", "processed")
    assert client.files.content(file.id).content == text(SAYS, SAYS | {"n": 2})
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "a test"}
    )
    assert batch.object == "batch"
    assert batch.expires_at == batch.created_at + 86_400
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.metadata == {"for": "a test"}
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}
    found = lines(client, batch.output_file_id)
    alone = client.chat.completions.create(**SAYS)
    body = ChatCompletion.model_validate(found["r0"]["response"]["body"])
    assert body.choices == alone.choices
    assert body.usage == alone.usage
    assert len(found["r1"]["response"]["body"]["choices"]) == 2
    assert batch.usage is not None
    counted = [line["response"]["body"]["usage"] for line in found.values()]
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in counted)
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in counted)
    result = client.files.retrieve(batch.output_file_id)
    assert result.purpose == "batch_output"
    assert result in client.files.list(purpose="batch_output").data
    assert result.filename == f"{batch.id}_output.jsonl"
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)
    assert client.files.delete(file.id).deleted


@pytest.mark.parametrize(
    ("endpoint", "body"), [(COMPLETIONS, TEXT), (RESPONSES, {"input": "one two", "max_output_tokens": 4})]
)
def test_batches_of_the_other_endpoints_of_a_language_model(
    client: openai.OpenAI, http: httpx.Client, endpoint: str, body: dict[str, Any]
) -> None:
    batch = ended(client, begun(client, text(body, url=endpoint), endpoint))
    found = lines(client, batch.output_file_id)["r0"]["response"]["body"]
    alone = http.post(endpoint, json=body).json()
    for same in ("choices", "usage", "object"):
        assert found.get(same) == alone.get(same)
    assert batch.usage.output_tokens > 0


def test_batches_of_a_sentence_encoder(tmp_path: Path) -> None:
    with serving(kind="encoder", batches=tmp_path / "batches") as server, client_of(server) as client:
        data = text({"input": ["a", "bcd"]}, {"input": "ef"}, url=EMBEDDINGS)
        batch = ended(client, begun(client, data, EMBEDDINGS))
        found = lines(client, batch.output_file_id)
        vectors = [each["embedding"] for each in found["r0"]["response"]["body"]["data"]]
        assert vectors == [[1.0, 0.5], [3.0, 0.5]]
        assert batch.usage.input_tokens == 6
        with pytest.raises(openai.BadRequestError, match="no batches of '/v1/chat/completions'"):
            begun(client, text(SAYS))


def test_what_is_wrong_with_a_row_is_in_the_error_file(client: openai.OpenAI) -> None:
    wrong = {
        "the model": SAYS | {"model": "other"},
        "a field": SAYS | {"max_tokens": "six"},
        "an unknown field": SAYS | {"nonsense": 1},
        "a stream": SAYS | {"stream": True},
        "too long": SAYS | {"max_tokens": 100_000},
        "an unfetched picture": SAYS
        | {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x.example/a"}}],
                }
            ]
        },
        "the engine": SAYS | {"priority": int(Trouble.FAIL)},
    }
    batch = ended(client, begun(client, text(SAYS, *wrong.values(), SAYS)))
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 9, "completed": 2, "failed": 7}
    assert lines(client, batch.output_file_id).keys() == {"r0", "r8"}
    found = lines(client, batch.error_file_id)
    statuses = {name: found[f"r{place}"]["response"]["status_code"] for place, name in enumerate(wrong, 1)}
    assert statuses == dict.fromkeys(wrong, 400) | {"the model": 404, "the engine": 500}
    assert "not streamed" in found["r4"]["response"]["body"]["error"]["message"]


def test_a_file_that_is_no_batch_fails_with_its_lines(client: openai.OpenAI) -> None:
    batch = ended(client, begun(client, text(SAYS) + b"nonsense\n"))
    assert batch.status == "failed"
    assert [(each.line, each.code) for each in batch.errors.data] == [(2, "invalid_json_line")]
    assert batch.output_file_id is None


def test_a_cancelled_batch_leaves_the_engine_and_keeps_its_answers(
    server: Running, client: openai.OpenAI
) -> None:
    slow = TEXT | {"max_tokens": 900, "priority": int(Trouble.SLOW)}
    batch = begun(client, text(TEXT, *[slow] * 3, url=COMPLETIONS), COMPLETIONS)
    wait_until(lambda: completed(client, batch) == 1)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert lines(client, batch.output_file_id).keys() == {"r0"}
    wait_until(server.cancelled)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_rows_come_behind_interactive_requests(
    server: Running, client: openai.OpenAI, sent: list[ToEngine]
) -> None:
    before = server.service.metrics.render()
    bodies = [SAYS, SAYS | {"priority": -100}, SAYS | {"priority": 60}]
    ended(client, begun(client, text(*bodies)))
    assert sorted(submit.priority for submit in submits(sent)) == [50, 50, 60]
    client.chat.completions.create(**SAYS)
    assert submits(sent)[-1].priority == 0

    def observed(metrics: bytes) -> float:
        line = next(each for each in metrics.splitlines() if b"time_to_first_token_seconds_count" in each)
        return float(line.split()[-1])

    # Rows do not count among the times of interactive requests.
    assert observed(server.service.metrics.render()) == observed(before) + 1


def test_few_rows_run_next_to_interactive_requests(server: Running) -> None:
    guard = Guard(Router(), keys=[], hosts=Hosts(), log_requests=False, count=lambda path, status: None)
    host = BatchHost(server.service, guard, {})
    alone = host.places()
    guard.answering = 1
    assert server.client.ready is not None
    assert 1 <= host.places() < alone < server.client.ready.max_running


@pytest.mark.slow
def test_a_row_that_ends_the_engine_is_an_error_and_the_rest_is_answered(
    tmp_path: Path,
) -> None:
    with serving(batches=tmp_path / "batches", early_seconds=0.1) as server, client_of(server) as client:
        rows = [TEXT | {"priority": int(Trouble.DIE)} if place == 2 else TEXT for place in range(5)]
        batch = begun(client, text(*rows, url=COMPLETIONS), COMPLETIONS)
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
        batch = client.batches.retrieve(batch.id)
        assert lines(client, batch.output_file_id).keys() == {"r0", "r1", "r3", "r4"}
        [fault] = lines(client, batch.error_file_id).values()
        assert fault["custom_id"] == "r2"
        assert fault["response"]["body"]["error"]["code"] == "engine_died"
        assert server.service.client.restarts == 2


def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    slow = TEXT | {"max_tokens": 60, "priority": int(Trouble.SLOW)}
    with serving(batches=tmp_path / "batches") as server, client_of(server) as client:
        batch = begun(client, text(TEXT, *[slow] * 3, url=COMPLETIONS), COMPLETIONS)
        wait_until(lambda: completed(client, batch) == 1)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.cancelled() and server.server.should_exit, 10)  # no row is waited for
    with serving(batches=tmp_path / "batches") as server, client_of(server) as client:
        batch = ended(client, batch)
        assert batch.status == "completed"
        assert lines(client, batch.output_file_id).keys() == {"r0", "r1", "r2", "r3"}
        totals = server.service.client.stats
        assert totals is not None
        assert totals.generated_tokens == 3 * 60  # the first row was not computed again


def test_lists_have_pages(tmp_path: Path) -> None:
    with serving(batches=tmp_path / "batches") as server, client_of(server) as client:
        files = [client.files.create(file=(f"{i}", text(SAYS)), purpose="batch").id for i in range(5)]
        assert [file.id for file in client.files.list(limit=2)] == files[::-1]  # all pages
        assert [file.id for file in client.files.list(order="asc").data] == files
        assert client.files.list(purpose="batch_output").data == []
        made = [
            client.batches.create(input_file_id=files[0], endpoint=CHAT, completion_window="24h").id
            for _ in range(3)
        ]
        page = client.batches.list(limit=2)
        assert [batch.id for batch in page.data] == [made[2], made[1]]
        assert page.has_more
        assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
        with httpx.Client(base_url=server.url) as http:
            for query, param in (
                ("limit=0", "limit"),
                ("limit=x", "limit"),
                ("after=no", "after"),
                ("more=1", "more"),
            ):
                answer = http.get(f"/v1/batches?{query}")
                assert (answer.status_code, error(answer)["param"]) == (400, param)
            assert error(http.get("/v1/files?order=up"))["param"] == "order"


def test_a_keys_files_and_batches_are_seen_by_that_key_only(tmp_path: Path) -> None:
    with (
        serving(keys=["one", "two"], batches=tmp_path / "batches") as server,
        client_of(server, "one") as one,
        client_of(server, "two") as two,
    ):
        batch = ended(one, begun(one, text(SAYS)))
        assert not two.files.list().data
        assert not two.batches.list().data
        for ask in (
            lambda: two.files.retrieve(batch.input_file_id),
            lambda: two.files.content(batch.output_file_id),
            lambda: two.files.delete(batch.output_file_id),
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert len(one.files.list().data) == 2
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/v1/files").status_code == 401


def test_without_the_option_nothing_is_kept() -> None:
    with serving() as server, httpx.Client(base_url=server.url) as http:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/b")):
            answer = http.request(method, path)
            assert answer.status_code == 403
            assert error(answer)["code"] == "batches_not_allowed"


WRONG = {
    "no file": ({"purpose": "batch"}, None, "file"),
    "another purpose": ({"purpose": "fine-tune"}, b"x", "purpose"),
    "no purpose": ({}, b"x", "purpose"),
    "an unknown field": ({"purpose": "batch", "more": "x"}, b"x", "more"),
    "half an expiry": ({"purpose": "batch", "expires_after[seconds]": "3600"}, b"x", "expires_after.anchor"),
    "a short expiry": (
        {"purpose": "batch", "expires_after[seconds]": "5", "expires_after[anchor]": "created_at"},
        b"x",
        "expires_after.seconds",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_uploads_that_are_wrong_are_refused_and_leave_nothing(
    server: Running, http: httpx.Client, case: str
) -> None:
    fields, data, param = WRONG[case]
    assert server.service.batches is not None
    store = server.service.batches.store
    before = store.bytes, len(store.files)
    files = {"file": ("a", data)} if data is not None else {"other": (None, b"")}
    answer = http.post("/v1/files", data=fields, files=files)
    assert answer.status_code == 400, answer.text
    if data is not None and param is not None:
        assert error(answer)["param"] == param
    assert (store.bytes, len(store.files)) == before


def test_times_to_live_are_the_clients(client: openai.OpenAI) -> None:
    kept: Any = {"anchor": "created_at", "seconds": 7200}
    file = client.files.create(file=("a", text(SAYS)), purpose="batch", expires_after=kept)
    assert file.expires_at == file.created_at + 7200
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", output_expires_after=kept
    )
    found = client.files.retrieve(ended(client, batch).output_file_id)
    assert found.expires_at == found.created_at + 7200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"completion_window": "24m"}, "completion_window"),
        ({"completion_window": "169h"}, None),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"metadata": {"a": 1}}, None),
        ({"metadata": {str(i): "" for i in range(17)}}, None),
        ({"input_file_id": "../salt"}, "file_id"),
        ({"priority": 1}, "priority"),
    ],
)
def test_batches_that_are_wrong_are_refused(
    client: openai.OpenAI, http: httpx.Client, more: dict[str, Any], param: str | None
) -> None:
    file = client.files.create(file=("a", text(SAYS)), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    answer = http.post("/v1/batches", json=asked | more)
    assert answer.status_code in (400, 404), answer.text
    if param is not None:
        assert error(answer)["param"] == param


@pytest.mark.parametrize("name", ["input_file_id", "endpoint", "completion_window"])
def test_a_batch_without_a_field_is_refused_by_its_name(http: httpx.Client, name: str) -> None:
    """litellm#37146: 500, which clients try again."""
    asked = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    del asked[name]
    answer = http.post("/v1/batches", json=asked)
    assert (answer.status_code, error(answer)["param"]) == (400, name)


def test_results_are_no_input_and_a_file_in_use_stays(server: Running, client: openai.OpenAI) -> None:
    batch = ended(client, begun(client, text(SAYS)))
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        client.batches.create(input_file_id=batch.output_file_id, endpoint=CHAT, completion_window="24h")
    slow = TEXT | {"max_tokens": 900, "priority": int(Trouble.SLOW)}
    batch = begun(client, text(slow, url=COMPLETIONS), COMPLETIONS)
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.slow
def test_a_reader_that_stops_is_dropped(tmp_path: Path) -> None:
    limits = Limits(unread_seconds=0.2)
    with serving(batches=tmp_path / "batches", limits=limits) as server, client_of(server) as client:
        file = client.files.create(file=("a", b"x" * (32 << 20)), purpose="batch")  # more than sockets hold
        with httpx.stream("GET", f"{server.url}/v1/files/{file.id}/content", timeout=10) as answer:
            wait_until(lambda: b'status="499"' in server.service.metrics.render())
            with pytest.raises(httpx.HTTPError):
                answer.read()


def test_a_create_that_is_sent_again_makes_no_second_batch(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", text(SAYS)), purpose="batch")

    def create(key: str, **more: Any) -> Any:
        wanted: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        wanted |= more
        return client.batches.create(**wanted, extra_headers={"Idempotency-Key": key})

    first = create("one")
    assert create("one").id == first.id
    assert ended(client, first).status == "completed"
    assert create("one").status == "completed"
    second = create("two")
    assert second.id != first.id
    assert ended(client, second).status == "completed"
    with pytest.raises(openai.ConflictError, match=f"another request, which made '{first.id}'"):
        create("one", metadata={"for": "another"})
    with pytest.raises(openai.BadRequestError, match="1 to 255 characters, this one 256"):
        create("k" * 256)


def test_metrics_count_batches_and_their_requests(client: openai.OpenAI, http: httpx.Client) -> None:
    def figure(name: str) -> float:
        found = [
            line for line in http.get("/metrics").text.splitlines() if line.startswith(f"torchwright:{name}")
        ]
        assert len(found) == 1
        return float(found[0].rpartition(" ")[2])

    completed = f'batches{{model_name="{MODEL}",status="completed"}}'
    before, stored = figure(completed), figure("batch_storage_bytes")
    assert ended(client, begun(client, text(SAYS, TEXT))).status == "completed"
    assert figure(completed) == before + 1
    assert figure("batch_storage_bytes") > stored
    for state in ("waiting", "running", "completed", "failed"):
        assert figure(f'batch_requests{{model_name="{MODEL}",state="{state}"}}') == 0
