"""Requests without HTTP: answered as alone, whatever runs beside them, and refused by the server's own words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from folders import causal, save, write_json
from torchwright.optimization.continuation import ask
from torchwright.optimization.open_model import open_model
from torchwright.serve.api_error import ApiError
from torchwright.serve.offline.requests import CHAT, COMPLETIONS, RESPONSES, Asked, OfflineServer
from torchwright.serve.options import EngineOptions

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}assistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(causal(hidden_size=64, head_dim=16), tmp_path_factory.mktemp("causal") / "tiny")
    write_json(path / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": TEMPLATE})
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[OfflineServer]:
    options = EngineOptions(model=str(folder), max_running=4, step_tokens=64, kv_memory=2**22)
    made = OfflineServer(options)
    yield made
    made.close()


def asked(url: str, **body: Any) -> Asked:
    return Asked(url, json.dumps({"max_tokens": 12, "temperature": 0, **body}).encode())


def test_many_requests_together_are_answered_as_each_alone(server: OfflineServer) -> None:
    common = "the quick brown fox jumps over the lazy dog " * 2
    requests = [asked(COMPLETIONS, prompt=f"{common}{n % 7}") for n in range(20)]
    together = [text(answer) for answer in server.answer(requests)]
    alone = [text(server.answer([request])[0]) for request in requests]
    assert together == alone
    stats = server.engine.stats
    assert stats.prefix_hits > 0
    assert stats.running == stats.waiting == 0


def test_greedy_answers_are_those_of_the_model(server: OfflineServer, folder: Path) -> None:
    opened, prompt = open_model(str(folder)).model, "hello there"
    wanted = ask(opened, prompt, max_new_tokens=12, on_text=lambda _: None)
    [found] = server.answer([asked(COMPLETIONS, prompt=prompt)])
    assert text(found) == wanted.text


def test_each_form_of_request_is_answered_or_refused_by_itself(server: OfflineServer) -> None:
    talk = [{"role": "user", "content": "hi"}]
    chat, response, stream, unknown, other, wrong = server.answer(
        [
            asked(CHAT, messages=talk),
            Asked(RESPONSES, json.dumps({"input": "hi", "max_output_tokens": 8}).encode()),
            asked(CHAT, messages=talk, stream=True),
            asked(CHAT, messages=talk, colour="red"),
            asked(CHAT, messages=talk, model="gpt-4o"),
            Asked("/v1/embeddings", b"{}"),
        ]
    )
    assert isinstance(chat, dict)
    assert chat["object"] == "chat.completion"
    assert chat["usage"]["completion_tokens"] <= 12
    assert isinstance(response, dict)
    assert response["object"] == "response"
    refused = [
        (answer.status, answer.param)
        for answer in (stream, unknown, other, wrong)
        if isinstance(answer, ApiError)
    ]
    assert refused == [(400, "stream"), (400, "colour"), (404, "model"), (404, "url")]


@pytest.mark.slow  # `test_grammars` compiles for a server, in a process that takes seconds to start
def test_a_grammar_is_kept_to(server: OfflineServer) -> None:
    [choice] = server.answer([asked(COMPLETIONS, prompt="a or b: ", guided_choice=["yes", "no"])])
    assert text(choice) in ("yes", "no")


def test_a_fault_of_the_engine_is_no_row_s_fault(
    server: OfflineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("the step is broken")

    engine = server.engine._engine
    monkeypatch.setattr(engine, "step", broken)
    with pytest.raises(RuntimeError, match="the step is broken"):
        server.answer([asked(COMPLETIONS, prompt="x"), asked(COMPLETIONS, prompt="y")])
    monkeypatch.undo()
    engine.cancel_all("the test is over")
    while not engine.idle:
        engine.step()
    assert text(server.answer([asked(COMPLETIONS, prompt="x")])[0])


def test_the_loop_is_free_while_a_step_runs(server: OfflineServer) -> None:
    """A step runs in a thread, so that the next requests are read meanwhile."""

    async def ticks() -> int:
        count, answering = 0, asyncio.ensure_future(server._answer([asked(COMPLETIONS, prompt="tick")]))
        while not answering.done():
            await asyncio.sleep(0)
            count += 1
        return count

    assert server._runner.run(ticks()) > 12


def text(answer: Any) -> str:
    assert isinstance(answer, dict), answer
    return answer["choices"][0]["text"]
