"""Sampling: what each option keeps, and that a sequence's draws are its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from simulated_card import simulated_card
from torchwright.core.errors import TorchwrightError
from torchwright.hardware.kernels.pack import PANEL
from torchwright.models.decoder import Sampler, Sampling
from torchwright.models.decoder.generation.sampling import _kept
from torchwright.models.decoder.scores import Logits, Scores

V = 50


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def kept(scores_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities (V,) of the tokens that are kept."""
    tokens, weight = _kept(Scores(scores_V.numpy()), float(scores_V.max()), sampling)
    found = torch.zeros(len(scores_V), dtype=torch.float64)
    found[torch.arange(len(found)) if tokens is None else torch.from_numpy(tokens)] = torch.from_numpy(
        weight
    ).double()
    return found / found.sum()


def draws(sampling: Sampling, count: int, seed: int = 0, prompt: tuple[int, ...] = ()) -> list[int]:
    """Independent draws from the same logits."""
    return [Sampler(sampling, prompt, seed + i)(logits()) for i in range(count)]


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_k": 500}, []),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 1e-9}, [TopPLogitsWarper(1e-9)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"top_k": 8, "top_p": 0.7}, [TopKLogitsWarper(8), TopPLogitsWarper(0.7)]),
        (
            {"top_k": 20, "top_p": 0.9, "min_p": 0.2},
            [TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.2)],
        ),
    ],
)
def test_kept_tokens_are_those_of_transformers(options: dict, warpers: list) -> None:
    for seed in range(10):
        given = logits(seed).double()
        scores = TemperatureLogitsWarper(0.7)(torch.zeros(1, 0, dtype=torch.long), given[None])
        got = kept(given, Sampling(temperature=0.7, **options))
        for warper in warpers:
            scores = warper(torch.zeros(1, 0, dtype=torch.long), scores)
        torch.testing.assert_close(got, scores[0].softmax(-1))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_a_large_vocabulary_is_cut_as_if_it_were_sorted(spread: float, ties: bool) -> None:
    """20 thousand tokens, of which a few, some thousand or nearly all are kept."""
    weight = (spread * torch.randn(20_000, generator=torch.Generator().manual_seed(1))).exp()
    weight = weight.log2().round().exp2() if ties else weight
    ordered, token = weight.double().sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    wanted = token[before < 0.9 * ordered.sum()]
    got = kept(weight.double().log(), Sampling(temperature=1.0, top_p=0.9))
    assert set(got.nonzero()[:, 0].tolist()) == set(wanted.tolist())


def test_a_draw_depends_on_its_place_and_on_nothing_that_was_drawn_before() -> None:
    sampling = Sampling(temperature=2.0)
    often, once = Sampler(sampling, (), 5), Sampler(sampling, (), 5)
    for _ in range(10):
        often.choose(logits(3))
    assert often.choose(logits()) == once.choose(logits())
    often.accept(1)
    once.accept(2)
    assert often.choose(logits()) == once.choose(logits())
    others = [Sampler(sampling, (), 5, index).choose(logits()) for index in range(20)]
    assert len(set(others)) > 5


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad in (math.nan, math.inf):
        broken = logits()
        broken[7] = bad
        for temperature in (0.0, 1.0):
            with pytest.raises(TorchwrightError, match="not numbers"):
                Sampler(Sampling(temperature=temperature), (), 0)(broken)


def test_draws_follow_the_probabilities() -> None:
    counts = torch.bincount(torch.tensor(draws(Sampling(temperature=1.5), 4000)), minlength=V)
    expected = (logits().double() / 1.5).softmax(-1) * 4000
    spread = (counts - expected).abs() / expected.clamp_min(1).sqrt()
    assert spread.max() < 4.5  # standard errors


def test_greedy_is_the_most_likely_token_and_draws_nothing() -> None:
    assert set(draws(Sampling(), 5)) == {int(logits().argmax())}


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    assert set(draws(Sampling(temperature=1e-30), 5)) == {int(logits().argmax())}


def test_masked_tokens_are_never_drawn() -> None:
    masked = logits().clone()
    masked[torch.arange(V) != 7] = -math.inf
    assert Sampler(Sampling(temperature=5.0), (), 0)(masked) == 7


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_answer() -> None:
    sampler = Sampler(Sampling(repetition_penalty=1.7), prompt=(3, 4, 4), seed=0)
    first = sampler(logits())
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 4, first]]), logits()[None])[0]
    torch.testing.assert_close(sampler._penalized(logits()), wanted)


@pytest.mark.parametrize("penalty", [1e-30, 1e-40, 5e-324])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1.0])
def test_a_tiny_repetition_penalty_prefers_what_was_said_and_is_finite(
    penalty: float, temperature: float
) -> None:
    said = int(logits().topk(3).indices[2])
    sampler = Sampler(Sampling(repetition_penalty=penalty, temperature=temperature), prompt=(said,), seed=0)
    assert sampler(logits()) == said
    masked = torch.full((V,), -math.inf)
    masked[7] = -1.0
    assert sampler(masked) == 7


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    sampler = Sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.25), prompt=(3,), seed=0)
    peak = torch.zeros(V)
    peak[9] = 100.0
    sampler(peak)
    sampler(peak)
    change = sampler._penalized(torch.zeros(V))
    assert change[9] == -(0.5 + 2 * 0.25)
    assert change.count_nonzero() == 1


def peaks(logits_V: torch.Tensor) -> torch.Tensor:
    return torch.stack([panel.max() for panel in logits_V.split(PANEL)])


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_peaks_change_no_choice(size: int, ties: bool) -> None:
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0},
        *({"temperature": 0.7, "top_k": k} for k in (1, 2, 40, 64, 500, 9000)),
        {"temperature": 1.2, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 0.8, "top_k": 7, "repetition_penalty": 1.5, "presence_penalty": 0.2},
    )
    random = torch.Generator().manual_seed(size)
    for seed in range(8):
        logits_V = 3 * torch.randn(size, generator=random)
        logits_V = logits_V.round() if ties else logits_V
        assert Logits(logits_V[None], peaks(logits_V)[None]).best() == Logits(logits_V[None]).best()
        for options in choices:
            sampler = Sampler(Sampling(**options), (0,), seed)
            assert sampler.choose(logits_V, peaks(logits_V)) == sampler.choose(logits_V)


def test_rows_on_a_device_are_those_of_the_cpu() -> None:
    """The most likely tokens are found there, and the rows that are asked for come to the CPU."""
    random = torch.Generator().manual_seed(0)
    values_NV = torch.randn(6, 300, generator=random).round()  # with ties
    values_NV[1, 7], values_NV[2, 8], values_NV[3] = math.nan, math.inf, -math.inf
    here = Logits(values_NV)
    with simulated_card():
        there = Logits(values_NV.to("cuda"))
        assert there.best() == here.best()
        assert there.best()[1:4] == [None, None, None]
        for rows in ([0, 4], [5, 0], [], range(6)):
            found = there.fetched(rows)
            for row in rows:
                values_V, peaks_P = found.row(row)
                assert values_V.device.type == "cpu"
                torch.testing.assert_close(values_V, values_NV[row], rtol=0, atol=0, equal_nan=True)
                assert peaks_P is None
            assert len(found.values_NV) == len(rows)
        with pytest.raises(KeyError):
            there.fetched([0, 4]).row(1)
    assert here.fetched([0]) is here


def test_the_most_likely_tokens_are_those_of_a_sort() -> None:
    for seed in range(20):
        logits_V = torch.randn(777, generator=torch.Generator().manual_seed(seed)).mul(4).round().div(2)
        for count in (1, 5, 12, 13, 200):
            wanted = (logits_V >= logits_V.sort(descending=True).values[count - 1]).nonzero()[:, 0]
            for known in (None, peaks(logits_V).numpy()):
                assert Scores(logits_V.numpy(), known).top(count).tolist() == wanted.tolist()


def test_logits_are_not_changed() -> None:
    before = logits()
    sampler = Sampler(Sampling(repetition_penalty=2.0, temperature=1.0, top_k=3), prompt=(1, 2), seed=0)
    sampler(before)
    assert torch.equal(before, logits())


def test_same_seed_same_draws() -> None:
    sampling = Sampling(temperature=2.0)
    one, two, other = (Sampler(sampling, (), seed) for seed in (5, 5, 6))
    a, b, c = ([sampler(logits(i)) for i in range(30)] for sampler in (one, two, other))
    assert a == b != c


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict) -> None:
    with pytest.raises(TorchwrightError, match=next(iter(options))):
        Sampling(**options)


def test_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(TorchwrightError, match="did you mean 'temperature'"):
        Sampling.of({"temprature": 1.0})
