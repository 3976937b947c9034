"""The engine called directly: what a request gets, how it ends, and what is refused."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Result, alone, answers, bundled, drain, engine, request, take, tiny_decoder, words

from torchwright.core.errors import TorchwrightError
from torchwright.models.decoder import PAGE, LoadedDecoder
from torchwright.models.decoder.feed_forward import RoutedExperts
from torchwright.models.decoder.scores import Logits
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.limits import PROMPTS, SEQUENCES
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import Cancel


@pytest.fixture(scope="module")
def model() -> LoadedDecoder:
    return bundled()


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.95}, {"repetition_penalty": 1.3}])
def test_answers_are_those_of_generate(model: LoadedDecoder, options: dict[str, Any]) -> None:
    prompts = [words(length, seed=length, vocabulary=2000) for length in (1, 15, 16, 33, 100)]
    submits = [request(str(i), ids, 20, seed=7, **options) for i, ids in enumerate(prompts)]
    found = answers(model, submits)
    for i, ids in enumerate(prompts):
        wanted = model.generate(ids, max_new_tokens=20, stop=[], seed=[7], **options)
        assert found[str(i), 0].tokens == wanted
        assert found[str(i), 0].finish == "length"


def test_a_stop_token_ends_and_is_the_last(model: LoadedDecoder) -> None:
    ids = words(20, seed=1)
    free = alone(model, request("a", ids, 20))[0].tokens
    stop = free[5]
    found = alone(model, request("a", ids, 20, stop_ids=[stop]))[0]
    assert found.finish == "stop"
    assert found.tokens == free[: free.index(stop) + 1]


def test_stop_tokens_are_held_back_until_min_tokens(model: LoadedDecoder) -> None:
    ids = words(20, seed=1)
    first = alone(model, request("a", ids, 1))[0].tokens[0]
    found = alone(model, request("a", ids, 10, stop_ids=[first], min_tokens=4))[0]
    assert first not in found.tokens[:4]


def test_logit_bias_moves_the_choice(model: LoadedDecoder) -> None:
    found = alone(model, request("a", [5, 6], 3, logit_bias={77: 100.0}))[0]
    assert found.tokens == [77, 77, 77]
    found = alone(model, request("a", [5, 6], 3, logit_bias={77: 100.0}, frequency_penalty=1000.0))[0]
    assert found.tokens.count(77) == 1


def test_logprobs_are_the_models_own(model: LoadedDecoder) -> None:
    ids = words(30, seed=2)
    options: dict[str, Any] = {"logit_bias": {9: 50.0}, "temperature": 0.3, "logprobs": 4}
    found = alone(model, request("a", ids, 5, **options))[0]
    logprob_TV = model.logits(torch.tensor([ids + found.tokens]))[0].log_softmax(-1)
    for place, entry in enumerate(found.logprobs):
        row_V = logprob_TV[len(ids) - 1 + place]
        assert entry.token == found.tokens[place]
        assert entry.logprob == pytest.approx(float(row_V[entry.token]), abs=1e-6)
        assert [token for token, _ in entry.top] == row_V.topk(4).indices.tolist()


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("step_tokens", [8, 512])
def test_prompt_logprobs_cover_the_prompt(model: LoadedDecoder, max_tokens: int, step_tokens: int) -> None:
    ids = words(40, seed=3)
    submit = request("a", ids, max_tokens, prompt_logprobs=2)
    made = engine(model, step_tokens=step_tokens, max_running=4)
    for _ in range(2):  # the second time the prefix is in the tree, and of no use
        assert made.submit(submit) is None
        found = drain(made)["a", 0]
        logprob_TV = model.logits(torch.tensor([ids]))[0].log_softmax(-1)
        assert found.finish == "length"
        assert len(found.tokens) == max_tokens
        assert found.prompt_logprobs is not None
        assert found.prompt_logprobs[0] is None
        for place, entry in enumerate(found.prompt_logprobs[1:], 1):
            assert entry is not None
            assert entry.token == ids[place]
            assert entry.logprob == pytest.approx(float(logprob_TV[place - 1, ids[place]]), abs=1e-6)
            assert len(entry.top) == 2
        assert found.timing is not None
        assert found.timing.cached_tokens == 0


def test_no_new_tokens_computes_the_prompt_for_the_next(model: LoadedDecoder) -> None:
    ids = words(50, seed=4)
    made = engine(model)
    assert made.submit(request("a", ids, 0)) is None
    assert drain(made)["a", 0].tokens == []
    assert made.submit(request("b", ids, 2)) is None
    timing = drain(made)["b", 0].timing
    assert timing is not None
    assert timing.cached_tokens == 48


def test_the_last_prompt_token_is_never_taken_from_the_tree(model: LoadedDecoder) -> None:
    ids = words(2 * PAGE, seed=5)
    made = engine(model)
    first, second = (_run(made, name, ids) for name in ("a", "b"))
    assert first.tokens == second.tokens
    assert second.timing is not None
    assert second.timing.cached_tokens == PAGE


def test_answers_are_remembered_as_prefixes_too(model: LoadedDecoder) -> None:
    made = engine(model)
    ids = words(20, seed=6)
    first = _run(made, "a", ids, 30)
    second = _run(made, "b", ids + first.tokens + [5])
    assert second.timing is not None
    assert second.timing.cached_tokens == 48  # 49 were computed: the last token of an answer never is


def test_n_answers_share_their_prompt(model: LoadedDecoder) -> None:
    ids = words(40, seed=7)
    found = answers(model, [request("a", ids, 12, n=4, temperature=1.2, seed=3)])
    each = [found["a", index] for index in range(4)]
    assert len({tuple(result.tokens) for result in each}) == 4
    computed = [result.timing.computed_tokens for result in each if result.timing]
    assert computed == [40 + 11, 11, 11, 11]
    assert model.generate(ids, max_new_tokens=12, stop=[], seed=[3], temperature=1.2) == each[0].tokens


def test_a_cancelled_request_frees_its_pages_in_one_step(model: LoadedDecoder) -> None:
    made = engine(model, prefix_cache=False)
    for name in "ab":
        made.submit(request(name, words(100, seed=8), 50))
    results: dict[tuple[str, int], Result] = {}
    take(results, made)
    before = made.stats().pages_used
    made.cancel(Cancel(id="a", reason="its client has gone"))
    assert made.stats().pages_used == before / 2
    take(results, made)
    assert results["a", 0].finish == "cancelled"
    assert results["a", 0].message == "its client has gone"
    made.cancel(Cancel(id="a", reason="again"))
    made.cancel(Cancel(id="unknown", reason="nobody"))
    drain(made, results)
    assert len(results["b", 0].tokens) == 50


@pytest.mark.parametrize("step_tokens", [16, 512])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_of_n_can_be_cancelled_at_any_time(model: LoadedDecoder, index: int, step_tokens: int) -> None:
    """With 16 tokens a step the prompt is half computed then, and another must take it over."""
    submit = request("a", words(60, seed=9), 8, n=3, temperature=1.0)
    wanted = alone(model, submit)
    for steps in range(4):
        made = engine(model, step_tokens=step_tokens, max_running=8)
        made.submit(submit)
        results: dict[tuple[str, int], Result] = {}
        for _ in range(steps):
            take(results, made)
        made.cancel(Cancel(id="a", index=index, reason="a test"))
        made.check_integrity()
        drain(made, results)
        assert results["a", index].finish == "cancelled"
        for other in {0, 1, 2} - {index}:
            assert results["a", other].tokens == wanted[other].tokens


def test_when_pages_run_out_all_finish(model: LoadedDecoder) -> None:
    """Twelve requests of five pages each in ten pages."""
    submits = [request(str(i), words(48, seed=i), 28, n=1 + i % 2, temperature=1.0) for i in range(12)]
    made = engine(model, pages=10)
    for submit in submits:
        assert made.submit(submit) is None
    results = drain(made)
    assert {result.finish for result in results.values()} == {"length"}
    assert made.stats().preemptions > 0
    timings = [result.timing for result in results.values() if result.timing and result.timing.preemptions]
    assert timings
    assert all(timing.preempted_s > 0 for timing in timings)


def test_a_time_out_ends_a_request_with_what_it_has(model: LoadedDecoder) -> None:
    clock = Clock()
    made = engine(model, clock=clock)
    made.submit(request("a", [5, 6, 7], 50, timeout_s=2.0, n=2))
    made.submit(request("b", [5, 6, 7], 5))
    results: dict[tuple[str, int], Result] = {}
    take(results, made)
    clock.now += 1.0
    take(results, made)
    clock.now += 1.0
    drain(made, results)
    for index in (0, 1):
        assert results["a", index].finish == "timeout"
        assert 0 < len(results["a", index].tokens) < 50
    assert results["b", 0].finish == "length"


def test_times_of_all_stages_add_up(model: LoadedDecoder) -> None:
    clock = Clock()
    made = engine(model, clock=clock, step_tokens=64, max_running=1, speculate="none")
    made.submit(request("a", words(10, seed=1), 3))
    made.submit(request("b", words(100, seed=2), 4))
    results: dict[tuple[str, int], Result] = {}
    while not made.idle:
        clock.now += 1.0
        take(results, made)
    timing = results["b", 0].timing
    assert timing is not None
    # It waits for three steps of "a" and the beginning of its own; its prompt takes two steps, each token one more.
    assert (timing.queue_s, timing.prefill_s, timing.decode_s, timing.preempted_s) == (4.0, 1.0, 3.0, 0.0)


def test_a_full_queue_refuses_and_says_when_to_come_back(model: LoadedDecoder) -> None:
    made = engine(model, max_running=1, max_queue=2)
    for name in "ab":
        assert made.submit(request(name, [5], 4)) is None
    refused = made.submit(request("c", [5], 4))
    assert refused is not None
    assert refused.reason == "queue_full"
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 1
    made.step()
    assert made.submit(request("c", [5], 4)) is None
    assert len(drain(made)) == 3


def test_an_idle_engine_takes_the_largest_request(model: LoadedDecoder) -> None:
    """256 prompts, two answers to each."""
    made = engine(model)
    for prompt in range(PROMPTS):
        assert made.submit(request(f"a-{prompt}", [5], 1, n=SEQUENCES // PROMPTS)) is None
    made.cancel_all("the test ends")


def test_what_can_never_fit_is_refused_with_the_numbers(model: LoadedDecoder) -> None:
    made = engine(model, pages=10, max_context=200)
    refused = made.submit(request("a", words(150, seed=1), 51))
    assert refused is not None
    assert refused.reason == "too_long"
    for number in ("150", "51", "201", "200"):
        assert number in refused.text
    refused = made.submit(request("a", words(150, seed=1), 11))
    assert refused is not None
    assert "160" in refused.text
    assert made.submit(request("a", words(150, seed=1), 10)) is None
    assert drain(made)["a", 0].finish == "length"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ids": []}, "ids"),
        ({"ids": [4096]}, "4096"),
        ({"ids": [-1]}, "-1"),
        ({"n": 0}, "n is 0"),
        ({"n": 1000}, "n is 1000"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"stop_ids": [5000]}, "stop_ids"),
        ({"logprobs": 5000}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"priority": 101}, "priority"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"logit_bias": {5000: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: math.inf}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    model: LoadedDecoder, options: dict[str, Any], word: str
) -> None:
    made = engine(model)
    refused = made.submit(request("a", **({"ids": [5]} | options)))
    assert refused is not None
    assert refused.reason == "invalid"
    assert word in refused.text
    assert made.idle


def test_an_id_in_use_is_refused_and_free_again_afterwards(model: LoadedDecoder) -> None:
    made = engine(model)
    assert made.submit(request("a", [5], 2)) is None
    refused = made.submit(request("a", [6], 2))
    assert refused is not None
    assert refused.reason == "invalid"
    drain(made)
    assert made.submit(request("a", [6], 2)) is None


def test_logits_that_are_no_numbers_end_their_sequence_only(
    model: LoadedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(model, prefix_cache=False)
    made.submit(request("good", [5, 6], 6))
    made.submit(request("bad", [7, 8], 6, temperature=1.0))
    real = model.decoder.answer

    def broken(*args: Any) -> Logits:
        values_NV = real(*args).values_NV
        if len(values_NV) == 2:
            values_NV[1, 3] = math.nan
        return Logits(values_NV)

    monkeypatch.setattr(model.decoder, "answer", broken)
    results = drain(made)
    assert results["bad", 0].finish == "error"
    assert "not numbers" in (results["bad", 0].message or "")
    assert results["good", 0].finish == "length"


def test_only_rows_that_are_looked_at_leave_the_device(
    model: LoadedDecoder, asynchronous: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greedy, a drawn and a reported answer in one step."""
    asked: list[list[int]] = []
    fetched = Logits.fetched
    monkeypatch.setattr(Logits, "fetched", lambda self, rows: asked.append(list(rows)) or fetched(self, rows))
    options = {"drawn": {"temperature": 1.0}, "reported": {"logprobs": 1}}
    submits = [request(name, [5, 6], 3, **options.get(name, {})) for name in ("greedy", "drawn", "reported")]
    answers(model, submits, prefix_cache=False, speculate="none")
    assert asked == [[1, 2]] * 3


def test_the_order_is_by_priority_and_then_by_arrival(model: LoadedDecoder) -> None:
    clock = Clock()
    made = engine(model, max_running=1, clock=clock)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -1)):
        made.submit(request(name, [5], 2, priority=priority))
        clock.now += 0.1
    ends: list[str] = []
    while not made.idle:
        ends += [output.id for output in made.step().outputs if output.finish]
    assert ends == ["d", "a", "c", "b"]


def test_waiting_makes_up_for_a_low_priority(model: LoadedDecoder) -> None:
    """A stream of urgent requests does not hold an old one back for ever."""
    clock = Clock()
    made = engine(model, max_running=1, clock=clock)
    made.submit(request("patient", [5], 2, priority=5))
    ended = False
    for number in range(60):
        made.submit(request(f"urgent {number}", [5], 2))
        clock.now += 1.0
        for _ in range(2):
            ended |= any(output.id == "patient" and output.finish for output in made.step().outputs)
        if ended:
            break
    assert ended
    assert 49 <= number <= 52  # five levels of ten seconds each


def test_every_end_is_logged_with_its_reason(model: LoadedDecoder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "torchwright.serve")
    made = engine(model)
    made.submit(request("one", [5], 2))
    made.submit(request("two", [5], 9))
    made.submit(request("three", [5], 5000))
    made.step()
    made.cancel(Cancel(id="two", reason="its client has gone"))
    drain(made)
    text = caplog.text
    assert "one[0] ended: length" in text
    assert "two[0] ended: cancelled, its client has gone" in text
    assert "three refused" in text


def test_a_model_on_stock_operators_is_not_deterministic(model: LoadedDecoder) -> None:
    from torchwright.models.decoder import load_decoder
    from torchwright.workloads.language import BUNDLED

    stock = load_decoder(BUNDLED, torch.float32)
    with pytest.raises(TorchwrightError, match="--no-deterministic"):
        ServingEngine(stock, size=CacheSize(8, 64))
    made = ServingEngine(stock, size=CacheSize(8, 64), options=EngineOptions(deterministic=False))
    made.submit(request("a", [5, 6, 7], 8))
    assert drain(made)["a", 0].tokens == stock.generate([5, 6, 7], max_new_tokens=8, stop=[])


def test_a_mixture_of_experts_with_a_stock_router_is_refused(tmp_path: Path) -> None:
    made = tiny_decoder("olmoe", tmp_path)
    engine(made, pages=8)
    for module in made.decoder.modules():
        if isinstance(module, RoutedExperts):
            module.packed_router = None
    with pytest.raises(TorchwrightError, match="router"):
        engine(made, pages=8)


def test_the_fingerprint_is_that_of_the_weights(model: LoadedDecoder) -> None:
    first, again = (engine(model, pages=8).fingerprint for _ in range(2))
    assert first == again
    with torch.inference_mode():
        changed = copy.deepcopy(model)
        changed.decoder.norm[5] += 1
    assert engine(changed, pages=8).fingerprint != first


def test_a_time_out_counts_in_the_queue_too(model: LoadedDecoder) -> None:
    clock = Clock()
    made = engine(model, clock=clock, max_running=1)
    made.submit(request("a", [5], 6))
    made.submit(request("b", [5], 6, timeout_s=1.0))
    clock.now += 2.0
    results = drain(made)
    assert results["b", 0].finish == "timeout"
    assert results["b", 0].tokens == []
    assert results["b", 0].timing is not None
    assert results["b", 0].timing.queue_s == 2.0


@pytest.mark.parametrize(
    "options", [{"step_tokens": 0}, {"max_running": 0}, {"max_context": 0}, {"step_tokens": 8}]
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, int]) -> None:
    with pytest.raises(TorchwrightError, match=next(iter(options))):
        EngineOptions(**options)


def test_hundreds_of_short_requests_leave_nothing_behind(model: LoadedDecoder) -> None:
    made = engine(model, pages=64)
    for turn in range(8):
        for number in range(50):
            assert (
                made.submit(request(f"{turn} {number}", words(20, seed=number), 1, timeout_s=900.0)) is None
            )
        drain(made)
    assert not made._live
    assert not made._scheduler.running
    assert not made._scheduler.waits


def _run(made: ServingEngine, name: str, ids: list[int], max_tokens: int = 4) -> Result:
    assert made.submit(request(name, ids, max_tokens)) is None
    return drain(made)[name, 0]
