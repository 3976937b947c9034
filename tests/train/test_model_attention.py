"""Attention in blocks of queries against one softmax over everything in float64."""

from __future__ import annotations

import pytest
import torch

from torchwright.train.model import Scores, explicit_attention, fused_attention
from torchwright.train.model.attention import BLOCK, MOST_BLOCKS

SCORES = {
    "full": Scores(scale=0.3, window=0, soft_cap=0.0),
    "window": Scores(scale=0.3, window=37, soft_cap=0.0),
    "capped": Scores(scale=0.3, window=0, soft_cap=2.0),
    "both": Scores(scale=0.3, window=BLOCK + 5, soft_cap=2.0),
    "sinks": Scores(scale=0.3, window=0, soft_cap=0.0),
    "sinks, window": Scores(scale=0.3, window=37, soft_cap=0.0),
    "sinks, capped": Scores(scale=0.3, window=0, soft_cap=2.0),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Relative error of a whole tensor's norm."""


def reference(
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    scores: Scores,
    documents_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    k, v = (part.repeat_interleave(q_BHTD.shape[1] // part.shape[1], 1) for part in (k_BKTD, v_BKTD))
    score = q_BHTD @ k.mT * scores.scale
    if scores.soft_cap:
        score = (score / scores.soft_cap).tanh() * scores.soft_cap
    distance = torch.arange(score.shape[-2])[:, None] - torch.arange(score.shape[-1])
    hidden = distance < 0
    if scores.window:
        hidden = hidden | (distance >= scores.window)
    if documents_BT is not None:
        hidden = hidden | (documents_BT[:, None, :, None] != documents_BT[:, None, None, :])
    score = score.masked_fill(hidden, -torch.inf)
    if scores.sinks_H is None:
        return score.softmax(-1) @ v
    sink = scores.sinks_H[:, None, None].expand(*score.shape[:-1], 1)
    return torch.cat([score, sink], -1).softmax(-1)[..., :-1] @ v


def given(kind: str, parts: list[torch.Tensor]) -> tuple[Scores, list[torch.Tensor]]:
    """The rules of a kind, and its parts with a sink for each head behind them where it has sinks."""
    if "sinks" not in kind:
        return SCORES[kind], parts
    random = torch.Generator().manual_seed(1)
    sinks_H = torch.randn(parts[0].shape[1], generator=random).to(parts[0].dtype).requires_grad_()
    return SCORES[kind].beside(sinks_H), [*parts, sinks_H]


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        *((tokens, torch.float64) for tokens in (1, 5, 2 * BLOCK, 2 * BLOCK + 19)),
        *((2 * BLOCK + 19, dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_outputs_and_gradients(tokens: int, kind: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(tokens)
    shapes = [(2, 6, tokens, 16), (2, 2, tokens, 16), (2, 2, tokens, 16)]
    parts = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    scores, parts = given(kind, parts)
    exact = [part.detach().double().requires_grad_() for part in parts]
    toward = torch.randn(shapes[0], generator=random).to(dtype)
    rules = scores if len(exact) == 3 else scores.beside(exact[3])
    wanted = reference(exact[0], exact[1], exact[2], rules)
    gradients = torch.autograd.grad(wanted, exact, toward.double())
    for attention in (explicit_attention, fused_attention):
        found = attention(parts[0], parts[1], parts[2], scores)
        assert found.dtype == dtype
        got = (found, *torch.autograd.grad(found, parts, toward))
        for ours, theirs in zip(got, (wanted, *gradients), strict=True):
            error = (ours.double() - theirs).norm() / theirs.norm().clamp(min=1)
            assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("tokens", [9, 2 * BLOCK + 19])
def test_documents_of_a_row_do_not_see_each_other(tokens: int, kind: str) -> None:
    """Each row with borders of its own, some on the blocks' own, against the same score matrix masked by hand."""
    random = torch.Generator().manual_seed(tokens)
    shapes = [(3, 4, tokens, 8), (3, 2, tokens, 8), (3, 2, tokens, 8)]
    parts = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
    toward = torch.randn(shapes[0], generator=random, dtype=torch.float64)
    documents = torch.stack([starts(tokens, cuts) for cuts in ((3, 4, BLOCK), (), (1, 2, BLOCK - 1, 200))])
    scores, parts = given(kind, parts)
    wanted = reference(parts[0], parts[1], parts[2], scores, documents)
    gradients = torch.autograd.grad(wanted, parts, toward)
    for attention in (explicit_attention, fused_attention):
        found = attention(parts[0], parts[1], parts[2], scores, documents)
        got = (found, *torch.autograd.grad(found, parts, toward))
        for ours, theirs in zip(got, (wanted, *gradients), strict=True):
            assert (ours - theirs).norm() / theirs.norm() < TOLERANCE[torch.float64]


def starts(tokens: int, cuts: tuple[int, ...]) -> torch.Tensor:
    """(T,): where the document of each token begins, in a row that is cut at these places."""
    return torch.tensor([max([0, *(cut for cut in cuts if cut <= place)]) for place in range(tokens)])


def test_a_long_sequence_is_cut_into_few_blocks() -> None:
    tokens = BLOCK * (MOST_BLOCKS + 1)
    part = torch.randn(1, 1, tokens, 2, generator=torch.Generator().manual_seed(0))
    found = explicit_attention(part, part, part, SCORES["window"])
    torch.testing.assert_close(
        found, fused_attention(part, part, part, SCORES["window"]), atol=1e-5, rtol=1e-4
    )
