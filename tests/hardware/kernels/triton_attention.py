"""Attention over pages on Triton's kernels: against the reference in float64, and the same bits however it is called.

Everything that was not written is NaN: slots after the context, pages of nobody, scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from triton_device import DEVICE, ints, ops, poison, randn

from torchwright.hardware.kernels import reference
from torchwright.hardware.kernels.gpu import attention

KINDS = [torch.float32, torch.bfloat16, torch.int8]
TOLERANCE = {torch.float32: 3e-6, torch.int8: 1.5e-2, torch.bfloat16: 1.5e-2}
"""Of values around 1. On other pages than float32, queries and weights are rounded to bfloat16 before products."""


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that the interpreter can afford are cut into spans as long ones are."""
    monkeypatch.setattr(attention, "SPAN", 64)


@dataclass(frozen=True)
class Call:
    """The arguments of one call; `pages` are k, v and their scales."""

    q: torch.Tensor
    pages: tuple[torch.Tensor | None, ...]
    tables: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    window: int = 0
    cap: float = 0.0

    def arguments(self) -> tuple[Any, ...]:
        where = (self.tables, self.starts, self.contexts)
        return (self.q, *self.pages, *where, self.q.shape[-1] ** -0.5, self.window, self.cap)

    def found(self) -> torch.Tensor:
        poison(self.q)
        return ops.paged_attention(*self.arguments())

    def check(self) -> None:
        q, *rest = self.arguments()
        wanted, found = reference.paged_attention(q.double(), *rest), self.found()
        assert found.dtype == q.dtype
        assert self.pages[0] is not None
        rounding = 2**-8 if q.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[self.pages[0].dtype], rtol=rounding)

    def only(self, sequence: int, first: int, last: int) -> Call:
        """Queries `first` to `last` of one sequence, as if the tokens after them were yet to come."""
        start, stop = self.starts[sequence : sequence + 2].tolist()
        context = int(self.contexts[sequence]) - (stop - start) + last
        return replace(
            self,
            q=self.q[start + first : start + last],
            tables=self.tables[sequence : sequence + 1].contiguous(),
            starts=ints(0, last - first),
            contexts=ints(context),
        )


def make(
    kind: torch.dtype, contexts: list[int], queries: list[int], heads: tuple[int, int, int], **mask: Any
) -> Call:
    """Sequences over shuffled pages of one pool that has some to spare."""
    H, K, D = heads
    needed = [-(-context // 16) for context in contexts]
    count = sum(needed) + 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(D)).int()
    tables = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
    for row, part in enumerate(order.split([*needed, 2])[:-1]):
        tables[row, : len(part)] = part
    nothing = -128 if kind == torch.int8 else torch.nan
    pages: list[torch.Tensor | None] = [
        torch.full(shape, nothing, dtype=kind, device=DEVICE)
        for shape in ((count, K, D, 16), (count, K, 16, D))
    ]
    scales = [
        torch.full((count, K, 16), torch.nan, device=DEVICE) if kind == torch.int8 else None for _ in "kv"
    ]
    for row, context in enumerate(contexts):
        position = torch.arange(context)
        slots = (tables[row].long()[position // 16] * 16 + position % 16).to(DEVICE)
        qkv, still = randn(context, (H + 2 * K) * D, seed=row + 7), torch.empty(context, 0, device=DEVICE)
        reference.rope_store(
            qkv, still, still, position.to(DEVICE), slots, *pages, *scales, H, K, None, None, 1e-6
        )
    return Call(
        q=randn(sum(queries), H, D, seed=1),
        pages=(*pages, *scales),
        tables=tables.to(DEVICE),
        starts=torch.tensor([0, *queries]).cumsum(0).int().to(DEVICE),
        contexts=ints(*contexts),
        **mask,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [{}, {"window": 17}, {"window": 64, "cap": 2.0}])
def test_against_the_reference(kind: torch.dtype, mask: dict[str, Any]) -> None:
    """The end of a prompt, a decode step, a whole prompt, the first token; groups of 3, a head size of no tile."""
    call = make(kind, [100, 70, 18, 1], [15, 1, 18, 1], (3, 1, 48), **mask)
    call.check()
    if not mask:
        replace(call, q=call.q.bfloat16()).check()


def test_groups_and_large_heads() -> None:
    for heads in ((4, 4, 16), (8, 1, 80), (2, 1, 256)):
        make(torch.bfloat16, [70, 20], [3, 1], heads).check()
    make(torch.float32, [70], [1], (2, 2, 512)).check()


@pytest.mark.parametrize(
    ("kind", "mask"), [(torch.float32, {}), (torch.bfloat16, {"window": 30}), (torch.int8, {"cap": 2.0})]
)
def test_chunks_and_neighbours_do_not_change_a_bit(
    kind: torch.dtype, mask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt cut anywhere, with others or alone, spans in one program or in one each."""
    whole = make(kind, [80, 33], [80, 1], (3, 1, 16), **mask)
    wanted = whole.found()
    parts = [whole.only(0, first, last).found() for first, last in pairwise([0, 1, 40, 79, 80])]
    assert torch.equal(torch.cat(parts), wanted[:80])
    monkeypatch.setattr(attention, "PROGRAMS", 0)
    assert torch.equal(whole.found(), wanted)
    assert torch.equal(whole.only(1, 0, 1).found(), wanted[80:])


def test_sharp_scores() -> None:
    """Scores of hundreds, and of many thousands under a cap; nothing overflows."""
    call = make(torch.bfloat16, [100], [5], (2, 1, 32))
    replace(call, q=(call.q * 40).bfloat16().float()).check()
    replace(call, q=(call.q * 1e4).bfloat16().float(), cap=50.0).check()


def test_page_numbers_out_of_range_are_not_read() -> None:
    call = make(torch.float32, [40], [1], (2, 1, 16))
    bad = call.tables.clone()
    bad[0, 1], bad[0, 2] = 10**6, -1
    found = replace(call, tables=bad).found()
    assert torch.equal(
        found, replace(call, contexts=ints(16), tables=call.tables[:, :1].contiguous()).found()
    )


def test_operator_passes_the_checks_of_torch() -> None:
    call = make(torch.int8, [20], [2], (2, 1, 16))
    torch.library.opcheck(ops.paged_attention.default, call.arguments())
    assert replace(call, q=call.q[:0], starts=ints(0, 0)).found().shape == (0, 2, 16)


def test_arguments_are_checked() -> None:
    call = make(torch.bfloat16, [40, 20], [5, 1], (4, 2, 16))
    k, v, _, _ = call.pages
    assert k is not None
    assert v is not None

    def refused(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            replace(call, **changed).found()

    refused("float32 or bfloat16", TypeError, q=call.q.double())
    refused("does not fit 2 key heads", q=call.q[:, :3])
    refused("does not fit 2 key heads", q=call.q[..., :8])
    refused("query_starts must be", starts=ints(0, 6))
    refused("query_starts must be", starts=torch.tensor([0, 5, 6], device=DEVICE))
    refused("context_lens must be", contexts=ints(40))
    refused("block_tables must be", tables=call.tables[0])
    refused("block_tables must be", tables=call.tables.long())
    refused("window", window=-1)
    refused("soft_cap", cap=-1.0)
    refused("k_pages and v_pages must be", pages=(k, v[:1], None, None))
    refused("need k_scale", pages=(k.to(torch.int8), v.to(torch.int8), None, None))
