"""Programs for the tests of `why-stuck`, run in four gloo processes: some hang, each in its own way; some do not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from torchwright.train.hang.record import turn_on, write_dump
from torchwright.train.hang.watch import Watch

WORLD = 4


@dataclass
class Job:
    """One rank's view: the world, its half {0, 1} or {2, 3}, its pair {0, 2} or {1, 3}."""

    rank: int
    world: dist.ProcessGroup
    half: dist.ProcessGroup
    pair: dist.ProcessGroup

    def sum(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(tensor, group=group)

    def gather(self, group: dist.ProcessGroup) -> None:
        dist.all_gather([torch.zeros(3) for _ in range(group.size())], torch.ones(3), group=group)


def well(job: Job) -> None:
    """Two steps as they should be: what the hanging programs do before they hang."""
    for _ in range(2):
        job.sum(torch.ones(8), job.half)
        job.sum(torch.ones(8), job.world)
        job.gather(job.world)


# ------------------------------------------------------------------------------------------------------- that hang


def rank_2_never_comes(job: Job) -> None:
    if job.rank == 2:
        reading_a_batch_for_ever()
    job.sum(torch.ones(8), job.world)


def reading_a_batch_for_ever() -> None:
    time.sleep(600)


def rank_2_has_another_shape(job: Job) -> None:
    job.sum(torch.ones(12 if job.rank == 2 else 8), job.world)


def rank_2_has_another_dtype(job: Job) -> None:
    job.sum(torch.ones(8, dtype=torch.float64 if job.rank == 2 else torch.float32), job.world)


def rank_1_swaps_two_calls(job: Job) -> None:
    if job.rank == 1:
        job.gather(job.world)
        job.sum(torch.ones(8), job.world)
    else:
        job.sum(torch.ones(8), job.world)
        job.gather(job.world)


def rank_2_uses_the_wrong_group(job: Job) -> None:
    job.sum(torch.ones(8), job.half if job.rank == 2 else job.world)


def rank_2_turns_two_groups_round(job: Job) -> None:
    for step in range(3):
        groups = [job.pair, job.world]
        for group in reversed(groups) if step == 2 and job.rank == 2 else groups:
            if group is job.pair:
                job.sum(torch.ones(8), group)
            else:
                job.sum(torch.ones(8), group)


def rank_1_fails(job: Job) -> None:
    if job.rank == 1:
        raise ValueError("token 70000 is not in the vocabulary")
    job.sum(torch.ones(8), job.world)


def rank_3_has_one_batch_less(job: Job) -> None:
    for _ in range(2 if job.rank == 3 else 3):
        job.sum(torch.ones(8), job.world)


def rank_0_does_not_send(job: Job) -> None:
    if job.rank == 0:
        dist.send(torch.ones(2), 1)
    if job.rank == 1:
        dist.recv(torch.ones(2), 0)
        dist.recv(torch.ones(2), 0)
    reading_a_batch_for_ever()


def rank_1_is_killed(job: Job) -> None:
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    job.sum(torch.ones(8), job.world)


HANGS: list[Callable[[Job], None]] = [
    rank_2_never_comes,
    rank_2_has_another_shape,
    rank_2_has_another_dtype,
    rank_1_swaps_two_calls,
    rank_2_uses_the_wrong_group,
    rank_2_turns_two_groups_round,
    rank_1_fails,
    rank_3_has_one_batch_less,
    rank_0_does_not_send,
    rank_1_is_killed,
]


# ------------------------------------------------------------------------------------------------- that do not hang


def rank_3_is_late(job: Job) -> None:
    well(job)
    time.sleep(1.5 * (job.rank == 3))
    job.sum(torch.ones(8), job.world)


def well_enough(number: int, job: Job) -> None:
    """The clean program `number`, of twenty: each of these parts alone, and three mixtures of them."""
    parts = _PARTS if number >= len(_PARTS) else [_PARTS[number]]
    for part in parts[:: number - len(_PARTS) + 1 if number >= len(_PARTS) else 1]:
        part(job)


def _uneven_work(job: Job) -> None:
    for step in range(4):
        time.sleep(0.02 * ((job.rank + step) % 4))
        job.sum(torch.ones(8), job.world)


def _asynchronous(job: Job) -> None:
    works: list[Any] = [
        dist.all_reduce(torch.ones(4), group=group, async_op=True)
        for group in (job.half, job.world, job.pair)
    ]
    for work in reversed(works):
        work.wait()


def _other_shapes_in_other_groups(job: Job) -> None:
    job.sum(torch.ones(4 + job.rank // 2), job.half)
    job.sum(torch.ones(4 + job.rank % 2, dtype=torch.float64), job.pair)


def _more_calls_in_one_half(job: Job) -> None:
    for _ in range(1 + 3 * (job.rank // 2)):
        job.sum(torch.ones(4), job.half)


def _one_half_rests(job: Job) -> None:
    if job.rank < 2:
        job.gather(job.half)


def _groups_in_another_order(job: Job) -> None:
    """Allowed, since nobody waits before both are under way."""
    groups = [job.half, job.pair] if job.rank < 2 else [job.pair, job.half]
    works: list[Any] = [dist.all_reduce(torch.ones(6), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()


def _same_elements_in_another_form(job: Job) -> None:
    job.sum(torch.ones(2, 6) if job.rank % 2 else torch.ones(12), job.world)


def _from_different_lines(job: Job) -> None:
    if job.rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4))


def _objects(job: Job) -> None:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, "x" * (1 + 50 * job.rank))
    dist.broadcast_object_list([{"step": 3}], src=1)


def _broadcast_and_reduce(job: Job) -> None:
    for root in range(WORLD):
        dist.broadcast(torch.ones(5), root)
        dist.reduce(torch.ones(5), root)


def _scatter_and_gather(job: Job) -> None:
    dist.scatter(torch.ones(2), [torch.ones(2)] * WORLD if job.rank == 1 else None, src=1)
    dist.gather(torch.ones(2), [torch.ones(2)] * WORLD if job.rank == 2 else None, dst=2)


def _uneven_all_to_all(job: Job) -> None:
    """Rank r sends r + 1 elements to everybody."""
    sent = torch.ones(WORLD * (job.rank + 1))
    received = torch.empty(sum(range(1, WORLD + 1)))
    dist.all_to_all_single(received, sent, [rank + 1 for rank in range(WORLD)], [job.rank + 1] * WORLD)


def _barriers(job: Job) -> None:
    dist.barrier()
    dist.barrier(job.half)


def _ring(job: Job) -> None:
    operations = [
        dist.P2POp(dist.isend, torch.ones(3), (job.rank + 1) % WORLD),
        dist.P2POp(dist.irecv, torch.ones(3), (job.rank - 1) % WORLD),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _functional(job: Job) -> None:
    total = functional.all_reduce(torch.ones(4), "sum", job.half)
    functional.wait_tensor(functional.reduce_scatter_tensor(total + 1, "sum", 0, job.half))


def _a_new_group(job: Job) -> None:
    group: Any = dist.new_group([0, 3], group_desc="ends")
    if job.rank in (0, 3):
        job.sum(torch.ones(7), group)


def _late_by_less_than_the_patience(job: Job) -> None:
    time.sleep(0.2 * (job.rank == 1))
    job.sum(torch.ones(8), job.world)


_PARTS: list[Callable[[Job], None]] = [
    well,
    _uneven_work,
    _asynchronous,
    _other_shapes_in_other_groups,
    _more_calls_in_one_half,
    _one_half_rests,
    _groups_in_another_order,
    _same_elements_in_another_form,
    _from_different_lines,
    _objects,
    _broadcast_and_reduce,
    _scatter_and_gather,
    _uneven_all_to_all,
    _barriers,
    _ring,
    _functional,
    _a_new_group,
]
CLEAN = 20


# ----------------------------------------------------------------------------------------------------- one process

LONG, SHORT = timedelta(seconds=90), timedelta(seconds=4)


def hang(rank: int, folder: Path, name: str) -> None:
    """After a good step run one of `HANGS` under a watch; the rank that finds the answer writes it down.

    The ranks that wait give up after `SHORT`; in two programs the watch does before.
    """
    program = next(program for program in HANGS if program.__name__ == name)
    job = _begin(rank, folder / f"{name}.store")
    well(job)
    silence = 3 if program in (rank_2_never_comes, rank_0_does_not_send) else 600
    say = partial(_write, folder / f"{name}.txt")
    watch = Watch(folder / name, rank=rank, world=WORLD, silence=silence, say=say)
    dist.barrier()
    for group in (job.world, job.half, job.pair):
        dist.distributed_c10d._set_pg_timeout(SHORT, group)
    with contextlib.suppress(RuntimeError, ValueError), watch:
        program(job)
    os._exit(0)  # gloo's threads may wait still


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.link(beside, path)  # fails where there is an answer: one rank answers, once


def run_clean(rank: int, folder: Path) -> None:
    """Clean programs one after another; after each all ranks dump, and after all the program with a late rank."""
    job = _begin(rank, folder / "clean.store")
    for number in range(CLEAN + 1):
        if number < CLEAN:
            well_enough(number, job)
        else:
            rank_3_is_late(job)
        dist.barrier()
        write_dump(folder / f"clean_{number}", rank=rank, world=WORLD, started_ns=0, reason="asked")
        dist.barrier()
    dist.destroy_process_group()


def _begin(rank: int, store: Path) -> Job:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    turn_on()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=LONG)
    halves: list[Any] = [dist.new_group(ranks, group_desc="half") for ranks in ([0, 1], [2, 3])]
    pairs: list[Any] = [dist.new_group(ranks, group_desc="pair") for ranks in ([0, 2], [1, 3])]
    world = dist.group.WORLD
    assert world is not None
    return Job(rank, world, halves[rank // 2], pairs[rank % 2])
