"""Attention over pages: the compiled kernel against the reference in float64, and the same bits however it is called.

Everything that was not written is NaN: slots after the context, pages of nobody, scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from torchwright.hardware.kernels import ops, reference

PAGE = reference.PAGE
KINDS = [torch.float32, torch.bfloat16, torch.int8]
HEADS = [(2, 2, 16), (3, 1, 48), (6, 2, 64), (8, 1, 80), (3, 1, 128), (2, 2, 256), (2, 1, 512)]
"""Query heads, key heads, head size: groups of 1, 2, 3 and 8."""
MASKS = [(0, 0.0), (1, 0.0), (17, 0.0), (64, 2.0), (100, 0.0), (0, 30.0)]
"""Window, soft cap."""
STRETCH = 1024
"""Keys that share a softmax (csrc/kernels.h)."""
TOLERANCE = {torch.float32: 3e-6, torch.int8: 3e-6, torch.bfloat16: 1e-2}
"""Of values around 1. With bfloat16 pages, queries and weights are rounded to bfloat16 before they are multiplied."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Call:
    """The arguments of one call; `pages` are k, v and their scales."""

    q: torch.Tensor
    pages: tuple[torch.Tensor | None, ...]
    tables: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    scale: float
    window: int = 0
    cap: float = 0.0
    causal: bool = True
    sinks: torch.Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        where = (self.tables, self.starts, self.contexts)
        given = (self.q, *self.pages, *where, self.scale, self.window, self.cap, self.causal)
        return given if self.sinks is None else (*given, None, self.sinks)

    def wanted(self) -> torch.Tensor:
        return reference.paged_attention(self.q.double(), *self.arguments()[1:])

    def found(self) -> torch.Tensor:
        return torch.ops.torchwright.paged_attention(*self.arguments())

    def only(self, sequence: int, first: int = 0, last: int | None = None) -> Call:
        """Queries `first` to `last` of one sequence, as if the tokens after them were yet to come."""
        start, stop = self.starts[sequence : sequence + 2].tolist()
        last = stop - start if last is None else last
        context = int(self.contexts[sequence]) - (stop - start) + last
        return replace(
            self,
            q=self.q[start + first : start + last],
            tables=self.tables[sequence : sequence + 1, : -(-context // PAGE)].contiguous(),
            starts=ints(0, last - first),
            contexts=ints(context),
        )


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(kind: torch.dtype, count: int, K: int, D: int) -> tuple[torch.Tensor | None, ...]:
    """Pages that nobody has written."""
    if kind == torch.bfloat16:
        shapes = (count, K, D // 2, PAGE, 2), (count, K, PAGE // 2, D, 2)
    else:
        shapes = (count, K, D, PAGE), (count, K, PAGE, D)
    if kind != torch.int8:
        return *(torch.full(shape, torch.nan, dtype=kind) for shape in shapes), None, None
    pages = (torch.full(shape, -128, dtype=kind) for shape in shapes)
    return *pages, *(torch.full((count, K, PAGE), torch.nan) for _ in range(2))


def write(call: Call, sequence: int, keys: torch.Tensor, values: torch.Tensor, first: int = 0) -> None:
    """Keys and values (S, K, D) into the sequence's slots from position `first` on."""
    position = torch.arange(first, first + len(keys))
    slots = call.tables[sequence].long()[position // PAGE] * PAGE + position % PAGE
    H, K = call.q.shape[1], keys.shape[1]
    qkv = torch.cat([torch.zeros(len(keys), H, keys.shape[2]), keys, values], 1).flatten(1)
    still = torch.empty(len(keys), 0)
    rows = torch.arange(len(keys))
    reference.rope_store(qkv, still, still, rows, slots, *call.pages, H, K, None, None, 1e-6)


def make(
    kind: torch.dtype,
    contexts: list[int],
    queries: list[int],
    heads: tuple[int, int, int] = (6, 2, 64),
    q_type: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    fill: bool = True,
    **mask: Any,
) -> Call:
    """Sequences over shuffled pages of one pool that has some to spare."""
    H, K, D = heads
    needed = [-(-context // PAGE) for context in contexts]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).int()
    tables = torch.zeros(len(contexts), max(needed, default=0) + 1, dtype=torch.int32)
    for row, (count, part) in enumerate(zip(needed, order.split([*needed, 3])[:-1], strict=True)):
        tables[row, :count] = part
    call = Call(
        q=randn(sum(queries), H, D, seed=seed + 1).to(q_type),
        pages=poisoned(kind, len(order), K, D),
        tables=tables,
        starts=torch.tensor([0, *queries]).cumsum(0).int(),
        contexts=ints(*contexts),
        scale=D**-0.5,
        **mask,
    )
    for row, context in enumerate(contexts if fill else []):
        write(call, row, randn(context, K, D, seed=row + 7), randn(context, K, D, seed=row + 70))
    return call


def check(call: Call, tolerance: float | None = None) -> None:
    wanted, found = call.wanted(), call.found()
    assert found.dtype == call.q.dtype
    assert found.shape == call.q.shape
    kind = call.pages[0]
    assert kind is not None
    allowed = torch.full_like(wanted, tolerance or TOLERANCE[kind.dtype])
    if call.q.dtype == torch.bfloat16:
        allowed += 2**-8 * wanted.abs()
    excess = (found.double() - wanted).abs() - allowed
    assert not excess.isnan().any()
    assert not excess.numel() or float(excess.max()) <= 0, f"{(excess / allowed).max() + 1} x the tolerance"


@pytest.mark.parametrize("q_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_against_the_reference(
    isa: str, kind: torch.dtype, heads: tuple[int, int, int], q_type: torch.dtype
) -> None:
    """A prompt, the end of one, a decode step, the first token, and a sequence that has nothing to do."""
    for window, cap in MASKS:
        check(
            make(
                kind,
                [70, 133, 90, 1, 33],
                [70, 37, 1, 1, 0],
                heads,
                q_type,
                seed=window,
                window=window,
                cap=cap,
            )
        )


@pytest.mark.parametrize("kind", KINDS)
def test_every_context(isa: str, kind: torch.dtype) -> None:
    """Contexts of 1 to 600 keys: one query each over the pages of one sequence, against the prompt as a whole."""
    whole = make(kind, [600], [600], (3, 1, 32))
    check(whole)
    each = replace(
        whole,
        tables=whole.tables.expand(600, -1).contiguous(),
        starts=torch.arange(601).int(),
        contexts=torch.arange(1, 601).int(),
    )
    assert torch.equal(each.found(), whole.found())


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (50, 0.0), (7, 2.0)])
@pytest.mark.parametrize("heads", [(2, 2, 16), (3, 1, 64), (8, 1, 80)])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_do_not_change_a_bit(
    isa: str, kind: torch.dtype, heads: tuple[int, int, int], window: int, cap: float
) -> None:
    """A prompt cut anywhere, each chunk before the keys after it were written, gives what the whole prompt gives."""
    whole = make(kind, [150], [150], heads, window=window, cap=cap)
    wanted = whole.found()
    for size in (1, 3, 16, 37, 64, 100):
        growing = make(kind, [150], [150], heads, window=window, cap=cap, fill=False)
        keys, values = (randn(150, *heads[1:], seed=seed) for seed in (7, 70))
        parts = []
        for first in range(0, 150, size):
            last = min(first + size, 150)
            write(growing, 0, keys[first:last], values[first:last], first)
            parts.append(growing.only(0, first, last).found())
        assert torch.equal(torch.cat(parts), wanted), f"chunks of {size}"


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("heads", [(2, 2, 16), (3, 1, 64), (8, 1, 80)])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_do_not_change_a_bit(
    isa: str, kind: torch.dtype, heads: tuple[int, int, int], window: int
) -> None:
    """The last 1, 2, 3 … queries: every offset of a query in a tile and in the pieces that threads share."""
    whole = make(kind, [150], [70], heads, window=window)
    wanted = whole.found()
    for first in range(70):
        assert torch.equal(whole.only(0, first).found(), wanted[first:]), f"from query {first} on"


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_do_not_change_a_bit(isa: str, kind: torch.dtype) -> None:
    contexts = [200, 1, 16, 17, 64, 65, 300]
    whole = make(kind, contexts, [60, 1, 16, 2, 1, 33, 1], window=130)
    wanted = whole.found().split((whole.starts[1:] - whole.starts[:-1]).tolist())
    for row in range(len(contexts)):
        assert torch.equal(whole.only(row).found(), wanted[row])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_a_bit(isa: str, kind: torch.dtype) -> None:
    call, threads = make(kind, [200, 90], [150, 1]), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = call.found()
        torch.set_num_threads(3)
        assert torch.equal(call.found(), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (1500, 0.0), (300, 2.0)])
@pytest.mark.parametrize("heads", [(2, 1, 32), (3, 3, 48)])
@pytest.mark.parametrize("kind", KINDS)
def test_stretches(isa: str, kind: torch.dtype, heads: tuple[int, int, int], window: int, cap: float) -> None:
    """Queries before, at and behind the borders of stretches: right, and the same bits alone as in company."""
    whole = make(
        kind,
        [STRETCH + 20, 3 * STRETCH + 5, STRETCH, STRETCH + 1],
        [40, 3, 2, 1],
        heads,
        window=window,
        cap=cap,
    )
    check(whole)
    wanted = whole.found()
    for query in (0, 19, 20, 21, 39):
        assert torch.equal(whole.only(0, query, query + 1).found(), wanted[query : query + 1])
    for sequence, first in ((1, 40), (2, 43), (3, 45)):
        found = whole.only(sequence).found()
        assert torch.equal(found, wanted[first : first + len(found)])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_the_stretches_of_one_head(isa: str, kind: torch.dtype) -> None:
    """One key head and few queries: one thread computes all, or each its stretches."""
    call, threads = make(kind, [2500, 1100], [3, 1], (4, 1, 64), window=2000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = call.found()
        for count in (2, 5):
            torch.set_num_threads(count)
            assert torch.equal(call.found(), alone)
    finally:
        torch.set_num_threads(threads)
    check(call)


@pytest.mark.parametrize("kind", KINDS)
def test_sharp_scores(isa: str, kind: torch.dtype) -> None:
    """Scores of hundreds, whose rounding weighs more, and of many thousands under a cap; nothing overflows."""
    call = make(kind, [100], [30])
    tolerance = 1e-4 if kind != torch.bfloat16 else None
    check(replace(call, q=(call.q * 40).bfloat16().float(), cap=0.0), tolerance)
    check(replace(call, q=(call.q * 1e4).bfloat16().float(), cap=50.0), tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_give_the_mean(isa: str, kind: torch.dtype) -> None:
    call = make(kind, [77], [1])
    check(replace(call, q=torch.zeros_like(call.q)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(6, 2, 64), (3, 1, 48)])
def test_sinks_take_their_share_of_the_softmax(
    isa: str, heads: tuple[int, int, int], kind: torch.dtype
) -> None:
    """Sinks above and far below the scores, extreme ones too; over stretches, and the same bits alone."""
    H = heads[0]
    call = make(kind, [70, STRETCH + 20, 1], [70, 3, 1], heads, window=50)
    for sinks in (randn(H, seed=5), torch.full((H,), 30.0), torch.full((H,), -1e4), 3e4 * randn(H, seed=6)):
        check(replace(call, sinks=sinks))
    with_sinks = replace(call, sinks=randn(H, seed=5))
    found = with_sinks.found()
    assert float((found - call.found()).abs().max()) > 0.05
    assert torch.equal(with_sinks.only(0, 30, 31).found(), found[30:31])
    assert torch.equal(with_sinks.only(1).found(), found[70:73])
    broken = replace(call, sinks=torch.full((H,), torch.nan).index_fill(0, torch.arange(1, H), 0.0)).found()
    assert broken[:, 0].isnan().all()
    assert broken[:, 1:].isfinite().all()
    with pytest.raises(ValueError, match="sinks"):
        replace(call, sinks=torch.zeros(H + 1)).found()


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_of_nan_answers_nan_and_no_other_does(isa: str, kind: torch.dtype, cap: float) -> None:
    call = make(kind, [90, 20], [3, 1], cap=cap)
    whole = call.found()
    broken = call.q.clone()
    broken[1] = torch.nan
    found = replace(call, q=broken).found()
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], whole[[0, 2, 3]])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do(isa: str, kind: torch.dtype) -> None:
    assert make(kind, [], []).found().shape == (0, 6, 64)
    assert make(kind, [5, 0], [0, 0]).found().shape == (0, 6, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_other_head_sizes_take_the_reference(kind: torch.dtype) -> None:
    call = make(kind, [40, 20], [5, 1], (2, 1, 24))
    torch.testing.assert_close(
        ops.paged_attention(*call.arguments()), call.wanted().float(), rtol=0, atol=TOLERANCE[kind]
    )


def test_queries_may_have_strides(native: Any) -> None:
    call = make(torch.bfloat16, [40], [9])
    wide = torch.cat([call.q, call.q], 2)[..., :64]
    assert torch.equal(replace(call, q=wide).found(), call.found())


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_checked(native: Any, kind: torch.dtype) -> None:
    call = make(kind, [40, 20], [5, 1])
    call.found()
    k, v, k_scale, v_scale = call.pages
    assert k is not None
    assert v is not None

    def refused(error: type[Exception], match: str, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            replace(call, **changed).found()

    def edited(tensor: torch.Tensor, at: Any, value: int) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[at] = value
        return tensor

    pages = k.shape[0]
    for bad in (-1, pages, 2**31 - 1, -(2**31)):
        refused(
            IndexError,
            f"page {bad} of sequence 1 is beyond the {pages}",
            tables=edited(call.tables, (1, 1), bad),
        )
    replace(call, tables=edited(call.tables, (1, 2), 99)).found()  # behind the context, and never read
    refused(IndexError, "room for 32", tables=call.tables[:, :2].contiguous())
    refused(IndexError, "room for 0", tables=call.tables[:, :0].contiguous())
    refused(IndexError, "context of 4 ", contexts=ints(4, 20))
    refused(IndexError, "context of -40", contexts=ints(-40, 20))
    refused(IndexError, "context of 2147483647", contexts=ints(2**31 - 1, 20))
    for starts in [(0, 5, 5), (1, 5, 6), (0, 5, 7), (-6, 0, 6)]:
        refused(IndexError, "does not cover the 6 queries", starts=ints(*starts))
    refused(IndexError, "sequence 1 has -3 queries", starts=ints(0, 9, 6))
    refused(IndexError, "sequence 0 has -1 queries", starts=ints(0, -1, 6))
    refused(ValueError, "query_starts must be", starts=ints(0, 6))
    refused(ValueError, "query_starts must be", starts=torch.tensor([0, 5, 6]))
    refused(ValueError, "context_lens must be", contexts=ints(40))
    refused(ValueError, "context_lens must be", contexts=torch.tensor([40, 20]))
    refused(ValueError, "block_tables must be", tables=call.tables.long())
    refused(ValueError, "block_tables must be", tables=call.tables[0])
    refused(ValueError, "block_tables must be", tables=call.tables.T.contiguous().T)
    refused(ValueError, "does not fit 2 key heads of 64", q=call.q[:, :5])
    refused(ValueError, "does not fit 2 key heads of 64", q=call.q[..., :32])
    refused(ValueError, "does not fit 2 key heads of 64", q=call.q[0])
    refused(TypeError, "float32 or bfloat16", q=call.q.double())
    refused(TypeError, "float32 or bfloat16", q=call.q.to(torch.int8))
    refused(ValueError, "window", window=-1)
    refused(ValueError, "soft_cap", cap=-1.0)
    refused(ValueError, "contiguous and alike", pages=(k, v[:-1], k_scale, v_scale))
    refused(ValueError, "contiguous and alike", pages=(k, v.transpose(1, 2), k_scale, v_scale))
    other = torch.float32 if kind != torch.float32 else torch.bfloat16
    refused(ValueError, "contiguous and alike", pages=(k, v.to(other), k_scale, v_scale))
    refused(
        ValueError,
        "multiple of 16",
        pages=(k.flatten()[: 8 * PAGE].view(1, 1, 8, 16),) * 2 + (k_scale, v_scale),
    )
    refused(ValueError, "multiple of 16", pages=(k[:0], v[:0], k_scale, v_scale))
    refused(ValueError, "multiple of 16", pages=(torch.empty(1, 1, 592, 16),) * 2 + (None, None))
    refused(TypeError, "float32 or bfloat16", pages=(k.double(), v.double(), k_scale, v_scale))
    if kind == torch.int8:
        refused(ValueError, "need k_scale and v_scale", pages=(k, v, None, None))
        refused(ValueError, "need k_scale and v_scale", pages=(k, v, k_scale, None))
        assert k_scale is not None
        refused(ValueError, "k_scale must be", pages=(k, v, k_scale[1:], v_scale))
        refused(ValueError, "v_scale must be", pages=(k, v, k_scale, k_scale.double()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(3, 1, 48), (6, 2, 64), (2, 2, 256)])
def test_all_of_the_context_is_seen_where_nothing_is_causal(
    isa: str, heads: tuple[int, int, int], kind: torch.dtype
) -> None:
    """More queries than keys, a whole prompt, one query; and a query's result is its own."""
    call = make(kind, [5, 70, 1100], [40, 70, 1], heads, causal=False)
    check(call)
    whole = call.found()
    for sequence, first, last in ((0, 0, 7), (0, 39, 40), (1, 3, 50)):
        start = int(call.starts[sequence])
        alone = replace(
            call,
            q=call.q[start + first : start + last],
            tables=call.tables[sequence : sequence + 1],
            starts=ints(0, last - first),
            contexts=call.contexts[sequence : sequence + 1],
        )
        assert torch.equal(alone.found(), whole[start + first : start + last])


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_ends_what_is_seen_before_a_query_that_is_not_causal(isa: str, kind: torch.dtype) -> None:
    """Keys behind the query are seen in any case; a window longer than the context hides nothing."""
    for window in (1, 3, 64, 2000):
        check(make(kind, [5, 70, 1100], [5, 33, 40], (6, 2, 64), window=window, causal=False))
