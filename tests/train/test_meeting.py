"""The name of a start, agreed on through a store that holds what earlier starts wrote."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from torchwright.train.run.runtime.meeting import Start, meet


def start(store: dist.HashStore, world: int, *, without: frozenset[int] = frozenset()) -> list[Start]:
    with ThreadPoolExecutor(world) as threads:
        ranks = [rank for rank in range(world) if rank not in without]
        return list(threads.map(lambda rank: meet(store, rank, world, 20), ranks))


def test_the_processes_of_a_start_have_one_name_and_each_start_its_own() -> None:
    store = dist.HashStore()
    starts = [start(store, world) for world in (3, 3, 2, 5, 1)]
    assert all(len({each.name for each in found}) == 1 for found in starts)
    assert len({found[0].name for found in starts}) == len(starts)
    assert [found[0].again for found in starts] == [False, True, True, True, True]
    assert not any(each.again for found in starts for each in found[1:])


def test_a_process_that_died_while_it_met_disturbs_nobody() -> None:
    store = dist.HashStore()
    for died in (1, 2):  # it came, and its torchrun ended the start
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            meet(store, died, 3, 0.01)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        meet(store, 0, 3, 0.05)
    found = start(store, 3)
    assert len({each.name for each in found}) == 1
    assert found[0].again
