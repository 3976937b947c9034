"""Check that a model of transformers computes over pages, in company and in pieces, what it computes by itself."""

from __future__ import annotations

import torch

from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.transformers_backend.attention import CannotPage
from torchwright.models.decoder.transformers_backend.paged import TransformersModel

PIECES = ((PAGE + 5, 3, 1, 1), (7, PAGE + 2, 1, 1))
"""Tokens of two sequences in each of four forward calls: across the border of a page, in pieces, and one by one."""
EXACT, ROUNDED = 1e-3, 0.05
"""Largest difference of a token's logits, relative to their own size: other orders of sums in float32, and otherwise
the rounding of every layer, which reaches 2% in models of 30 layers."""
ASTRAY = 0.25
"""Share of tokens that may be further off where numbers are rounded: rounding sends a token near a tie elsewhere.
A model that mixes tokens elsewhere has all tokens of the second text wrong, half of them."""


@torch.inference_mode()
def check_paging(model: TransformersModel) -> None:
    """Raise `CannotPage` unless logits over pages are those of the model's own passes over whole sequences."""
    counts = [min(sum(pieces), model.config.context) for pieces in PIECES]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(model.config.vocabulary, (count,), generator=generator) for count in counts]
    device = model.embedding.device
    expected = [
        model.model(
            input_ids=ids[None].to(device),
            position_ids=torch.arange(len(ids), device=device)[None],
            use_cache=False,
        )
        .logits[0]
        .float()
        for ids in rows
    ]
    with model.paged():
        found = _in_pieces(model, rows)
    if fault := differs(torch.cat(found), torch.cat(expected), model.dtype):
        raise CannotPage(f"{fault} over pages differ from its own: it mixes tokens outside attention")


def differs(found_TV: torch.Tensor, expected_TV: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return which share of tokens has other logits than expected, in words; None where rounding explains all."""
    if found_TV.shape != expected_TV.shape:
        return "100% of its logits"
    exact = dtype == torch.float32
    off_T = (found_TV - expected_TV).norm(dim=-1) / expected_TV.norm(dim=-1).clamp_min(1e-6)
    wrong = float((~(off_T <= (EXACT if exact else ROUNDED))).float().mean())
    return f"{wrong:.0%} of its logits" if wrong > (0 if exact else ASTRAY) else None


def _in_pieces(model: TransformersModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits (T, V) of each sequence, computed together and piece by piece."""
    pages = sum(-(-len(ids) // PAGE) for ids in rows)
    cache = PagedCache(model.config, pages=pages, dtype=model.dtype, device=model.embedding.device)
    sequences = [cache.sequence(len(ids)) for ids in rows]
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in range(len(PIECES[0])):
        pieces = []
        for sequence, ids, counts in zip(sequences, rows, PIECES, strict=True):
            start = sequence.length
            pieces.append((sequence, ids[start : start + counts[step]].tolist()))
        taken = [(row, piece) for row, piece in enumerate(pieces) if piece[1]]
        if not taken:
            break
        batch = cache.append([piece for _, piece in taken])
        logits_TV = model.answer(batch, cache, torch.arange(len(batch.ids_T), device=cache.device)).values_NV
        parts = logits_TV.split([len(ids) for _, (_, ids) in taken])
        for (row, _), part in zip(taken, parts, strict=True):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]
