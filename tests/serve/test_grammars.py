"""Grammars on their way to the engine: compiled once, sent once, and the slow ones in nobody's way."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import Trouble
from http_support import Running, serving, submits, wait_until

from torchwright.serve.api_error import unavailable
from torchwright.serve.folder import find
from torchwright.serve.grammar.compile import COMMON, GrammarCompiler, GrammarJob
from torchwright.serve.limits import Limits
from torchwright.serve.wire.messages import EngineReady, Forget, Grammar, ToEngine, encode
from torchwright.serve.workers.pool import Workers

SLOW = "root ::= " + '"a"? ' * 3000
"""It takes minutes to compile."""
PROPERTIES = {f"field_{place}": {"type": "string", "maxLength": 40} for place in range(30)}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
MOST_BYTES = 15_000
"""Ten times what a grammar of a word has, and less than two of these have."""
ONE, OTHER = ([f"{letter}{number}" for number in range(250)] for letter in "ab")
READY = EngineReady(
    kind="decoder",
    vocabulary=4096,
    context=1024,
    max_running=64,
    pages=64,
    page_tokens=16,
    stop_ids=[1],
    weight_bytes=1,
    kv_bytes=1,
    fingerprint="",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Its engine keeps two grammars of at most `MOST_BYTES` together."""
    limits = Limits(
        grammar_seconds=60, grammars_kept=2, grammars_kept_bytes=MOST_BYTES, grammars_held_bytes=MOST_BYTES
    )
    with serving(limits=limits, backoff_seconds=(0.01,)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is given to be compiled."""
    found: list[bytes] = []
    run = Workers.run
    monkeypatch.setattr(Workers, "run", lambda self, job: found.append(job) or run(self, job))
    return found


def _structured(form: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 2, "structured_outputs": form, **options}


def test_a_fault_after_all_clients_have_left_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the server's end, which ends the compiler's process."""

    async def fail(self: Workers, job: bytes) -> bytes:
        await asyncio.sleep(0.01)
        raise unavailable("the process has ended")

    async def run() -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        compiler = GrammarCompiler(find(None).folder, Limits())
        job = GrammarJob(kind="json", text='{"type": "integer"}')
        client = asyncio.create_task(compiler.compile(job, READY, "json"))
        await asyncio.sleep(0)
        client.cancel()
        await asyncio.sleep(0.05)
        gc.collect()
        return said

    monkeypatch.setattr(Workers, "run", fail)
    assert asyncio.run(run()) == []


@pytest.mark.slow
def test_the_prompts_of_a_request_share_one_copy_of_their_grammar() -> None:
    body = _structured({"json": SCHEMA}, prompt=["x"] * 48)
    with serving(limits=Limits(grammar_seconds=60)) as server, server.client.recording() as sent:
        for _ in range(2):  # the second request needs none
            assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
    [grammar] = [message for message in sent if isinstance(message, Grammar)]
    asked = submits(sent)
    assert len(asked) == 96
    assert {submit.grammar for submit in asked} == {grammar.key}
    assert len(grammar.json) > 1_000_000
    assert max(len(encode(submit)) for submit in asked) < 1000


def test_the_engine_forgets_what_was_not_used_for_longest(http: httpx.Client, sent: list[ToEngine]) -> None:
    for word in ("a", "b", "a", "c", "b"):
        assert http.post("/v1/completions", json=_structured({"choice": [word]})).status_code == 200
    kept = dict.fromkeys(message.key for message in sent if isinstance(message, Grammar))
    a, b, c = kept
    assert [m.key for m in sent if isinstance(m, Grammar)] == [a, b, c, b]
    assert [m.key for m in sent if isinstance(m, Forget)][-2:] == [b, a]


def test_an_engine_that_was_started_again_is_told_again(
    server: Running, http: httpx.Client, sent: list[ToEngine]
) -> None:
    for _ in range(2):
        assert http.post("/v1/completions", json=_structured({"choice": ["again"]})).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x", "priority": Trouble.DIE}).status_code == 503
        wait_until(lambda: server.service.client.state == "ready")
    assert sum(isinstance(message, Grammar) for message in sent) == 2


@pytest.mark.slow
def test_a_common_grammar_is_there_before_it_is_asked_for(compiled: list[bytes]) -> None:
    with serving() as server, server.client.recording() as sent:
        warm = asyncio.run_coroutine_threadsafe(server.service.warm(READY), server.loop)
        warm.result(60)
        assert len(compiled) == len(COMMON)
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
        response = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200
    assert len(compiled) == len(COMMON)
    assert sum(isinstance(message, Grammar) for message in sent) == len(COMMON)


def test_a_request_s_timeout_counts_from_its_arrival(http: httpx.Client, sent: list[ToEngine]) -> None:
    response = http.post("/v1/completions", json=_structured({"grammar": SLOW + '"e"'}, timeout=0.3))
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "timeout"
    assert response.headers["x-should-retry"] == "false"
    assert not submits(sent)
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "timeout": 50})
    (submit,) = submits(sent)
    assert submit.timeout_s is not None
    assert submit.timeout_s < 50


@pytest.mark.slow
def test_slow_grammars_wait_for_themselves_and_equal_ones_are_compiled_once(
    compiled: list[bytes],
) -> None:

    async def run() -> None:
        limits = Limits(grammar_seconds=60, grammar_quick_seconds=0.1)
        compiler = GrammarCompiler(find(None).folder, limits)
        slow = [
            asyncio.create_task(
                compiler.compile(GrammarJob(kind="grammar", text=f'{SLOW}"{end}"'), READY, "grammar")
            )
            for end in "abcd"
        ]
        await asyncio.sleep(0)
        quick = GrammarJob(kind="json", text=json.dumps({"type": "integer"}))
        try:
            found = await asyncio.gather(*(compiler.compile(quick, READY, "json") for _ in range(5)))
            assert len({grammar.key for grammar in found}) == 1
            assert not [task.exception() for task in slow if task.done()]
        finally:
            for task in slow:
                task.cancel()
            await compiler.close()

    asyncio.run(run())
    assert len(compiled) == 5


def test_the_grammars_of_all_requests_take_bounded_memory(server: Running, http: httpx.Client) -> None:
    client = server.service.client
    assert http.post("/v1/completions", json=_structured({"choice": ONE})).status_code == 200
    slow = _structured({"choice": OTHER}, max_tokens=900, priority=Trouble.SLOW, stream=True)
    with http.stream("POST", "/v1/completions", json=slow) as response:
        lines = response.iter_lines()
        next(lines)
        refused = http.post("/v1/completions", json=_structured({"choice": ONE}))
        assert refused.status_code == 429
        assert "take too much memory" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json=_structured({"choice": OTHER})).status_code == 200
        assert len(client._grammars) == 1  # pyright: ignore[reportPrivateUsage]
    wait_until(server.cancelled)
    assert http.post("/v1/completions", json=_structured({"choice": ONE})).status_code == 200
