"""The choice of experts: the compiled operator against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchwright.hardware.kernels import ops, reference

CHOICES = {
    "softmax": (3, False, 1, 1, 2),
    "all": (12, False, 1, 1, 2),
    "sigmoid": (4, True, 1, 1, 2),
    "one": (1, True, 12, 2, 1),
    "groups": (3, True, 4, 2, 2),
    "by the best": (3, False, 3, 2, 1),
}
"""Arguments of `reference.choose` for twelve experts."""


def distinct(tokens: int) -> torch.Tensor:
    """Scores of which no two are equal, nor their ranks."""
    return torch.stack([torch.randperm(12) for _ in range(tokens)]) / 3.0 - 1.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CHOICES)
def test_near_the_reference(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scores = distinct(40).to(dtype)
    bias, weight = torch.randperm(12) * 0.031, torch.rand(12) + 0.5
    for last in ((False, 1.0), (True, 2.5)):
        # Ranks below zero: experts of hidden groups must not come before them (vllm#13474).
        for bias_X, weight_X in ((None, None), (bias, weight), (bias - 5, None)):
            expert, share = ops.route(scores, bias_X, weight_X, *CHOICES[kind], *last)
            exact, by = (None if x is None else x.double() for x in (bias_X, weight_X))
            wanted, factor = reference.route(scores.double(), exact, by, *CHOICES[kind], *last)
            assert torch.equal(expert, wanted)
            torch.testing.assert_close(share.double(), factor, rtol=2e-6, atol=0)


def test_the_first_of_equals_is_chosen() -> None:
    expert, share = ops.route(torch.zeros(2, 12), None, None, *CHOICES["softmax"], True, 1.0)
    assert expert.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(share, torch.full((2, 3), 1 / 3))
    expert, _ = ops.route(torch.zeros(1, 12), None, None, *CHOICES["groups"], True, 1.0)
    assert expert.tolist() == [[0, 1, 2]]


def test_scores_that_are_no_numbers_choose_experts_that_exist() -> None:
    scores = torch.randn(3, 12)
    scores[0], scores[1, 4], scores[2] = torch.nan, torch.inf, -torch.inf
    for kind in CHOICES.values():
        expert, _ = ops.route(scores, None, None, *kind, True, 1.0)
        assert expert.min() >= 0
        assert expert.max() < 12


@pytest.mark.parametrize(
    "kind",
    [(0, False, 1, 1, 2), (13, False, 1, 1, 2), (3, False, 5, 1, 2), (4, False, 4, 1, 2), (1, True, 4, 2, 3)],
)
def test_an_impossible_choice_is_refused(native: Any, kind: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be chosen"):
        native.route(torch.zeros(2, 12), None, None, *kind, True, 1.0)
    with pytest.raises(ValueError, match="bias must be"):
        native.route(torch.zeros(2, 12), torch.zeros(11), None, *CHOICES["softmax"], True, 1.0)
