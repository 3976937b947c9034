"""Compare a candidate's outputs with the original's.

Every comparison ends in a `Quality`. Its `drop_high`, the upper end of a 95% interval, is held against the budget.
The intervals are Student's t for means, Clopper and Pearson's for shares, and chi-square for the relative error, a
root mean square. A user's own value is not a mean over a sample and has no interval. Long sums are computed in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchwright.core import nested
from torchwright.core.errors import WorkloadError
from torchwright.core.intervals import mean_bounds, rms_bounds, share_bounds
from torchwright.core.records import RELATIVE_ERROR, Quality

FEWEST_ANSWERS = 368
"""So many equal answers show that less than 1% change; fewer are judged by the relative error."""
ROUNDING = 1e-4
"""A relative error below this is another order of the same float32 operations."""
RESAMPLES = 2_000
"""Draws of a bootstrap."""
MAX_NLL = 700
"""Nats; exp() of more overflows a float64."""


def flatten(output: Any) -> list[torch.Tensor]:
    """The tensors of a nested output, in order; numbers become tensors.

    Raises `WorkloadError` when there is nothing to compare.
    """
    leaves = [
        leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf)
        for leaf in nested.leaves(output)
        if isinstance(leaf, torch.Tensor | int | float | bool)
    ]
    if not leaves:
        raise WorkloadError(
            "the model returned nothing that can be compared",
            found=type(output).__name__,
            allowed="tensors or numbers, nested in tuples, lists or dicts",
            next="pass metric=, a callable of model → float",
        )
    return [leaf.detach().cpu() for leaf in leaves]


def relative_error(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> Quality:
    """‖candidate − reference‖ / ‖reference‖ over all outputs (root mean square), as the drop itself.

    Each output tensor weighs the same; the budget is held against the worst one. Integer and boolean outputs count
    the share of differing elements. Of an output that is all zeros the error is the root mean square itself. The
    interval is that of as many independent normal errors as an output has numbers: two rows of two logits that are
    off by 0.6% may be off by 1.7% on others. Integer and boolean outputs have none.

    Raises `WorkloadError` when the two differ in number or shape, or when their infinite or NaN elements differ.
    """
    check_shapes(reference, candidate)
    errors, bounds = list[float](), list[tuple[float, float]]()
    for before, after in zip(reference, candidate, strict=True):
        error, count = _error_and_count(before, after)
        low, high = rms_bounds(count) if count else (1.0, 1.0)
        errors.append(error)
        bounds.append((error * low, error * high))
    worst = max(errors)
    return Quality(
        metric=RELATIVE_ERROR,
        value=worst,
        reference=0.0,
        drop=worst,
        drop_low=bounds[errors.index(worst)][0],
        drop_high=max(high for _, high in bounds),
        higher_is_better=False,
        samples=sum(t.numel() for t in reference),
        extras={"mean_relative_error": sum(errors) / len(errors)},
    )


def check_shapes(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> None:
    """Raises `WorkloadError` when the two differ in number or shape."""
    if len(reference) != len(candidate):
        raise WorkloadError(
            f"the candidate returned {len(candidate)} tensors where the original has {len(reference)}"
        )
    for before, after in zip(reference, candidate, strict=True):
        if before.shape != after.shape:
            raise WorkloadError(
                f"an output has shape {list(after.shape)} where the original has {list(before.shape)}"
            )


def _tensor_error(before: torch.Tensor, after: torch.Tensor) -> float:
    return _error_and_count(before, after)[0]


def _error_and_count(before: torch.Tensor, after: torch.Tensor) -> tuple[float, int]:
    """The relative error, and by how many finite real numbers it was found; of whole numbers a share, and none."""
    if not before.is_floating_point() and not before.is_complex():
        return (before != after).double().mean().item() if before.numel() else 0.0, 0
    wide = torch.complex128 if before.is_complex() else torch.float64
    before, after = before.to(wide), after.to(wide)
    finite = torch.isfinite(before)
    if not torch.equal(finite, torch.isfinite(after)) or not _equal(before[~finite], after[~finite]):
        wrong = int((finite != torch.isfinite(after)).sum()) or int((~finite).sum())
        raise WorkloadError(
            "the infinite or NaN elements of an output are not those of the original",
            found=f"{wrong} of {after.numel()} elements",
            next="keep the modules that overflow in float32",
        )
    before, after = before[finite], after[finite]
    difference = torch.linalg.vector_norm(after - before).item()
    norm = torch.linalg.vector_norm(before).item()
    error = difference / norm if norm else difference / math.sqrt(max(1, before.numel()))
    if not math.isfinite(error):
        raise WorkloadError("the relative error of an output is not finite", found=f"{difference} of {norm}")
    return error, before.numel() * (2 if before.is_complex() else 1)


def _equal(before: torch.Tensor, after: torch.Tensor) -> bool:
    return torch.equal(before.nan_to_num(), after.nan_to_num())


def agreement(reference: torch.Tensor, candidate: torch.Tensor) -> Quality:
    """Top-1 agreement over the last axis; the drop is the share of rows that changed their answer.

    Its interval is Clopper and Pearson's, for rows that are independent: where all of 8 agree, 37% may change.

    Raises `WorkloadError` when the two differ in shape, have no rows, or hold NaN.
    """
    _check_rows(reference, candidate)
    before, after = reference.float().argmax(-1).flatten(), candidate.float().argmax(-1).flatten()
    n = before.numel()
    changed = int((before != after).sum())
    low, high = share_bounds(changed, n)
    return Quality(
        metric="top-1 agreement",
        value=1 - changed / n,
        reference=1.0,
        drop=changed / n,
        drop_low=low,
        drop_high=high,
        higher_is_better=True,
        samples=n,
        extras={"relative_error": _tensor_error(reference, candidate)},
    )


def answers(reference: torch.Tensor, candidate: torch.Tensor) -> Quality:
    """Top-1 agreement of a classifier; without an interval where its logits differ by rounding alone.

    No answer was given up there, however few were seen. Raises `WorkloadError` as `agreement` does.
    """
    found = agreement(reference, candidate)
    if found.extras["relative_error"] > ROUNDING:
        return found
    return replace(found, drop_low=found.drop, drop_high=found.drop)


def enough_answers(reference: torch.Tensor, candidate: torch.Tensor) -> Quality:
    """`answers`; of fewer than `FEWEST_ANSWERS` rows, which prove no share worth a budget, the logits' relative error.

    Raises `WorkloadError` as `agreement` does.
    """
    found = answers(reference, candidate)
    if found.samples >= FEWEST_ANSWERS or found.extras["relative_error"] <= ROUNDING:
        return found
    error = relative_error([reference], [candidate])
    return replace(error, extras={"top1_agreement": found.value, "top1_rows": found.samples})


def cosine(reference: torch.Tensor, candidate: torch.Tensor) -> Quality:
    """Mean cosine between rows of two (N, E) embeddings; the drop is one minus it, with Student's interval.

    Two rows of zeros count as equal.

    Raises `WorkloadError` when the two differ in shape, have fewer than two rows, or hold NaN or infinities.
    """
    _check_rows(reference, candidate)
    before, after = reference.double(), candidate.double()
    cosines = torch.nn.functional.cosine_similarity(before, after, dim=-1)
    cosines = cosines.masked_fill((before == 0).all(-1) & (after == 0).all(-1), 1.0).flatten()
    mean = cosines.mean().item()
    if not math.isfinite(mean):
        raise WorkloadError(
            "the cosine of the embeddings is not finite", next="look at the embeddings for infinities"
        )
    low, high = _mean_bounds(1 - cosines)
    return Quality(
        metric="cosine to the original",
        value=mean,
        reference=1.0,
        drop=1 - mean,
        drop_low=low,
        drop_high=high,
        higher_is_better=True,
        samples=cosines.numel(),
        extras={"worst_cosine": cosines.min().item()},
    )


def _mean_bounds(values: torch.Tensor) -> tuple[float, float]:
    if values.numel() < 2:
        raise WorkloadError(
            "the metric's sample has no interval",
            found=f"{values.numel()} independent values",
            allowed="2 or more",
            next="give more inputs, or a longer evaluation text",
        )
    return mean_bounds(values.flatten().tolist())


def _check_rows(reference: torch.Tensor, candidate: torch.Tensor) -> None:
    if reference.shape != candidate.shape or not reference.numel():
        raise WorkloadError(
            "the candidate's outputs cannot be set beside the original's",
            found=f"shapes {list(candidate.shape)} and {list(reference.shape)}",
            allowed="equal shapes with at least one row",
        )
    # A NaN would pass every comparison with a budget: nothing is larger than it.
    for who, tensor in (("the original", reference), ("a candidate", candidate)):
        bad = int(tensor.isnan().sum())
        if bad:
            raise WorkloadError(
                f"the outputs of {who} are not numbers", found=f"{bad} NaN of {tensor.numel()}"
            )


def scalar(metric: str, reference: float, value: float, higher_is_better: bool) -> Quality:
    """A user's own metric. The drop is relative to the reference, or absolute where the reference is zero.

    Raises `WorkloadError` when either is not finite.
    """
    for who, number in (("the original", reference), ("a candidate", value)):
        if not math.isfinite(number):
            raise WorkloadError(
                f"the metric '{metric}' returned {number} for {who}",
                allowed="a finite number",
                next="call the metric on the original model yourself and see where the value comes from",
            )
    loss = reference - value if higher_is_better else value - reference
    drop = loss / abs(reference) if reference else loss
    return Quality(
        metric=metric,
        value=value,
        reference=reference,
        drop=drop,
        drop_low=drop,
        drop_high=drop,
        higher_is_better=higher_is_better,
    )


def perplexity(
    nll_reference: torch.Tensor,
    nll_candidate: torch.Tensor,
    kl: torch.Tensor,
    same_top1: torch.Tensor,
    window: int,
) -> Quality:
    """Compare a candidate's perplexity with the original's, from per-token negative log-likelihoods (N,) in nats.

    The drop is exp(mean difference) − 1, the relative growth of perplexity. Its interval is Student's, paired and
    clustered by window of `window` tokens, since tokens of one window are not independent.

    Raises `WorkloadError` when it is not a finite number, or for fewer than two windows.
    """
    difference = (nll_candidate.double() - nll_reference.double()).flatten()
    if not torch.isfinite(difference).all():
        raise WorkloadError(
            "the perplexity is not finite", next="look at the candidate's logits for NaN or overflow"
        )
    mean = difference.mean().item()
    low, high = _mean_bounds(difference[: difference.numel() // window * window].view(-1, window).mean(1))
    largest = max(high, nll_candidate.double().mean().item(), nll_reference.double().mean().item())
    if largest > MAX_NLL:
        raise WorkloadError(f"the perplexity is beyond exp({MAX_NLL})", found=f"exp({largest:.0f})")
    return Quality(
        metric="perplexity",
        value=math.exp(nll_candidate.double().mean().item()),
        reference=math.exp(nll_reference.double().mean().item()),
        drop=math.expm1(mean),
        drop_low=math.expm1(low),
        drop_high=math.expm1(high),
        higher_is_better=False,
        samples=difference.numel(),
        extras={
            "kl_divergence": kl.double().mean().item(),
            "top1_agreement": same_top1.double().mean().item(),
        },
    )


def reference_loss(
    tokens_U: torch.Tensor, reference_U: torch.Tensor, candidate_U: torch.Tensor, *, seed: int = 0
) -> Quality:
    """Compare the perplexity of given answers, from each answer's token count and sum of losses in nats.

    The drop is the relative growth, over all tokens together. Its interval is that of `RESAMPLES` draws of answers
    (bootstrap, percentiles), in which both have the same ones. Raises `WorkloadError` for a loss that is not finite,
    and for fewer than two answers.
    """
    before_U, after_U, tokens_U = reference_U.double(), candidate_U.double(), tokens_U.double()
    if not torch.isfinite(before_U).all() or not torch.isfinite(after_U).all():
        raise WorkloadError(
            "the loss of the references is not finite", next="look at the candidate's logits for overflow"
        )
    if len(tokens_U) < 2:
        raise WorkloadError("one reference has no interval", allowed="2 or more")
    before, after = (float(sum_U.sum() / tokens_U.sum()) for sum_U in (before_U, after_U))
    if max(before, after) > MAX_NLL:
        raise WorkloadError(
            f"the perplexity is beyond exp({MAX_NLL})", found=f"exp({max(before, after):.0f})"
        )
    draw = torch.Generator().manual_seed(seed)
    drawn_RU = torch.randint(len(tokens_U), (RESAMPLES, len(tokens_U)), generator=draw)
    growth_R = torch.expm1((after_U - before_U)[drawn_RU].sum(1) / tokens_U[drawn_RU].sum(1))
    low, high = torch.quantile(growth_R, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Quality(
        metric="perplexity of the references",
        value=math.exp(after),
        reference=math.exp(before),
        drop=math.expm1(after - before),
        drop_low=low,
        drop_high=high,
        higher_is_better=False,
        samples=len(tokens_U),
    )


def predictions(reference_NV: torch.Tensor, candidate_NV: torch.Tensor, window: int) -> Quality:
    """Compare a candidate's perplexity on the original's predictions with the original's own, from log-probabilities.

    The drop is exp(mean KL divergence) − 1. Raises `WorkloadError` as `perplexity` does.
    """
    entropy, crossed, same = [], [], []
    for before, after in zip(reference_NV.split(256), candidate_NV.split(256), strict=True):
        before, after = before.double(), after.double()
        p_NV = before.exp()
        # What neither allows (a logit of minus infinity) adds nothing, instead of 0 · ∞.
        entropy.append(-(p_NV * before).nan_to_num(nan=0.0).sum(-1))
        crossed.append(-(p_NV * after).nan_to_num(nan=0.0).sum(-1))
        same.append(before.argmax(-1) == after.argmax(-1))
    own, other = torch.cat(entropy), torch.cat(crossed)
    found = perplexity(own, other, other - own, torch.cat(same), min(window, len(own) // 2))
    return replace(found, metric="perplexity of the original's predictions")
