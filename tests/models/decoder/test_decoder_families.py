"""Every family's logits against transformers' eager float32: prefill, decoding, ragged batches, chunks, caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MODELS, TOKENS, build, save, token_ids
from transformers import DynamicCache

from torchwright.models.decoder import LoadedDecoder, load_decoder
from torchwright.workloads.huggingface import cache_keyword

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def ours(pair: tuple[Any, Path]) -> LoadedDecoder:
    return load_decoder(pair[1])


def expected(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    forget(model)
    with torch.no_grad():
        return model(ids_BT, use_cache=False).logits


def forget(model: Any) -> None:
    """transformers' dynamic rotary embedding keeps the base of the longest sequence until it sees a short one."""
    with torch.no_grad():
        model(torch.tensor([[1]]), use_cache=False)


def step_by_step(model: Any, ids_T: torch.Tensor, prompt: int) -> torch.Tensor:
    """transformers' logits (T, V) of a prompt and then one token at a time, all through its cache."""
    forget(model)
    cache = DynamicCache(config=model.config)
    parts, begin = [], 0
    with torch.no_grad():
        for part in (ids_T[:prompt], *ids_T[prompt:].split(1)):
            # Bamba counts each call's positions from 0 where it is not told them.
            places = {"position_ids": torch.arange(begin, begin := begin + len(part))[None]}
            answer = model(part[None], use_cache=True, **{cache_keyword(model): cache}, **places)
            parts.append(answer.logits[0])
    return torch.cat(parts)


def close(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)


def test_prefill(pair: tuple[Any, Path], ours: LoadedDecoder) -> None:
    ids_BT = token_ids(2, TOKENS)
    wanted = expected(pair[0], ids_BT)
    assert wanted.std() > 0.3, "the logits are too much alike for the test to fail"
    close(ours.logits(ids_BT), wanted)


def test_chunked_prefill_is_whole_prefill(ours: LoadedDecoder) -> None:
    ids_BT = token_ids(2, TOKENS)
    close(ours.logits(ids_BT, prefill_chunk=7), ours.logits(ids_BT), 4e-5)


@pytest.mark.plain("glm-no-bias", "ernie", "glm", "gemma3")
def test_decode_through_the_cache(pair: tuple[Any, Path], ours: LoadedDecoder) -> None:
    ids_T, prompt = token_ids(TOKENS), 5
    cache = ours.new_cache([TOKENS])
    sequence = cache.sequence(prompt)
    parts = []
    with torch.no_grad():
        for part in (ids_T[:prompt], *ids_T[prompt:].split(1)):
            batch = cache.append([(sequence, part.tolist())])
            parts.append(ours.decoder.logits(ours.decoder(batch, cache)))
    close(torch.cat(parts), step_by_step(pair[0], ids_T, prompt))


@pytest.mark.plain("seed-oss", "glm-no-bias", "gemma", "lfm2-bias")
def test_ragged_batch(pair: tuple[Any, Path], ours: LoadedDecoder) -> None:
    """Prompts of different lengths in one call, then decode steps of all in one call each."""
    lengths = [3, 33, 17]
    rows = [token_ids(length + 4, seed=length) for length in lengths]
    cache = ours.new_cache([len(row) for row in rows])
    sequences = [cache.sequence(length) for length in lengths]
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    with torch.no_grad():
        for step in range(5):
            cuts = [slice(0, n) if step == 0 else slice(n + step - 1, n + step) for n in lengths]
            pieces = [row[cut].tolist() for row, cut in zip(rows, cuts, strict=True)]
            batch = cache.append(list(zip(sequences, pieces, strict=True)))
            logits = ours.decoder.logits(ours.decoder(batch, cache))
            for row, part in enumerate(logits.split([len(piece) for piece in pieces])):
                got[row].append(part)
    for row, length in enumerate(lengths):
        close(torch.cat(got[row]), step_by_step(pair[0], rows[row], length))


@pytest.mark.plain("falcon-h1-normed-bf16-0.01", "exaone4-int8-0.03", "phi3-int8-0.03", "olmo3-int8-0.03")
@pytest.mark.parametrize(("kv", "tolerance"), [("bf16", 0.01), ("int8", 0.03)])
def test_small_caches_stay_near(
    pair: tuple[Any, Path], ours: LoadedDecoder, kv: str, tolerance: float
) -> None:
    """Relative error of a token's logits, the median token's: one that is sent to another expert is far off."""
    ids_BT = token_ids(2, TOKENS)
    wanted = ours.logits(ids_BT)
    got = load_decoder(pair[1], kv=kv).logits(ids_BT)
    error = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median()
    assert 0 < error < tolerance
