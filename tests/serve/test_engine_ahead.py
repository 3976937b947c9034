"""Steps that are launched ahead: the same answers, whatever happens between two steps."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import alone, answered, bundled, drain, engine, request, words

from torchwright.models.decoder import LoadedDecoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.wire.messages import Cancel, Submit

PLAIN: dict[str, Any] = {"speculate": "none", "prefix_cache": False}


@pytest.fixture(scope="module")
def model() -> LoadedDecoder:
    return bundled()


@pytest.fixture(scope="module")
def wanted(model: LoadedDecoder) -> dict[str, list[int]]:
    """The answers where nothing runs ahead."""
    return expected(model, greedy(4))


def greedy(count: int, tokens: int = 20) -> list[Submit]:
    return [request(f"r{number}", words(5 + 7 * number, number), tokens) for number in range(count)]


def expected(model: LoadedDecoder, submits: list[Submit]) -> dict[str, list[int]]:
    """The answers of an engine that launches nothing ahead, each alone."""
    return {submit.id: alone(model, submit)[0].tokens for submit in submits}


def test_the_cpu_runs_nothing_ahead(model: LoadedDecoder, ahead_rows: list[int]) -> None:
    answered(engine(model, **PLAIN), greedy(2, 4))
    assert not ahead_rows


def run(made: ServingEngine, submits: list[Submit]) -> dict[str, list[int]]:
    return {id: result.tokens for (id, _), result in answered(made, submits).items()}


def test_every_decode_step_is_launched_ahead(
    model: LoadedDecoder, wanted: dict[str, list[int]], asynchronous: None, ahead_rows: list[int]
) -> None:
    """Twenty tokens: the first by the prompts, the others by steps that were there already."""
    assert run(engine(model, **PLAIN), greedy(4)) == wanted
    assert ahead_rows == [4] * 19


def test_prompts_in_chunks_and_sequences_that_end(
    model: LoadedDecoder, asynchronous: None, ahead_rows: list[int]
) -> None:
    submits = [request(f"r{number}", words(30, number), 3 + 5 * number) for number in range(4)]
    wanted = {
        submit.id: model.generate(submit.ids, max_new_tokens=submit.max_tokens, stop=[]) for submit in submits
    }
    assert run(engine(model, step_tokens=16, max_running=4, **PLAIN), submits) == wanted
    assert max(ahead_rows) > 1


def test_a_stop_token_leaves_its_step_alone(
    model: LoadedDecoder, wanted: dict[str, list[int]], asynchronous: None, ahead_rows: list[int]
) -> None:
    """The host learns of the end when the next step runs; the pages go to a request that waits."""
    stop = wanted["r1"][6]
    submits = greedy(4)
    submits[1] = request("r1", submits[1].ids, 20, stop_ids=[stop])
    found = run(engine(model, pages=12, max_running=2, **PLAIN), submits)
    assert found == wanted | {"r1": wanted["r1"][: wanted["r1"].index(stop) + 1]}
    assert ahead_rows


@pytest.mark.parametrize("pages", [8, 9, 11, 14])
def test_preempted_sequences(
    model: LoadedDecoder, wanted: dict[str, list[int]], asynchronous: None, ahead_rows: list[int], pages: int
) -> None:
    """Pages are short, with a prefix cache that gives pages back and without."""
    for prefix_cache in (False, True):
        options: dict[str, Any] = PLAIN | {"prefix_cache": prefix_cache}
        assert run(engine(model, pages=pages, **options), greedy(4)) == wanted
    assert ahead_rows


def test_other_requests_go_beside_it(
    model: LoadedDecoder, wanted: dict[str, list[int]], asynchronous: None, ahead_rows: list[int]
) -> None:
    """A request that draws, a prompt that comes in the middle, proposals, and a request that is cancelled."""
    drawn = request("drawn", words(9, 9), 8, temperature=1.0, seed=5)
    alone_drawn = expected(model, [drawn])
    made = engine(model, max_running=6)
    first, *others = greedy(4)
    assert made.submit(first) is None
    results: Any = {}
    for submit in (request("gone", words(9, 3), 50), *others, drawn):
        for _ in range(3):
            for output in made.step().outputs:
                results.setdefault(output.id, []).extend(output.tokens)
        assert made.submit(submit) is None
    made.cancel(Cancel(id="gone", reason="cancelled"))
    for (id, _), result in drain(made).items():
        results.setdefault(id, []).extend(result.tokens)
    made.close()
    results.pop("gone", None)
    assert results == wanted | alone_drawn
    assert ahead_rows


def test_weights_that_change_between_two_steps(
    model: LoadedDecoder, wanted: dict[str, list[int]], asynchronous: None, ahead_rows: list[int]
) -> None:
    """A step that was launched with the earlier weights is left alone."""
    made = engine(model, **PLAIN)
    assert made.submit(greedy(1)[0]) is None
    tokens: list[int] = []
    for _ in range(5):
        tokens += [token for output in made.step().outputs for token in output.tokens]
    made.load_weights(bundled())
    before = sum(ahead_rows)
    tokens += [token for output in made.step().outputs for token in output.tokens]
    assert sum(ahead_rows) == before
    tokens += drain(made)["r0", 0].tokens
    made.close()
    assert tokens == wanted["r0"]
