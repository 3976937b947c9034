"""What clients write stands in the log and in errors as one short line that no terminal acts on."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator

import httpx
import pytest
from http_support import Running, serving, wait_until
from starlette.responses import Response
from starlette.routing import Route, Router

from torchwright.serve.http.guard import Guard
from torchwright.serve.http.hosts import Hosts
from torchwright.serve.log import LINE_CHARACTERS, LineFormatter, one_line

FORGED = "x\n2026-01-01 torchwright.serve WARNING req-1: all is well\x1b[2K\x1b[1A\u202e"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def short_line(text: str) -> bool:
    return text.isprintable() and len(text) <= 3 * LINE_CHARACTERS


@pytest.mark.parametrize("name", [FORGED, "x" * 7_000_000], ids=["forged", "long"])
@pytest.mark.parametrize("place", ["model", "a field", "a value", "a content part", "a path"])
def test_what_a_client_writes_is_one_short_line(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, name: str, place: str
) -> None:
    message = {"role": "user", "content": "x"}
    bodies = {
        "model": {"messages": [message], "model": name},
        "a field": {"messages": [message], name: 1},
        "a value": {"messages": [message], "response_format": {"type": name}},
        "a content part": {"messages": [{"role": "user", "content": [{"type": name}]}]},
    }
    caplog.set_level(logging.INFO, "torchwright.serve")
    if place == "a path":
        response = http.get("/" + name[:4000].replace("\n", "%0a").replace("\x1b", "%1b"))
    else:
        response = http.post("/v1/chat/completions", json=bodies[place])
    assert 400 <= response.status_code < 500
    fault = response.json()["error"]
    assert short_line(fault["message"])
    assert fault["param"] is None or short_line(fault["param"])
    wait_until(lambda: response.headers["x-request-id"] in caplog.text)
    lines = [record.getMessage() for record in caplog.records if record.name == "torchwright.serve"]
    assert lines
    assert all(map(short_line, lines))


def test_probes_of_an_engine_that_loads_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "torchwright.serve")  # whatever a library has set for all
    app = Router([Route(path, Response(status_code=503)) for path in ("/ready", "/v1/models")])
    guard = Guard(app, keys=(), hosts=Hosts(), log_requests=False, count=lambda path, status: None)

    async def ask() -> None:
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/ready", "/ready", "/v1/models"):
                assert (await client.get(path)).status_code == 503

    asyncio.run(ask())
    assert [record.getMessage().split()[2] for record in caplog.records] == ["/v1/models"]


def test_both_ends_of_a_long_text_stay() -> None:
    text = one_line(f"there is no model '{'x' * 7_000_000}'; 'served' is served", 100)
    assert text.startswith("there is no model 'xx")
    assert text.endswith("x'; 'served' is served")
    assert "(7000040 characters)" in text


@pytest.mark.slow
def test_a_traceback_has_no_line_that_passes_for_a_message() -> None:
    try:
        json.loads("{" + FORGED)
        raise AssertionError("it is JSON")
    except ValueError as error:
        error.add_note(FORGED + "\n" * 1_000_000)
        found = sys.exc_info()
    record = logging.LogRecord("torchwright.serve", logging.ERROR, "", 0, "req-2: %s", (FORGED,), found)
    first, *rest = LineFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first.startswith("ERROR req-2: x\\n2026-01-01")
    assert len(rest) < 20_000
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
