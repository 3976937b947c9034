"""The native decoder as the search calls it, against transformers' model through the same calls."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, build, save, token_ids

from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.native import NativeModel
from torchwright.workloads.generation import Geometry, call, new_cache
from torchwright.workloads.language import StaticCacheModel

GEOMETRY = Geometry(
    layers=3,
    kv_heads=2,
    head_dim=16,
    vocabulary=VOCABULARY,
    batch=2,
    chunk=24,
    slots=48,
    context=48,
    windows=(0,),
)
TOLERANCE = 1e-4


def answers(model: Any, ids_BT: torch.Tensor, start: int, stop: int, cache: list[torch.Tensor]) -> Any:
    """Logits (B, stop - start, V) of one call."""
    keep_K = torch.arange(stop - start)
    with torch.inference_mode():
        return model(*call("call", GEOMETRY, ids_BT[:, start:stop], start, cache, keep_K=keep_K).args)


@pytest.mark.parametrize("prompt", [8, 24])
@pytest.mark.parametrize("name", ["phi3-longrope", "llama-longrope", "llama-dynamic"])
def test_embeddings_by_length_turn_a_call_by_its_own(name: str, prompt: int, tmp_path: Path) -> None:
    """Trained on 16 positions: a prompt that grows past them, and one that starts beyond."""
    model = build(name)
    native = NativeModel(load_decoder(save(model, tmp_path)))
    original = StaticCacheModel(model, kinds=1)
    ids_BT = token_ids(2, prompt + 12)
    caches = new_cache(GEOMETRY, torch.float32), new_cache(GEOMETRY, torch.float32)
    edges = [0, *range(prompt, prompt + 13)]
    for start, stop in pairwise(edges):
        wanted = answers(original, ids_BT, start, stop, caches[0])
        got = answers(native, ids_BT, start, stop, caches[1])
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)


def test_callers_in_turn_each_read_what_they_wrote(tmp_path: Path) -> None:
    native = NativeModel(load_decoder(save(build("llama"), tmp_path)))
    rows = [token_ids(2, 25, seed=seed) for seed in (1, 2)]

    def alone(ids_BT: torch.Tensor) -> torch.Tensor:
        cache = new_cache(GEOMETRY, torch.float32)
        answers(native, ids_BT, 0, 24, cache)
        return answers(native, ids_BT, 24, 25, cache)

    wanted = [alone(ids_BT) for ids_BT in rows]
    caches = [new_cache(GEOMETRY, torch.float32) for _ in rows]
    for ids_BT, cache in zip(rows, caches, strict=True):
        answers(native, ids_BT, 0, 24, cache)
    got = [answers(native, ids_BT, 24, 25, cache) for ids_BT, cache in zip(rows, caches, strict=True)]
    assert all(map(torch.equal, got, wanted))


def test_a_longer_cache_has_pages_of_its_own(tmp_path: Path) -> None:
    native = NativeModel(load_decoder(save(build("llama"), tmp_path)))
    ids_BT = token_ids(2, 40)
    short = [tensor[:, :, :16] for tensor in new_cache(GEOMETRY, torch.float32)]
    answers(native, ids_BT, 0, 8, short)
    assert answers(native, ids_BT, 0, 40, new_cache(GEOMETRY, torch.float32)).isfinite().all()


def test_pages_go_with_the_callers_cache(tmp_path: Path) -> None:
    native = NativeModel(load_decoder(save(build("llama"), tmp_path)))
    cache = new_cache(GEOMETRY, torch.float32)
    answers(native, token_ids(2, 8), 0, 8, cache)
    assert len(native._pages_of) == 1
    del cache
    assert len(native._pages_of) == 0
