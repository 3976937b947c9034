"""A sequence of NaN, or of large values, changes no other sequence of its batch, nor who is given its pages next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import build, save, token_ids

from torchwright.models.decoder import load_decoder

STRANGE = 2
"""A token that no other sequence has."""
LENGTHS = (19, 21, 5)
PRECISIONS = [
    (torch.float32, None, None),
    (torch.float32, None, "int8"),
    (torch.bfloat16, None, "int8"),
    (torch.bfloat16, "w8a8", "int8"),
    (torch.bfloat16, "w4a8", None),
    (torch.bfloat16, "w4a16", None),
]


@pytest.mark.parametrize("factor", [100.0, float("nan")])
@pytest.mark.parametrize(("dtype", "quantize", "kv"), PRECISIONS)
@torch.no_grad()
def test_a_strange_sequence_disturbs_no_other(
    tmp_path: Path, dtype: torch.dtype, quantize: str | None, kv: str | None, factor: float
) -> None:
    model = build("llama")
    embedding = model.get_input_embeddings().weight.data
    embedding[STRANGE] *= factor
    if factor != factor:  # logits are products with the embeddings too, where those are tied
        model.get_output_embeddings().weight = torch.nn.Parameter(embedding.nan_to_num(0.0))
        model.config.tie_word_embeddings = False
    ours = load_decoder(save(model, tmp_path), dtype, quantize, kv)
    texts = [token_ids(length, seed=length).tolist() for length in LENGTHS]
    wanted = answers(ours, texts)
    found = answers(ours, [texts[0], [STRANGE] * 20, *texts[1:]])
    del found[1]
    for a, b in zip(wanted, found, strict=True):
        assert a.isfinite().all()
        error = float((a - b).norm() / a.norm())
        assert error <= (0 if quantize else 1e-5), error


def answers(ours, texts: list[list[int]]) -> list[torch.Tensor]:
    """The logits of each sequence after its last token, all in one batch; then of pages that were used before."""
    cache = ours.new_cache([max(map(len, texts)) + 1] * len(texts))
    found: list[torch.Tensor] = []
    for _ in range(2):
        sequences = [cache.sequence(len(text) + 1) for text in texts]
        for piece in (texts, [[text[-1]] for text in texts]):
            batch = cache.append(list(zip(sequences, piece, strict=True)))
            logits = ours.decoder.logits(ours.decoder(batch, cache)).float()
        found.extend(logits.unbind())
        for sequence in reversed(sequences):
            cache.free(sequence)
        texts = texts[::-1]
    first, again = found[: len(texts)], found[len(texts) :][::-1]
    return [torch.stack(pair) for pair in zip(first, again, strict=True)]
