"""The server against a fake engine when clients and engines misbehave: what is bounded, who may ask, what restarts."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h11
import httpx
import pytest
from fake_engine import LOADING, NEVER, Trouble
from http_support import MODEL, LastingServer, Running, error, events, fake_command, serving, wait_until

from torchwright.serve.http.app import OPERATIONS
from torchwright.serve.limits import Limits

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    with serving(hosts=["*.Example.com"]) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.slow
def test_a_slow_reader_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "torchwright.serve")
    with serving(limits=Limits(unread_seconds=0.3)) as running:
        address = running.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address[0], int(address[1])))
            body = json.dumps({"prompt": PROMPT, "n": 64, "max_tokens": 900, "stream": True}).encode()
            head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            head = f"POST /v1/completions HTTP/1.1\r\n{head}"
            client.sendall(head.encode() + body)
            wait_until(lambda: "slow reader" in caplog.text)
            wait_until(running.cancelled)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_outputs_do_not_pile_up_for_a_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "torchwright.serve")
    with serving(limits=Limits(unread_outputs=1)) as running, httpx.Client(base_url=running.url) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            http.post("/v1/completions", json={"prompt": PROMPT, "n": 64, "max_tokens": 900, "stream": True})
        wait_until(lambda: "slow reader" in caplog.text)


def test_the_key_is_asked_for_and_compared() -> None:
    with serving(keys=["right", "second"]) as running, httpx.Client(base_url=running.url) as http:
        assert http.get("/v1/models").status_code == 401
        missing = http.post("/v1/completions", json={"prompt": "x"})
        assert error(missing)["code"] == "invalid_api_key"
        assert missing.headers["www-authenticate"] == "Bearer"
        for given, status in {
            "Bearer wrong": 401,
            "Bearer second": 200,
            "bearer right": 200,  # the scheme is in any case (RFC 9110)
            "BEARER  right": 200,
            "Basic right": 401,
            "Bearer": 401,
        }.items():
            response = http.get("/v1/models", headers={"Authorization": given})
            assert response.status_code == status, given
        assert http.get("/metrics").status_code == 401
        assert [http.get(path).status_code for path in ("/", "/docs", "/health", "/ready")] == [200] * 4


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", None, 200),
        ("LOCALHOST.", None, 200),
        ("api.localhost", None, 200),
        ("127.0.0.1", None, 200),
        ("[::1]:8000", None, 200),
        ("192.0.2.7:8000", None, 200),  # an address belongs to nobody's page
        ("box.example.com", None, 200),
        ("evil.example", None, 403),
        ("evil.example:8000", "http://evil.example:8000", 403),
        ("localhost.evil.example", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("localhost@evil.example", None, 403),
        ("[::1", None, 403),
        ("localhost:8000", "http://localhost:8000", 200),
        ("192.0.2.7:8000", "http://192.0.2.7:8000", 200),
        ("localhost:8000", "http://127.0.0.1:3000", 200),
        ("localhost:8000", "https://box.example.com", 200),
        ("localhost:8000", "https://evil.example", 403),
        ("localhost:8000", "http://192.0.2.7", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "http://[::1", 403),
    ],
)
def test_a_foreign_page_does_not_reach_a_server_without_a_key(
    named: Running, host: str, origin: str | None, status: int
) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    with httpx.Client(base_url=named.url, headers=headers) as http:
        asked = [http.get("/"), http.get("/docs"), http.get("/health")]
        asked += [http.post("/v1/completions", json={"prompt": "x"})]
    assert [response.status_code for response in asked] == [status] * 4
    if status == 403:
        assert error(asked[0])["code"] == "host_not_allowed"
        assert re.search("start it with --allowed-(host|origin) ", error(asked[0])["message"])


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize(
    ("origin", "read"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1:5173", True),
        ("https://box.example.com", True),  # by --allowed-host
        ("https://chat.example.org", True),  # by --allowed-origin
        ("https://chat.example.org.evil.example", False),
        ("http://chat.example.org", False),
        ("https://evil.example", False),
        ("null", False),
    ],
)
@pytest.mark.parametrize("keyed", [False, True])
def test_a_browser_lets_allowed_pages_read_answers(
    browsed: tuple[Running, Running], keyed: bool, origin: str, read: bool
) -> None:
    """The preflight carries no key, and its answer names the page itself, never all."""
    headers = {"origin": origin} | ({"authorization": "Bearer k"} if keyed else {})
    with httpx.Client(base_url=browsed[keyed].url) as http:
        before = http.options("/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        refused = http.post("/v1/completions", json={"prompt": 1}, headers=headers)
    for response in (before, answer, refused):
        assert response.headers.get("access-control-allow-origin") == (origin if read else None)
    assert (before.status_code == 204) == read
    if read:
        assert before.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert answer.status_code == 200
        assert answer.headers["vary"] == "Origin"


@pytest.fixture(scope="module")
def browsed() -> Iterator[tuple[Running, Running]]:
    """A server without keys and one with a key, for pages of two places."""
    names: dict[str, Any] = {"hosts": ["*.example.com"], "origins": ["https://chat.example.org"]}
    with serving(**names) as without, serving(keys=["k"], **names) as keyed:
        yield without, keyed


def test_a_local_page_is_told_how_it_is_allowed() -> None:
    with serving(origins=["null"]) as running:
        assert httpx.get(running.url + "/v1/models", headers={"origin": "null"}).status_code == 200
    with serving() as running:
        refused = httpx.get(running.url + "/v1/models", headers={"origin": "null"})
    assert "start it with --allowed-origin null" in error(refused)["message"]


def test_with_a_key_any_name_will_do() -> None:
    """A page has no key, and a server that others reach has names that it does not know."""
    headers = {"host": "gateway.example", "origin": "https://gateway.example", "authorization": "Bearer k"}
    with serving(keys=["k"]) as running:
        assert httpx.get(running.url + "/v1/models", headers=headers).status_code == 200


def test_the_engines_death_is_a_503_and_it_is_restarted(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as http:
        client = running.service.client
        slow = {"prompt": PROMPT, "max_tokens": 900, "priority": Trouble.SLOW}
        with ThreadPoolExecutor(4) as pool:
            whole = [pool.submit(http.post, "/v1/completions", json=slow) for _ in range(2)]
            streamed = pool.submit(http.post, "/v1/completions", json={**slow, "stream": True})
            wait_until(lambda: client.waiting == 3)
            wait_until(lambda: client.stats is not None and client.stats.running == 3)
            died = http.post("/v1/completions", json={"prompt": PROMPT, "priority": Trouble.DIE})
            for response in (died, *(job.result() for job in whole)):
                assert response.status_code == 503
                assert "the engine died (exit code 3)" in error(response)["message"]
                assert response.headers["retry-after"] == "1"
            last = events(streamed.result().text)[-1]
            assert "the engine died" in last["error"]["message"]
        wait_until(lambda: client.state == "ready")
        assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200
        assert client.restarts == 1
    assert "3 requests were waiting" in caplog.text or "4 requests were waiting" in caplog.text


def test_before_the_engine_is_ready_every_endpoint_says_so_at_once() -> None:
    with serving(kind="loading") as running, httpx.Client(base_url=running.url, timeout=30) as http:
        for operation in OPERATIONS:
            path = operation.path.replace("{model:path}", MODEL)
            response = http.request(operation.method, path, content=b"not even read")
            if path in ("/metrics", "/openapi.json"):
                assert response.status_code == 200
                continue
            if operation.before_ready and path.startswith(("/v1/files", "/v1/batches")):
                assert response.status_code == 403, (
                    path
                )  # what is kept is read without an engine; here is nothing
                continue
            assert response.status_code == 503, path
            assert response.headers["retry-after"] == "1"
            assert LOADING in response.text
        assert http.get("/").status_code == 200


@pytest.mark.slow
def test_the_server_is_not_ready_while_its_engine_loads_again() -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as http:
        client = running.service.client
        client._launcher._argv = fake_command("loading")
        client.kill()
        wait_until(lambda: client.detail == LOADING)
        for response in (http.get("/ready"), http.get("/health"), http.post("/v1/completions", json=body)):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        client._launcher._argv = fake_command("decoder")
        client.kill()
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.get("/health").json()["status"] == "ready"
        assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(silent_seconds=0.4) as running, httpx.Client(base_url=running.url, timeout=30) as http:
        response = http.post("/v1/completions", json={"prompt": PROMPT, "priority": Trouble.HANG})
        assert response.status_code == 503
        assert "SIGKILL" in error(response)["message"]
        wait_until(lambda: http.get("/ready").status_code == 200)
    assert "has said nothing" in caplog.text


@pytest.mark.plain("broken-the engine ended before it was ready (exit code 4)")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("broken", "the engine ended before it was ready (exit code 4)"),
        ("without memory", "the engine ended before it was ready (out of memory)"),
        ("killed", "the engine died 4 times in a row (signal SIGKILL: most likely out of memory)"),
    ],
)
def test_an_engine_that_cannot_live_is_given_up(kind: str, said: str) -> None:
    lasting = serving(kind=kind, server=LastingServer, backoff_seconds=(0.01,))
    with lasting as running, httpx.Client(base_url=running.url) as http:
        health = http.get("/health")
        assert health.status_code == 503
        assert said in health.json()["detail"]
        assert http.get("/ready").status_code == 503
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503


def test_an_encoder_embeds_and_writes_nothing() -> None:
    with serving(kind="encoder") as running, httpx.Client(base_url=running.url) as http:
        found = http.post("/v1/embeddings", json={"input": ["a", "bcd"]}).json()
        assert [row["embedding"] for row in found["data"]] == [[1.0, 0.5], [3.0, 0.5]]
        assert found["usage"]["prompt_tokens"] == 4
        packed = http.post("/v1/embeddings", json={"input": "ab", "encoding_format": "base64"}).json()
        raw = base64.b64decode(packed["data"][0]["embedding"])
        assert struct.unpack("<2f", raw) == (2.0, 0.5)
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 400
        assert "/v1/embeddings" in error(refused)["message"]
        assert (
            "'dimensions' is not supported"
            in error(http.post("/v1/embeddings", json={"input": "x", "dimensions": 3}))["message"]
        )


def test_a_client_that_leaves_its_embeddings_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with serving(kind="encoder") as running, httpx.Client(base_url=running.url) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/embeddings", json={"input": ["a", NEVER]}, timeout=0.2)
        wait_until(running.cancelled)
        wait_until(lambda: "499, client disconnected" in caplog.text)


def test_connections_and_headers_are_bounded() -> None:
    limits = Limits(connections=3, header_seconds=0.2)
    with serving(limits=limits) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"GET /health HT")
            slow.settimeout(10)
            assert b" 408 " in slow.recv(4096)
        with socket.create_connection((host, int(port))) as garbage:
            garbage.sendall(b"\x16\x03\x01\x00\xa5 nonsense\r\n\r\n")
            garbage.settimeout(10)
            answer = garbage.recv(4096)
            assert b" 400 " in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        wait_until(lambda: _refused(host, int(port)))


@pytest.mark.parametrize("method", ["POST /v1/chat/completions", "OPTIONS /v1/models"])
def test_a_body_of_two_lengths_is_refused_and_the_connection_closed(server: Running, method: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"{method} HTTP/1.1\r\nhost: localhost\r\norigin: http://localhost\r\n"
    head += "access-control-request-method: POST\r\n"
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(f"{head}transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n".encode())
        answer = b""
        while part := client.recv(4096):
            answer += part
    assert b" 400 " in answer
    assert b"both Transfer-Encoding and Content-Length" in answer


def test_chunks_of_a_few_bytes_are_not_read_one_by_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    next_event = h11.Connection.next_event
    monkeypatch.setattr(
        h11.Connection, "next_event", lambda self: read.append(found := next_event(self)) or found
    )
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            client.sendall(b"1\r\n \r\n" * 20_000)
        client.settimeout(10)
        answer = (
            b""  # which a reset may take with it: as an error here, or as the end after one that sendall met
        )
        with contextlib.suppress(ConnectionError):
            answer = client.recv(4096)
    assert not answer or b" 400 " in answer
    assert len(read) < 10_000


def _refused(host: str, port: int) -> bool:
    """Whether the fourth of four connections is refused."""
    sockets = [socket.create_connection((host, port)) for _ in range(4)]
    try:
        sockets[-1].settimeout(10)
        return b" 503 " in sockets[-1].recv(4096)
    finally:
        for connection in sockets:
            connection.close()


def test_an_idle_engine_is_ended_at_once() -> None:
    """Its own end, with torch, takes seconds on a busy machine."""
    with serving() as running:
        engine = running.service.client._engine
    assert engine is not None
    assert engine.process.returncode == -signal.SIGKILL


def test_threads_end_with_their_servers() -> None:
    before = threading.active_count()
    with serving():
        pass
    wait_until(lambda: threading.active_count() <= before)
