"""A served translator: the same tokens alone, beside others, and after a neighbour that was cancelled."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "models" / "decoder"))
from engine_support import Results, drain, request, take
from http_support import command
from seq2seqs import tiny, tokenizer

from torchwright.core.errors import WorkloadError
from torchwright.models.decoder.scores import Logits
from torchwright.models.decoder.seq2seq.load import load_seq2seq
from torchwright.models.decoder.seq2seq.translator import LoadedSeq2Seq
from torchwright.serve.engine.translate import TranslatingEngine
from torchwright.serve.folder import find
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import Cancel, Finish, RequestRefused, Submit

END = 2


@pytest.fixture(scope="module", params=["t5", "bart", "nllb"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedSeq2Seq:
    folder = tmp_path_factory.mktemp(request.param)
    tiny(folder, request.param)
    tokenizer(folder)
    return load_seq2seq(folder, torch.bfloat16)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LoadedSeq2Seq:
    folder = tmp_path_factory.mktemp("small")
    tiny(folder, "t5")
    return load_seq2seq(folder, torch.bfloat16)


def made(loaded: LoadedSeq2Seq, **options: Any) -> TranslatingEngine:
    clock = options.pop("clock", None)
    more = {} if clock is None else {"clock": clock}
    return TranslatingEngine(loaded, options=EngineOptions(**({"kv_memory": 1 << 22} | options)), **more)


def source(most: int = 60) -> list[int]:
    return [random.randrange(4, 260) for _ in range(random.randrange(1, most))] + [END]


def alone(loaded: LoadedSeq2Seq, submit: Submit, index: int = 0) -> list[int]:
    """What `generate` answers, with the token that ended it."""
    options = submit.sampling
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty")
    return loaded.generate(
        submit.ids,
        max_new_tokens=submit.max_tokens,
        seed=[options.seed],
        stop=submit.stop_ids,
        **{name: getattr(options, name) for name in names},
    )


def text_of(tokens: list[int], finish: Finish | None) -> list[int]:
    return tokens[:-1] if finish == "stop" else tokens


def drawn(count: int) -> list[Submit]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.2, "seed": 5},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2},
    ]
    return [
        request(f"r{i}", source(), max_tokens=random.randrange(3, 40), stop_ids=[END], **random.choice(kinds))
        for i in range(count)
    ]


@pytest.mark.plain("bart")
def test_company_changes_nothing(loaded: LoadedSeq2Seq) -> None:
    engine, submits, results = made(loaded, max_running=5, step_tokens=64), drawn(12), Results()
    waiting = list(submits)
    while waiting:
        for _ in range(min(len(waiting), random.randrange(1, 4))):
            assert engine.submit(waiting.pop()) is None
        take(results, engine)
        engine.check_integrity()
        if random.random() < 0.2:
            engine.cancel(Cancel(id=random.choice(submits).id, reason="a test"))
    drain(engine, results)  # type: ignore[arg-type]
    finished = 0
    for submit in submits:
        result = results[submit.id, 0]
        wanted = alone(loaded, submit)
        if result.finish == "cancelled":
            assert result.tokens == wanted[: len(result.tokens)]
            continue
        finished += 1
        assert text_of(result.tokens, result.finish) == wanted
        assert result.finish == ("length" if len(wanted) == submit.max_tokens else "stop")
        assert result.timing is not None
        assert result.timing.computed_tokens == len(submit.ids)
    assert finished > 3


def test_several_answers_share_a_source(small: LoadedSeq2Seq) -> None:
    engine, ids = made(small), source()
    several = request("a", ids, max_tokens=20, n=3, temperature=1.5, seed=4)
    assert engine.submit(several) is None
    results = drain(engine)  # type: ignore[arg-type]
    rows = [results["a", index].tokens for index in range(3)]
    assert len({tuple(row) for row in rows}) == 3
    assert rows[0] == alone(small, several)
    assert engine.stats().prompt_tokens == len(ids)
    one = request("b", ids, max_tokens=20, n=3, temperature=1.5, seed=4)
    assert engine.submit(one) is None
    take(found := Results(), engine)
    engine.cancel(Cancel(id="b", index=0, reason="a test"))
    drain(engine, found)  # type: ignore[arg-type]
    assert [found["b", index].tokens for index in (1, 2)] == rows[1:]
    assert found["b", 0].finish == "cancelled"


def test_log_probabilities_are_the_models(small: LoadedSeq2Seq) -> None:
    ids = source()
    engine = made(small)
    engine.submit(request("a", ids, max_tokens=6, logprobs=2, temperature=1.0, seed=1))
    result = drain(engine)["a", 0]  # type: ignore[arg-type]
    logits_TV = small.logits(ids, [small.rules.start, *result.tokens[:-1]]).log_softmax(-1)
    assert len(result.logprobs) == 6
    for row_V, token, scored in zip(logits_TV, result.tokens, result.logprobs, strict=True):
        assert scored.token == token
        assert scored.logprob == pytest.approx(float(row_V[token]), abs=1e-4)
        assert [top for top, _ in scored.top] == row_V.topk(2).indices.tolist()


def test_forced_and_banned_tokens(tmp_path: Path) -> None:
    tiny(tmp_path, "marian")
    path = tmp_path / "generation_config.json"
    settings = {"forced_bos_token_id": 17, "forced_eos_token_id": END, "bad_words_ids": [[5], [6]]}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    loaded = load_seq2seq(tmp_path, torch.bfloat16)
    engine, ids = made(loaded), source()
    for temperature in (0.0, 3.0):
        submit = request("a", ids, max_tokens=12, stop_ids=[END], temperature=temperature)
        engine.submit(submit)
        result = drain(engine)["a", 0]  # type: ignore[arg-type]
        assert result.tokens[0] == 17
        assert not {5, 6} & set(result.tokens)
        assert result.finish == "stop"  # the last one is forced
        assert result.tokens[:-1] == alone(loaded, submit)


def test_a_timeout_keeps_what_there_is(small: LoadedSeq2Seq) -> None:
    now = [0.0]
    engine = made(small, clock=lambda: now[0])
    engine.submit(request("a", source(), max_tokens=30, timeout_s=5.0))
    engine.submit(request("b", source(), max_tokens=4))
    results = Results()
    take(results, engine)
    now[0] = 6.0
    drain(engine, results)  # type: ignore[arg-type]
    assert results["a", 0].finish == "timeout"
    assert len(results["a", 0].tokens) == 1
    assert results["b", 0].finish == "length"


def test_priority_goes_first(small: LoadedSeq2Seq) -> None:
    engine = made(small, max_running=1)
    for id, priority in (("late", 5), ("soon", -5)):
        engine.submit(request(id, source(), max_tokens=2, priority=priority))
    (first,) = engine.step().outputs
    assert first.id == "soon"
    engine.cancel_all("a test")
    assert {output.finish for output in engine.step().outputs} == {"cancelled"}
    engine.check_integrity()
    assert engine.idle


def test_logits_that_are_no_numbers_end_their_answer(small: LoadedSeq2Seq, monkeypatch) -> None:
    engine = made(small)
    whole = small.advance

    def broken(*given: Any) -> Logits:
        found = whole(*given)
        found.values_NV[0] = torch.nan
        return Logits(found.values_NV)

    monkeypatch.setattr(small, "advance", broken)
    engine.submit(request("a", source(), max_tokens=4))
    engine.submit(request("b", source(), max_tokens=4))
    results = Results()
    take(results, engine)
    monkeypatch.undo()
    drain(engine, results)  # type: ignore[arg-type]
    assert results["a", 0].finish == "error"
    assert "not numbers" in str(results["a", 0].message)
    assert results["b", 0].finish == "length"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ids": []}, "empty"),
        ({"ids": [400]}, "out of range"),
        ({"ids": [9] * 161}, "more than"),
        ({"max_tokens": 0}, "answers"),
        ({"max_tokens": 999}, "999"),
        ({"grammar": "{}"}, "no grammar"),
        ({"prompt_logprobs": 1}, "does not score"),
        ({"n": 0}, "n is 0"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    tiny(tmp_path, "bart")
    engine = made(load_seq2seq(tmp_path, torch.bfloat16))
    ids = more.pop("ids", [9, END])
    refused = engine.submit(request("a", ids, **more))
    assert isinstance(refused, RequestRefused)
    assert said in refused.text
    assert engine.idle


def test_the_queue_and_the_memory_are_bounded(small: LoadedSeq2Seq) -> None:
    engine = made(small, max_queue=2, max_running=2)
    answers = [engine.submit(request(str(i), source())) for i in range(3)]
    assert answers[:2] == [None, None]
    assert isinstance(answers[2], RequestRefused)
    assert answers[2].reason == "queue_full"
    drain(engine)  # type: ignore[arg-type]
    narrow = made(small, kv_memory=40_000)
    refused = narrow.submit(request("a", [9] * 400, max_tokens=2))
    assert isinstance(refused, RequestRefused)
    assert "memory" in refused.text
    with pytest.raises(WorkloadError, match="at least"):
        made(small, kv_memory=1)


def test_models_that_cannot_promise_are_refused(tmp_path: Path) -> None:
    tiny(tmp_path, "t5")
    plain = load_seq2seq(tmp_path, torch.float32)
    with pytest.raises(WorkloadError, match="any company"):
        made(plain)
    engine = made(plain, deterministic=False)
    submit = request("a", source(), max_tokens=5)
    engine.submit(submit)
    assert drain(engine)["a", 0].tokens == alone(plain, submit)  # type: ignore[arg-type]


def test_folders_are_found(tmp_path: Path) -> None:
    tiny(tmp_path, "t5")
    assert find(str(tmp_path)).served_as == "translator"


def test_options_that_it_does_not_have_are_refused(tmp_path: Path, capsys) -> None:
    from torchwright.cli import main

    tiny(tmp_path, "t5")
    assert main(["serve", str(tmp_path), "--port", "0", "--max-context", "9"]) == 2
    assert "--max-context: not for" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's own client")
    tiny(tmp_path, "t5")
    tokenizer(tmp_path)
    loaded = load_seq2seq(tmp_path, torch.bfloat16)
    with (
        command(str(tmp_path)) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        name = tmp_path.name
        texts = ["a small text", "another, longer text of two"]
        found = client.completions.create(model=name, prompt=texts, max_tokens=12, temperature=0)
        wanted = loaded.generate(texts, max_new_tokens=12)
        assert [choice.text for choice in found.choices] == wanted
        events = client.completions.create(
            model=name, prompt=texts[0], max_tokens=12, temperature=0, stream=True
        )
        assert "".join(event.choices[0].text for event in events if event.choices) == wanted[0]
        whole = client.completions.create(model=name, prompt=texts[0], temperature=0)
        assert whole.choices[0].text == loaded.generate(
            texts[0], max_new_tokens=loaded.decoder.config.context
        )
        for body, said in (
            ({"echo": True}, "does not go on"),
            ({"response_format": {"type": "json_object"}}, "no grammar"),
            ({"max_tokens": 99_999}, "at most"),
        ):
            answer = httpx.post(running.url + "/v1/completions", json={"prompt": "a", **body}, timeout=60)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]
        with pytest.raises(openai.BadRequestError, match="v1/completions"):
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "a"}])
        counted = httpx.post(
            running.url + "/v1/messages/count_tokens",
            json={"model": name, "messages": [{"role": "user", "content": "a"}]},
            timeout=60,
        )
        assert counted.status_code == 400
        assert httpx.get(running.url + "/health_generate", timeout=60).status_code == 200
