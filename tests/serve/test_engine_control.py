"""An engine that is steered: pauses, an empty prefix cache, versions of weights; and scores of a part of a prompt."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from engine_support import Results, drain, engine, request, take, tiny_decoder, words

from torchwright.core.errors import ModelError
from torchwright.models.decoder import LoadedDecoder
from torchwright.serve.engine.control import WAITING, EngineControl
from torchwright.serve.wire.messages import (
    Controlled,
    FlushCache,
    NameWeights,
    Pause,
    PauseMode,
    RequestRefused,
    Resume,
    UpdateWeights,
    WeightsUpdated,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedDecoder, LoadedDecoder]:
    """One architecture, two sets of weights."""
    one, other = (tiny_decoder("llama", tmp_path_factory.mktemp(name)) for name in ("one", "other"))
    assert isinstance(other.decoder.norm, torch.Tensor)
    other.decoder.norm.mul_(torch.rand(other.decoder.norm.shape) + 0.5)
    return one, other


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_computes_nothing_and_changes_no_answer(
    models: tuple[LoadedDecoder, LoadedDecoder], mode: PauseMode
) -> None:
    made, still = engine(models[0]), engine(models[0])
    for one in (made, still):
        for place in range(4):
            assert one.submit(request(str(place), words(30, place), 20, logprobs=0, n=1 + place % 2)) is None
    results = Results()
    for _ in range(random.randint(1, 12)):
        take(results, made)
    before, held = made.stats().generated_tokens, made.stats().pages_used
    made.pause(mode)
    assert made.submit(request("late", words(10, 9), 4)) is None
    for _ in range(3):
        take(results, made)
    stats = made.stats()
    assert (stats.generated_tokens, stats.waiting > 0) == (before, True)
    assert stats.pages_used == (held if mode == "in_place" else 0)
    assert made.flush() == (mode == "retract")
    made.check_integrity()
    made.resume()
    drain(made, results)
    expected = drain(still)
    assert {key: (result.tokens, result.logprobs) for key, result in results.items() if key[0] != "late"} == {
        key: (result.tokens, result.logprobs) for key, result in expected.items()
    }
    assert len(results["late", 0].tokens) == 4
    made.close()
    still.close()


def test_a_pause_that_aborts_ends_requests_with_what_they_have(
    models: tuple[LoadedDecoder, LoadedDecoder],
) -> None:
    made = engine(models[0], max_running=1)
    for name in ("runs", "waits"):
        assert made.submit(request(name, words(8, 1), 50)) is None
    results = Results()
    for _ in range(5):
        take(results, made)
    made.pause("abort")
    drain(made, results)
    assert [result.finish for result in results.values()] == ["abort", "abort"]
    assert len(results["runs", 0].tokens) > 0
    made.close()


def test_requests_time_out_in_a_pause(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    now = 0.0
    made = engine(models[0], clock=lambda: now)
    made.submit(request("a", words(8, 1), 50, timeout_s=5.0))
    made.step()
    made.pause("in_place")
    now = 6.0
    (result,) = drain(made).values()
    assert result.finish == "timeout"
    made.close()


def test_answers_say_which_weights_chose_which_tokens(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    one, other = models
    made = engine(one)
    first = made.weight_version
    assert first == made.fingerprint
    made.submit(request("a", words(8, 1), 9))
    results = Results()
    while not results or len(results["a", 0].tokens) < 3:
        take(results, made)
    made.load_weights(other, "second")
    made.submit(request("b", words(8, 2), 4))
    while len(results["a", 0].tokens) < 5:
        take(results, made)
    made.load_weights(one, "third")
    made.name_weights("fourth")
    drain(made, results)
    timing = results["a", 0].timing
    assert timing is not None
    assert [name for name, _ in timing.versions] == [first, "second", "fourth"]
    ends = [end for _, end in timing.versions]
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (3, 9)
    made.submit(request("c", words(8, 3), 0))
    timing = drain(made)["c", 0].timing
    assert timing is not None
    assert timing.versions == [("fourth", 0)]
    made.close()


@pytest.mark.parametrize("start", [0, 1, 15, 16, 40, 58, 59])
def test_a_prompt_is_scored_from_a_place_behind_the_prefix_cache(
    models: tuple[LoadedDecoder, LoadedDecoder], start: int
) -> None:
    made, ids = engine(models[0], step_tokens=64), words(60, 4)
    made.submit(request("whole", ids, 1, prompt_logprobs=2))
    whole = drain(made)["whole", 0].prompt_logprobs
    made.submit(request("tail", ids, 1, prompt_logprobs=2, prompt_logprobs_from=start, logprob_ids=[7, 5]))
    found = drain(made)["tail", 0]
    assert whole is not None
    assert found.prompt_logprobs is not None
    assert found.timing is not None
    assert found.timing.cached_tokens == start // 16 * 16
    assert found.prompt_logprobs[0] is None
    told = [(score.token, score.logprob, score.top) for score in found.prompt_logprobs[1:] if score]
    assert told == [(score.token, score.logprob, score.top) for score in whole[start + 1 :] if score]
    assert len(told) == 59 - start
    made.submit(request("asked", ids, 1, prompt_logprobs=128, prompt_logprobs_from=58, logprob_ids=[7, 5]))
    scores = drain(made)["asked", 0].prompt_logprobs
    assert scores is not None
    last = scores[-1]
    assert last is not None
    assert last.asked == [dict(last.top)[7], dict(last.top)[5]]
    made.close()


def test_a_place_beyond_the_prompt_is_refused(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    made = engine(models[0])
    for wrong in ({"prompt_logprobs_from": 4}, {"logprob_ids": [9999]}, {"logprob_ids": [1] * 129}):
        refused = made.submit(request("a", [3, 4, 5, 6], 1, prompt_logprobs=0, **wrong))
        assert refused is not None
    made.close()


class Steered:
    """An engine with its control, whose weights are read when the test lets them."""

    def __init__(self, models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
        self.engine, self.may_read = engine(models[0]), threading.Event()
        self.models = {"one": models[0], "other": models[1]}
        self.control = EngineControl(self.engine, self._read)

    def _read(self, folder: str) -> LoadedDecoder:
        assert self.may_read.wait(20)
        if folder == "broken":
            raise ModelError("no weights there")
        if folder == "fault":
            raise KeyError("a fault")
        return self.models[folder]

    def answers(self, count: int) -> list[object]:
        """So many answers, with steps in between."""
        found: list[object] = []
        while len(found) < count:
            self.engine.step()
            found += self.control.answers()
        return found

    def close(self) -> None:
        self.may_read.set()
        self.control.close()
        self.engine.close()


def test_steps_go_on_while_weights_are_read_and_change_between_two(
    models: tuple[LoadedDecoder, LoadedDecoder],
) -> None:
    steered = Steered(models)
    made, control = steered.engine, steered.control
    made.submit(request("a", words(8, 1), 40))
    control.take(UpdateWeights(id="u", folder="other", version="v2"))
    results = Results()
    for _ in range(10):
        take(results, made)
        assert control.answers() == []
    assert control.reading
    steered.may_read.set()
    (answer,) = steered.answers(1)
    assert answer == WeightsUpdated(id="u", version="v2", fingerprint=made.fingerprint, requests=1)
    assert not control.reading
    steered.close()


def test_weights_that_cannot_be_read_change_nothing(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    steered = Steered(models)
    steered.may_read.set()
    version = steered.engine.weight_version
    steered.control.take(UpdateWeights(id="a", folder="broken", abort=True, pause=True))
    steered.control.take(UpdateWeights(id="b", folder="fault"))
    refused = steered.answers(2)
    assert all(isinstance(answer, RequestRefused) for answer in refused)
    assert "no weights there" in str(refused[0])
    assert (steered.engine.weight_version, steered.engine.paused) == (version, False)
    steered.close()


def test_updates_have_their_order_and_a_bound(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    steered = Steered(models)
    for place in range(WAITING + 1):
        steered.control.take(
            UpdateWeights(id=str(place), folder=("one", "other")[place % 2], version=str(place))
        )
    steered.may_read.set()
    refused, *done = steered.answers(WAITING + 1)
    assert isinstance(refused, RequestRefused)
    assert [answer.version for answer in done if isinstance(answer, WeightsUpdated)] == [
        str(place) for place in range(WAITING)
    ]
    steered.close()


def test_an_update_may_end_requests_and_leave_a_pause(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    steered = Steered(models)
    made, control = steered.engine, steered.control
    made.submit(request("a", words(8, 1), 40))
    results = Results()
    for _ in range(4):
        take(results, made)
    steered.may_read.set()
    control.take(UpdateWeights(id="u", folder="other", version="v2", abort=True, pause=True))
    while not control.reading:
        control.answers()
    while control.reading:
        take(results, made)
        control.answers()
    drain(made, results)
    ended = results["a", 0]
    assert (ended.finish, made.paused) == ("abort", True)
    assert ended.timing is not None
    assert "v2" not in dict(ended.timing.versions)
    control.take(Resume(id="r"))
    control.take(NameWeights(id="n", version="v3"))
    control.take(Pause(id="p", mode="retract"))
    control.take(FlushCache(id="f"))
    answers = control.answers()
    assert answers[0] == Controlled(id="r")
    assert [type(answer) for answer in answers] == [Controlled, WeightsUpdated, Controlled, Controlled]
    assert made.weight_version == "v3"
    steered.close()


def test_a_cache_that_is_used_is_not_emptied(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    steered = Steered(models)
    made = steered.engine
    made.submit(request("a", words(40, 1), 3))
    made.step()
    steered.control.take(FlushCache(id="f"))
    assert isinstance(steered.control.answers()[0], RequestRefused)
    drain(made)
    assert made.stats().pages_cached > 0
    steered.control.take(FlushCache(id="f"))
    assert steered.control.answers() == [Controlled(id="f")]
    assert made.stats().pages_cached == 0
    made.check_integrity()
    steered.close()
