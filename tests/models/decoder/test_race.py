"""The race that draws tokens: its distribution, and how often two models draw the same one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchwright.models.decoder import Sampler, Sampling
from torchwright.models.decoder.generation import race

DRAWS = 4000


def keys(count: int = DRAWS) -> list[int]:
    return [int(key) for key in np.random.default_rng(1).integers(0, 2**64, count, dtype=np.uint64)]


def weights(*shares: float) -> np.ndarray:
    return np.array(shares, np.float32)


@pytest.mark.parametrize(
    "weight_K",
    [
        weights(1, 1, 1, 1),
        weights(0.0, 3, 1, 0, 2),
        # Half of all is in tokens that race as one.
        np.concatenate([weights(1, 0.5), np.full(3000, 0.0005, np.float32)]),
        np.full(3000, 0.25, np.float32),
    ],
    ids=["equal", "zeros", "rest", "flat"],
)
def test_tokens_are_drawn_by_their_weights(weight_K: np.ndarray) -> None:
    found = np.bincount([race.winner(weight_K, None, key) for key in keys()], minlength=len(weight_K))
    assert not found[weight_K == 0].any()
    wanted = weight_K.astype(np.float64) / weight_K.sum(dtype=np.float64) * DRAWS
    class_of = np.minimum(np.arange(len(weight_K)), 2 + np.arange(len(weight_K)) // 100)  # some draws in each
    found, wanted = np.bincount(class_of, found), np.bincount(class_of, wanted)
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    squares, freedom = ((found - wanted) ** 2 / wanted).sum(), len(found) - 1
    assert abs(squares - freedom) < 5 * (2 * freedom) ** 0.5, "five deviations of chi-squared"


def test_a_token_keeps_its_time_wherever_it_stands() -> None:
    weight_K, tokens_K = weights(1, 2, 3, 4), np.array([7, 3, 11, 5])
    for key in keys(50):
        order = np.random.default_rng(key).permutation(4)
        one = tokens_K[race.winner(weight_K, tokens_K, key)]
        assert tokens_K[order][race.winner(weight_K[order], tokens_K[order], key)] == one


def test_similar_probabilities_often_draw_the_same_token() -> None:
    random = np.random.default_rng(0)
    target = random.dirichlet(np.full(50, 0.3))
    draft = 0.7 * target + 0.3 * random.dirichlet(np.full(50, 0.3))
    distance = np.abs(target - draft).sum() / 2
    pair = target.astype(np.float32), draft.astype(np.float32)
    same = np.mean([race.winner(pair[0], None, key) == race.winner(pair[1], None, key) for key in keys()])
    assert same >= (1 - distance) / (1 + distance) - 0.02
    greedy = target[draft.argmax()]
    assert same > greedy + 0.2, "no better than always the draft's likeliest token"


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 1}]
)
def test_a_draft_that_knows_the_model_guesses_every_draw(options: dict[str, float]) -> None:
    sampling = Sampling(**({"temperature": 0.8} | options))
    logits_V = 3 * torch.randn(60, generator=torch.Generator().manual_seed(2))
    logprob, tokens = logits_V.log_softmax(-1).sort(descending=True)
    known = tokens.numpy(), logprob.numpy()
    guessing, choosing = Sampler(sampling, (), 9), Sampler(sampling, (), 9)
    guesses = [guessing.guess(*known, ahead) for ahead in range(40)]
    assert [token for token, _ in guesses] == [choosing(logits_V) for _ in range(40)]
    assert all(0 <= confidence <= 1 for _, confidence in guesses)


def test_a_draft_without_numbers_has_no_confidence() -> None:
    nothing = np.full(3, -np.inf, np.float32)
    for temperature in (0.0, 1.0):
        assert Sampler(Sampling(temperature=temperature), (), 0).guess(np.arange(3), nothing, 0) == (0, 0.0)
