"""Structured output in the engine: answers match their grammar, whatever else is asked of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from engine_support import alone, answers, bundled, compiled, drain, engine, know, request, words

from torchwright.models.decoder import LoadedDecoder
from torchwright.serve.wire.messages import Cancel, Grammar, ThinkingBudget

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> LoadedDecoder:
    return bundled()


@pytest.fixture(scope="module")
def schema(model: LoadedDecoder) -> str:
    return compiled(model, SCHEMA)


def check(value: dict[str, Any]) -> None:
    assert set(value) == {"name", "age", "tags"}
    assert value["name"] in ("Ann", "Bob")
    assert 0 <= value["age"] <= 99
    assert set(value["tags"]) <= {"red", "green"}


@pytest.mark.plain("1.5-ngram")
@pytest.mark.parametrize("speculate", ["none", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_follows_its_schema(
    model: LoadedDecoder, schema: str, temperature: float, speculate: str
) -> None:
    ids = model.text.encode('{"name": "Bob", "age": 3, "tags": ["red", "green", "red"]} ' * 2)
    options: dict[str, Any] = {"temperature": temperature, "grammar": schema, "stop_ids": list(model.stop)}
    submits = [request(str(i), ids, 60, seed=i, n=2, logprobs=1, **options) for i in range(3)]
    found = answers(model, submits, speculate=speculate)
    for (id, index), result in found.items():
        assert result.finish == "stop"
        assert result.tokens[-1] in model.stop
        check(json.loads(model.text.decode(result.tokens)))
        assert result.timing is not None
        assert result.timing.grammar_s > 0 or index
        assert result.tokens == alone(model, submits[int(id)])[index].tokens


def test_a_grammar_ends_without_stop_tokens_once_it_is_complete(model: LoadedDecoder) -> None:
    grammar = compiled(model, regex="(yes|no)")
    found = alone(model, request("a", words(5, seed=1), 20, grammar=grammar))[0]
    assert found.finish == "stop"
    assert model.text.decode(found.tokens) in ("yes", "no")


def test_min_tokens_cannot_hold_back_a_grammar_that_is_complete(model: LoadedDecoder) -> None:
    grammar = compiled(model, regex="(yes|no)")
    options: dict[str, Any] = {"grammar": grammar, "stop_ids": list(model.stop), "min_tokens": 15}
    found = alone(model, request("a", words(5, seed=1), 20, **options))[0]
    assert found.finish == "stop"
    assert model.text.decode(found.tokens) in ("yes", "no")


def test_length_cuts_an_answer_that_still_matches_so_far(model: LoadedDecoder) -> None:
    grammar = compiled(model, regex="[a-f]{40}")
    found = alone(model, request("a", words(5, seed=1), 6, grammar=grammar, temperature=1.0))[0]
    assert found.finish == "length"
    assert re.fullmatch("[a-f]+", model.text.decode(found.tokens))


@pytest.mark.parametrize("grammar", ["", "{}", "no json", '{"__VERSION__": "v0"}', "[1, 2]"])
def test_what_is_no_grammar_ends_its_request_only(model: LoadedDecoder, grammar: str) -> None:
    made = engine(model)
    know(made, grammar)
    made.submit(request("bad", [5], 4, grammar=grammar, n=2))
    made.submit(request("good", [5], 4))
    results = drain(made)
    made.close()
    for index in (0, 1):
        assert results["bad", index].finish == "error"
        assert "grammar" in (results["bad", index].message or "")
    assert results["good", 0].finish == "length"


def test_a_request_can_be_cancelled_while_its_grammar_is_read(model: LoadedDecoder, schema: str) -> None:
    made = engine(model)
    know(made, schema)
    made.submit(request("a", [5], 60, grammar=schema, n=3, stop_ids=list(model.stop)))
    made.cancel(Cancel(id="a", index=0, reason="a test"))
    results = drain(made)
    made.close()
    assert results["a", 0].finish == "cancelled"
    for index in (1, 2):
        check(json.loads(model.text.decode(results["a", index].tokens)))


def test_a_grammar_that_is_too_slow_ends_its_own_request_only(model: LoadedDecoder, schema: str) -> None:
    made = engine(model)
    made.grammars.token_seconds = 0.0
    know(made, schema)
    made.submit(request("slow", [5], 60, grammar=schema, n=2, stop_ids=list(model.stop)))
    made.submit(request("free", [5], 8))
    results = drain(made)
    made.close()
    for index in (0, 1):
        assert results["slow", index].finish == "grammar"
        assert "s to follow by one token" in (results["slow", index].message or "")
    assert results["free", 0].finish == "length"


def test_preemption_and_few_pages_leave_the_grammar_in_step(model: LoadedDecoder, schema: str) -> None:
    options: dict[str, Any] = {"grammar": schema, "stop_ids": list(model.stop), "temperature": 1.0}
    submits = [request(str(i), words(30, seed=i), 60, seed=i, **options) for i in range(6)]
    made = engine(model, pages=7)
    know(made, schema)
    for submit in submits:
        assert made.submit(submit) is None
    results = drain(made)
    made.close()
    assert made.stats().preemptions > 0
    for result in results.values():
        check(json.loads(model.text.decode(result.tokens)))


def test_a_grammar_is_read_once_for_all_that_name_it_and_forgotten_when_told(
    model: LoadedDecoder, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, read = engine(model), list[str]()
    monkeypatch.setattr(made.grammars, "_read", _counted(made.grammars._read, read))  # pyright: ignore[reportPrivateUsage]
    refused = made.submit(request("early", [5], 4, grammar="key", stop_ids=list(model.stop)))
    assert refused is not None
    assert "was not sent before it" in refused.text
    made.grammars.keep(Grammar(key="key", json=schema))
    for place in range(5):
        submit = request(str(place), [5], 60, grammar="key", stop_ids=list(model.stop))
        assert made.submit(submit) is None
    made.grammars.forget("key")
    results = drain(made)
    assert read == [schema]
    for result in results.values():
        check(json.loads(model.text.decode(result.tokens)))
    assert made.submit(request("late", [5], 4, grammar="key")) is not None
    made.close()


def _counted(read: Callable[[str], Any], calls: list[str]) -> Callable[[str], Any]:
    def counted(text: str) -> Any:
        calls.append(text)
        return read(text)

    return counted


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_reasoning_before_a_grammar_ends_with_its_budget(model: LoadedDecoder, speculate: str) -> None:
    """A grammar lets reasoning go on for ever, so that a weak model would never answer."""
    end = "</think>"
    grammar, end_ids = compiled(model, regex=rf"[^>]*{end}(yes|no)"), model.text.encode(end)[1:]
    budget = ThinkingBudget(begin="", end=end, end_ids=end_ids, tokens=9)
    repeated = model.text.encode("ab ab ab ab ab ab ab ab")
    options: dict[str, Any] = {"grammar": grammar, "stop_ids": list(model.stop), "temperature": 1.0}
    submits = [request(str(seed), repeated, 60, seed=seed, thinking=budget, **options) for seed in range(4)]
    for result in answers(model, submits, speculate=speculate).values():
        _, found, answer = model.text.decode(result.tokens).partition(end)
        assert (found, result.finish) == (end, "stop")
        assert answer in ("yes", "no")
        assert len(result.tokens) <= 9 + len(end_ids) + len("yes") + 1


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_reasoning_without_a_grammar_ends_with_its_budget(model: LoadedDecoder, speculate: str) -> None:
    end = "</think>"
    end_ids = model.text.encode(end)[1:]
    budget = ThinkingBudget(begin="", end=end, end_ids=end_ids, tokens=9)
    repeated = model.text.encode("ab ab ab ab ab ab ab ab")
    free = request("free", repeated, 60, seed=3, temperature=0.0)
    bound = request("bound", repeated, 60, seed=3, temperature=0.0, thinking=budget)
    found = answers(model, [free, bound], speculate=speculate)
    assert end not in model.text.decode(found["free", 0].tokens)
    thought = found["free", 0].tokens[:9]
    assert found["bound", 0].tokens[: 9 + len(end_ids)] == [*thought, *end_ids]
    assert len(found["bound", 0].tokens) > 9 + len(end_ids), "the answer goes on behind the reasoning"
