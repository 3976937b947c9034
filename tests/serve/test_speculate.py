"""Prompt look-up: what it proposes, how it learns, and that answers do not change by it."""

from __future__ import annotations

import pytest
from engine_support import answers, bundled, request, words

from torchwright.models.decoder import LoadedDecoder
from torchwright.serve.engine.speculate import LARGEST_PROPOSAL, LONGEST_PAUSE, Lookup


@pytest.fixture(scope="module")
def model() -> LoadedDecoder:
    return bundled()


def test_proposes_what_followed_the_same_tokens() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert lookup.propose(8) == [4, 5, 6, 7]
    assert lookup.propose(2) == [4, 5]


def test_the_longer_run_and_the_latest_place_count() -> None:
    assert Lookup([1, 2, 3, 9, 9, 0, 2, 3, 8, 8, 1, 2, 3]).propose(2) == [9, 9]
    assert Lookup([2, 3, 7, 7, 2, 3, 8, 8, 2, 3]).propose(2) == [8, 8]


def test_a_long_run_tells_two_continuations_apart() -> None:
    """The last three tokens were followed by 7 and by 8 in turn: what stands further back tells."""
    text = [1, 2, 3, 4, 5, 7, 1, 9, 3, 4, 5, 8]
    for rounds in (2, 40):
        for cut, follows in ((5, 7), (11, 8)):
            assert Lookup(text * rounds + text[:cut]).propose(1) == [follows]


def test_new_tokens_have_no_proposal() -> None:
    assert Lookup([1, 2, 3, 4]).propose(8) == []
    assert Lookup([1]).propose(8) == []


def test_a_repetition_goes_on() -> None:
    assert Lookup([5, 5, 5, 5]).propose(8) == [5, 5, 5, 5]
    assert Lookup([1, 2, 1, 2, 1]).propose(8) == [2, 1, 2, 1]


def test_tokens_that_come_later_are_found() -> None:
    tokens = [1, 2, 3]
    lookup = Lookup(tokens)
    assert lookup.propose(8) == []
    tokens += [4, 1, 2]
    assert lookup.propose(8) == [3, 4, 1, 2]


def test_success_makes_proposals_longer_and_failure_shorter() -> None:
    lookup = Lookup([*list(range(20)), 0, 1])
    for _ in range(4):
        lookup.learn(4, 4)
    assert len(lookup.propose(100)) == LARGEST_PROPOSAL
    lookup.learn(8, 3)
    assert len(lookup.propose(100)) == 3


def test_failures_in_a_row_pause_for_longer_and_longer() -> None:
    lookup = Lookup([5, 5, 5, 5])
    pauses = []
    for _ in range(8):
        lookup.learn(2, 0)
        pauses.append(0)
        while not lookup.propose(8):
            pauses[-1] += 1
    assert pauses[:4] == [1, 3, 7, 15]
    assert max(pauses) == LONGEST_PAUSE


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_the_same_in_fewer_steps(model: LoadedDecoder, temperature: float) -> None:
    """Text that repeats itself, which the model's greedy answer soon does too."""
    ids = words(12, seed=1, vocabulary=2000) * 4
    submit = request("a", ids, 60, temperature=temperature, seed=5)
    without = answers(model, [submit], speculate="none")["a", 0]
    found = answers(model, [submit], speculate="ngram")["a", 0]
    assert found.tokens == without.tokens
    assert found.timing is not None
    assert without.timing is not None
    assert without.timing.speculated_tokens == 0
    assert found.timing.speculated_tokens > 0
    if temperature == 0:
        assert found.timing.accepted_tokens > 15


def test_nothing_is_proposed_beyond_the_last_token(model: LoadedDecoder) -> None:
    """The request's own pages are all there are, so a row too many would not fit."""
    ids = [7] * 33
    found = answers(model, [request("a", ids, 15)], pages=3, speculate="ngram")["a", 0]
    assert len(found.tokens) == 15
    assert found.timing is not None
    assert found.timing.preemptions == 0


def test_many_sequences_do_not_propose(model: LoadedDecoder) -> None:
    """Verifying takes rows, which are free only while the batch is small."""
    submits = [request(str(i), [7] * 20, 10) for i in range(4)]
    found = answers(model, submits, speculate="ngram", speculate_rows=4)
    assert all(result.timing and not result.timing.speculated_tokens for result in found.values())
