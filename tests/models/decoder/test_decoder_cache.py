"""The page pool and the paged cache: what is owned, shared, copied and refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import build, save, token_ids

from torchwright.models.decoder import PAGE, CacheFull, LoadedDecoder, PagedCache, load_decoder
from torchwright.models.decoder.cache import CacheSequence, PagePool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    return load_decoder(save(build("llama"), tmp_path_factory.mktemp("llama")))


def new_cache(model: LoadedDecoder, pages: int, dtype: torch.dtype = torch.float32) -> PagedCache:
    return PagedCache(model.config, pages=pages, dtype=dtype)


@torch.no_grad()
def feed(model: LoadedDecoder, cache: PagedCache, *pieces: tuple[CacheSequence, list[int]]) -> torch.Tensor:
    batch = cache.append(pieces)
    return model.decoder.logits(model.decoder(batch, cache))


def test_pool_counts_users() -> None:
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.share([first])
    assert pool.shared(first)
    assert not pool.shared(second)
    pool.release([first, second])
    assert pool.free == 2
    pool.release([first])
    assert pool.free == 3
    with pytest.raises(AssertionError, match="is free"):
        pool.release([first])
    with pytest.raises(AssertionError, match="is free"):
        pool.share([first])


def test_a_full_pool_refuses_and_keeps_its_pages(model: LoadedDecoder) -> None:
    cache = new_cache(model, 2)
    sequence = cache.sequence(40)
    assert not cache.can_append([(sequence, [1] * 33)])
    with pytest.raises(CacheFull, match=r"no room for 3 more pages .* 2 of 2 pages free"):
        cache.append([(sequence, [1] * 33)])
    assert (cache.pool.free, sequence.length, list(sequence.pages)) == (2, 0, [])
    assert cache.can_append([(sequence, [1] * 32)])


def test_batch_says_where_everything_lies(model: LoadedDecoder) -> None:
    cache = new_cache(model, 8)
    one, two = cache.sequence(18), cache.sequence(3)
    cache.append([(one, [5] * 18)])
    batch = cache.append([(one, [6]), (two, [7, 8, 9])])
    assert batch.ids_T.tolist() == [6, 7, 8, 9]
    assert batch.positions_T.tolist() == [18, 0, 1, 2]
    assert batch.query_starts.tolist() == [0, 1, 4]
    assert batch.context_lens_B.tolist() == [19, 3]
    assert batch.last_rows_B.tolist() == [0, 3]
    assert batch.lengths_T.tolist() == [19, 3, 3, 3]
    assert batch.longest == 19
    tables = batch.block_tables_BP
    assert tables.shape == (2, 2)
    assert batch.slots_T[0] == tables[0, 1] * PAGE + 2
    assert batch.slots_T[1:].tolist() == [int(tables[1, 0]) * PAGE + i for i in range(3)]
    types = (batch.block_tables_BP, batch.query_starts, batch.context_lens_B)
    assert {tensor.dtype for tensor in types} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_pages_start_at_zero_and_are_aligned(model: LoadedDecoder, dtype: torch.dtype) -> None:
    for pages in new_cache(model, 5, dtype).layers:
        tensors = [t for t in (pages.k, pages.v, pages.k_scale, pages.v_scale) if t is not None]
        assert len(tensors) == (4 if dtype == torch.int8 else 2)
        for tensor in tensors:
            assert tensor.data_ptr() % 64 == 0
            assert tensor.is_contiguous()
            assert not tensor.count_nonzero()


@pytest.mark.parametrize("shared_tokens", [20, 32])
def test_forks_share_pages_until_they_part(model: LoadedDecoder, shared_tokens: int) -> None:
    """A page that is full stays shared; a half-full one is copied once for the sequence that appends first."""
    ids = token_ids(shared_tokens).tolist()
    cache = new_cache(model, 5)
    one = cache.sequence(shared_tokens)
    feed(model, cache, (one, ids))
    two = cache.fork(one)
    assert cache.pool.free == 3
    got = feed(model, cache, (one, [9]), (two, [11]))
    assert cache.pool.free == (2 if shared_tokens % PAGE else 1)
    assert one.pages[0] == two.pages[0]
    assert one.pages[-1] != two.pages[-1]
    for row, last in enumerate((9, 11)):
        wanted = model.logits(torch.tensor([[*ids, last]]))[0, -1]
        torch.testing.assert_close(got[row], wanted, rtol=0, atol=1e-5)
    cache.free(one)
    cache.free(two)
    assert cache.pool.free == 5


def test_reused_pages_do_not_leak_into_the_next_sequence(model: LoadedDecoder) -> None:
    cache = new_cache(model, 2)
    first = cache.sequence(32)
    feed(model, cache, (first, token_ids(32).tolist()))
    cache.free(first)
    ids = token_ids(5, seed=3)
    got = feed(model, cache, (cache.sequence(5), ids.tolist()))
    assert torch.equal(got, model.logits(ids[None])[0])


steps = st.lists(
    st.tuples(st.sampled_from(["new", "append", "fork", "free"]), st.integers(0, 99), st.integers(1, 40)),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_every_page_has_the_users_that_hold_it(
    model: LoadedDecoder, steps: list[tuple[str, int, int]]
) -> None:
    cache = new_cache(model, 12)
    sequences: list[CacheSequence] = []
    for action, which, count in steps:
        if action == "new":
            sequences.append(cache.sequence(count))
        elif sequences:
            sequence = sequences[which % len(sequences)]
            if action == "append":
                other = sequences[(which + 1) % len(sequences)]
                pieces = [(s, [1] * count) for s in dict.fromkeys([sequence, other])]
                if cache.can_append(pieces):
                    slots = cache.append(pieces).slots_T
                    assert slots.unique().numel() == len(slots)
                    assert not any(cache.pool.shared(slot // PAGE) for slot in slots.tolist())
            elif action == "fork":
                sequences.append(cache.fork(sequence))
            else:
                cache.free(sequence)
                sequences = [s for s in sequences if s is not sequence]
        held = [page for s in sequences for page in s.pages]
        assert cache.pool.free == 12 - len(set(held))
        assert all(cache.pool._users[page] == held.count(page) for page in set(held))
        assert all(len(s.pages) == -(-s.length // PAGE) for s in sequences)
