"""Attention with a bias by distance beside the reference in float64: sequences of other lengths, causal and not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchwright.hardware.kernels import ops, reference
from torchwright.hardware.kernels.cpu import build
from torchwright.hub.fields import Fields
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.seq2seq.stacks import STACKS

HEADS, D, REACH = 4, 32, 320
T5 = {"d_model": 64, "d_kv": D, "d_ff": 64, "num_heads": HEADS, "num_layers": 1, "vocab_size": 9}


@pytest.fixture(params=[*build.architecture(), "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if missing := build.load_fault():
        pytest.skip(f"no kernels: {missing}")
    if request.param not in ops.native.isas():
        pytest.skip(f"this machine has {', '.join(ops.native.isas())}")
    before = ops.native.isa()
    ops.native.use_isa(request.param)
    yield request.param
    ops.native.use_isa(before)


def batch(
    dtype: torch.dtype, lengths: list[int], *, new: int | None
) -> tuple[torch.Tensor, LayerPages, Batch]:
    """Queries of the last `new` tokens of each sequence (None for all), and pages that hold all keys and values."""
    config = STACKS["T5ForConditionalGeneration"].read(Fields("here", T5), "decoder")
    cache = PagedCache(config, pages=sum(-(-length // PAGE) for length in lengths), dtype=dtype)
    pages, sequences = cache.layers[0], [cache.sequence(0) for _ in lengths]
    still = torch.empty(REACH, 0)
    counts = [[length] if new is None else [length - new, new] for length in lengths]
    for piece in range(len(counts[0])):
        made = cache.append(
            [(one, range(count[piece])) for one, count in zip(sequences, counts, strict=True)]
        )
        qkv = torch.randn(len(made.ids_T), 3 * HEADS * D).to(dtype)
        where = (made.slots_T, pages.k, pages.v, None, None, HEADS, HEADS, None, None, 1e-6)
        q_THD = ops.rope_store(qkv, still, still, made.positions_T, *where)
    return q_THD, pages, made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("causal", "new"), [(True, 1), (True, 5), (True, None), (False, None)])
def test_bias_is_added_by_distance(
    isa: str, dtype: torch.dtype, tolerance: float, causal: bool, new: int | None
) -> None:
    q_THD, pages, made = batch(dtype, [random.randrange(8, REACH) for _ in range(3)], new=new)
    bias = 2 * torch.randn(HEADS, 2 * REACH)
    rest: Any = (None, None, made.block_tables_BP, made.query_starts, made.context_lens_B, D**-0.5, 0, 0.0)
    found = ops.paged_attention(q_THD, pages.k, pages.v, *rest, causal=causal, bias=bias)
    wide = q_THD.double(), pages.k.double(), pages.v.double()
    wanted = reference.paged_attention(*wide, *rest, causal=causal, bias=bias)
    assert (found - wanted).norm() / wanted.norm() < tolerance
    without = reference.paged_attention(*wide, *rest, causal=causal)
    assert (without - wanted).norm() / wanted.norm() > 0.1


def test_what_does_not_fit_is_refused(isa: str) -> None:
    q_THD, pages, made = batch(torch.float32, [100, 7], new=None)
    rest: Any = (None, None, made.block_tables_BP, made.query_starts, made.context_lens_B, D**-0.5, 0, 0.0)
    for shape, says in (
        ((HEADS, 128), "longer than the 64"),
        ((HEADS, 200), "multiple of 128"),
        ((2, 256), "bias of"),
    ):
        with pytest.raises((ValueError, IndexError), match=says):
            ops.paged_attention(q_THD, pages.k, pages.v, *rest, bias=torch.zeros(shape))
