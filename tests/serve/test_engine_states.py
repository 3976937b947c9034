"""Models with recurrent layers in the engine: their states beside the pages.

Prefix cache, preemption, speculation and siblings; the answers are those of a sequence alone, bit for bit.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_support import Result, alone, answers, drain, engine, request, tiny_decoder, words

from torchwright.models.decoder import PAGE, LoadedDecoder
from torchwright.serve.engine.prefix import STATE_EVERY

MODELS = ("lfm2", "qwen3.5", "granite-hybrid", "falcon-h1")
STRIDE = STATE_EVERY * PAGE


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return tiny_decoder(request.param, folder, fields={"max_position_embeddings": 1024})


def same(found: Result, wanted: Result) -> None:
    assert found.tokens == wanted.tokens
    assert found.logprobs == wanted.logprobs
    assert found.finish == wanted.finish


def test_a_known_prompt_is_not_computed_again(loaded: LoadedDecoder) -> None:
    """The bar of issue 62: cached tokens, and the same bits with them as without."""
    ids = words(3 * STRIDE + 21, seed=1)
    made = engine(loaded)
    asked = [request(str(n), ids, 40, logprobs=2) for n in range(3)]
    found = {}
    for submit in asked:
        assert made.submit(submit) is None
        found |= drain(made)
    wanted = alone(loaded, request("a", ids, 40, logprobs=2))[0]
    for submit in asked:
        same(found[submit.id, 0], wanted)
    cached = [result.timing.cached_tokens for result in found.values() if result.timing]
    assert cached == [0, 3 * STRIDE + 16, 3 * STRIDE + 16]


def test_a_prefix_goes_back_to_the_last_copy(loaded: LoadedDecoder) -> None:
    ids = words(2 * STRIDE + 100, seed=2)
    made = engine(loaded)
    first, second = request("a", ids, 4), request("b", [*ids[: 2 * STRIDE + 50], 5, 6, 7], 8, logprobs=1)
    for submit in (first, second):
        assert made.submit(submit) is None
        found = drain(made)
    result = found["b", 0]
    assert result.timing is not None
    assert result.timing.cached_tokens == 2 * STRIDE
    same(result, alone(loaded, second)[0])


def test_the_next_turn_goes_on_behind_the_last_page_of_the_answer(loaded: LoadedDecoder) -> None:
    ids = words(40, seed=3)
    made = engine(loaded, speculate="none")
    assert made.submit(request("a", ids, 75)) is None
    answer = drain(made)["a", 0].tokens
    turn = request("b", [*ids, *answer, 9, 9, 9], 12, logprobs=1)
    assert made.submit(turn) is None
    result = drain(made)["b", 0]
    assert result.timing is not None
    assert result.timing.cached_tokens == (40 + 75 - 1) // PAGE * PAGE
    same(result, alone(loaded, turn)[0])


def test_an_answer_leaves_one_copy_behind_and_not_one_a_page(loaded: LoadedDecoder) -> None:
    made = engine(loaded, copies=32)
    assert made.submit(request("a", words(20, seed=4), 200)) is None
    drain(made)
    tree = made._pages.tree
    assert tree is not None
    assert len(tree.state_slots()) == 2  # behind the prompt's page, and behind the last


@pytest.mark.plain("qwen3.5-True")
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_sequences_answer_as_if_they_were_alone(loaded: LoadedDecoder, prefix_cache: bool) -> None:
    submits = [request(str(n), words(30 + 9 * n, seed=n), 60, logprobs=1) for n in range(5)]
    found = answers(loaded, submits, pages=14, prefix_cache=prefix_cache, step_tokens=64)
    assert sum(result.timing.preemptions for result in found.values() if result.timing) > 0
    for submit in submits:
        same(found[submit.id, 0], alone(loaded, submit)[0])


@pytest.mark.plain("lfm2")
def test_proposals_that_are_refused_leave_no_trace(loaded: LoadedDecoder) -> None:
    """Copies of the state behind each proposed token: the sequence goes on from the last that was accepted."""
    of_three: Any = {"logit_bias": dict.fromkeys((5, 6, 7), 50.0), "temperature": 1.0, "logprobs": 1}
    submits = [request(str(n), words(9 + n, seed=5), 60, seed=n, **of_three) for n in range(3)]
    found = answers(loaded, submits, speculate="ngram")
    timings = [result.timing for result in found.values() if result.timing]
    accepted = sum(timing.accepted_tokens for timing in timings)
    assert 0 < accepted < sum(timing.speculated_tokens for timing in timings)
    for submit in submits:
        same(found[submit.id, 0], alone(loaded, submit)[0])


def test_siblings_share_a_prompt(loaded: LoadedDecoder) -> None:
    submit = request("a", words(50, seed=6), 24, n=4, temperature=1.0, seed=3)
    found = answers(loaded, [submit])
    for index, wanted in alone(loaded, submit).items():
        same(found["a", index], wanted)
    assert len({tuple(found["a", index].tokens) for index in range(4)}) > 1


@pytest.mark.plain("lfm2-3")
@pytest.mark.parametrize("copies", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 40))])
def test_any_company_and_any_number_of_copies(loaded: LoadedDecoder, copies: int) -> None:
    """Requests with common beginnings at random moments, few pages, few copies: the accounts hold at every step."""
    chance = random.Random(copies)
    common = words(STRIDE + 40, seed=7)
    submits = []
    for n in range(14):
        start = common[: chance.choice([0, 17, 40, STRIDE + 5, STRIDE + 40])]
        ids = [*start, *words(chance.randint(1, 30), seed=n)]
        extra: dict[str, Any] = {"n": chance.choice([1, 1, 3]), "temperature": chance.choice([0.0, 1.0])}
        submits.append(request(str(n), ids, chance.randint(1, 50), logprobs=1, seed=n, **extra))
    made = engine(loaded, pages=48, copies=copies, step_tokens=96, max_running=6, speculate="ngram")
    waiting, found = list(submits), {}
    for _ in range(3000):
        if waiting and chance.random() < 0.3:
            assert made.submit(waiting.pop()) is None
        if not waiting and made.idle:
            break
        for output in made.step().outputs:
            result = found.setdefault((output.id, output.index), Result())
            result.tokens += output.tokens
            result.logprobs += output.logprobs or []
            result.finish = output.finish
        made.check_integrity()
    assert made.idle
    for submit in submits:
        for index, wanted in alone(loaded, submit).items():
            same(found[submit.id, index], wanted)


def test_other_weights_read_no_state_of_the_old(loaded: LoadedDecoder, tmp_path: Path) -> None:
    """Running sequences go on from their tokens, and what the tree kept of the old weights is gone."""
    name = next(name for name in MODELS if name.replace(".", "") in str(loaded.folder).replace(".", ""))
    other = tiny_decoder(name, tmp_path, fields={"max_position_embeddings": 1024, "seed": 1})
    made, ids = engine(loaded), words(STRIDE + 40, seed=8)
    assert made.submit(request("a", ids, 30)) is None
    for _ in range(6):
        made.step()
    made.load_weights(other)
    drain(made)
    again = request("b", ids, 12, logprobs=1)
    assert made.submit(again) is None
    result = drain(made)["b", 0]
    assert result.timing is not None
    assert result.timing.cached_tokens == STRIDE + 32  # of the first, as the new weights computed it
    same(result, alone(other, again)[0])
