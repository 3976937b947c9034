"""Proposals that are worth their rows: what was accepted so far, against what rows cost."""

from __future__ import annotations

import itertools
import random

import pytest
from engine_support import bundled, drain, engine, request, words

from torchwright.models.decoder import LoadedDecoder
from torchwright.models.decoder.cache import PagedCache
from torchwright.serve.engine.acceptance import MEMORY, Acceptance
from torchwright.serve.engine.row_costs import MEASURED_ROWS, RowCosts, measure_rows

DEAR = RowCosts([1, 16], [1.0, 16.0])
"""Each row costs as much as a step of one: no proposal that may be wrong is worth it."""


@pytest.fixture(scope="module")
def model() -> LoadedDecoder:
    return bundled()


def test_acceptance_is_learned_by_confidence() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.learn([0.95, 0.15, 0.15], 1)
    assert acceptance.of(0.93) > 0.95
    assert acceptance.of(0.12) < 0.05
    assert 0.4 < acceptance.of(0.5) < 0.6, "what was never proposed is believed"


def test_costs_between_and_beyond_measured_rows_lie_on_lines() -> None:
    costs = RowCosts([1, 2, 4], [1.0, 1.5, 2.0])
    assert [costs(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.5, 1.75, 2.0, 2.5]


def test_measured_costs_never_fall_with_rows() -> None:
    assert RowCosts.rising([1, 2, 4], [3.0, 1.0, 2.0]).seconds == [1.0, 1.0, 2.0]


def test_as_many_are_verified_as_give_the_most_tokens_a_second() -> None:
    """Against every choice of the first proposals of each chain."""
    draw = random.Random(5)
    for _ in range(200):
        seconds = itertools.accumulate(draw.uniform(0.05, 0.6) for _ in range(5))
        costs = RowCosts([1, 2, 4, 8, 16], [1 + s for s in seconds])
        chains = [
            list(itertools.accumulate((draw.random() for _ in range(draw.randrange(4))), lambda a, b: a * b))
            for _ in range(draw.randrange(1, 4))
        ]
        decoding, room = len(chains) + draw.randrange(3), draw.randrange(6)

        def rate(counts: tuple[int, ...]) -> float:
            right = sum(sum(chain[:count]) for chain, count in zip(chains, counts, strict=True))  # noqa: B023
            return (decoding + right) / costs(decoding + sum(counts))  # noqa: B023

        choices = itertools.product(*(range(len(chain) + 1) for chain in chains))
        best = max(rate(counts) for counts in choices if sum(counts) <= room)
        found = costs.worth(chains, decoding, room)
        assert sum(found) <= room
        assert rate(tuple(found)) == pytest.approx(best)


def test_a_proposal_that_is_no_longer_made_is_tried_again() -> None:
    acceptance = Acceptance()
    for _ in range(int(MEMORY)):
        acceptance.learn([0.55], 0)
    assert acceptance.of(0.55) < 0.02
    for _ in range(4 * int(MEMORY)):
        acceptance.forget(0.55)
    assert acceptance.of(0.55) > 0.25
    assert acceptance.of(0.95) == pytest.approx(0.95), "the other classes are as they were"


def test_rows_are_measured_over_a_cache_that_is_empty_again(model: LoadedDecoder) -> None:
    cache = PagedCache(model.config, pages=2, dtype=model.kv_dtype, device=model.device)
    costs = measure_rows(model.decoder, cache)
    assert list(costs.rows) == list(MEASURED_ROWS)
    assert sorted(costs.seconds) == list(costs.seconds)
    assert cache.pool.free == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nothing_is_looked_up_where_rows_cost_more_than_they_bring(
    model: LoadedDecoder, temperature: float
) -> None:
    made = engine(model, speculate="ngram", row_costs=DEAR)
    made.submit(request("a", words(12, seed=1, vocabulary=2000) * 4, 40, temperature=temperature))
    assert len(drain(made)["a", 0].tokens) == 40
    assert made.stats().speculated_tokens == 0


def test_drawn_answers_that_repeat_nothing_do_not_stop_greedy_ones(model: LoadedDecoder) -> None:
    """Acceptance of greedy sequences is learned on its own: what is looked up for drawn ones is seldom right."""
    costs = RowCosts([1, 16], [1.0, 5.0])
    made = engine(model, speculate="ngram", row_costs=costs)
    ids = words(12, seed=1, vocabulary=2000) * 4
    for number in range(4):
        made.submit(request(f"drawn {number}", ids, 60, temperature=2.0, seed=number))
        drain(made)
    before = made.stats()
    made.submit(request("greedy", ids, 60))
    found = drain(made)["greedy", 0]
    assert found.timing is not None
    assert made.stats().speculated_tokens > before.speculated_tokens
    assert found.timing.accepted_tokens > 0.6 * found.timing.speculated_tokens
