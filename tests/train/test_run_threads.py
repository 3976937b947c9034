"""The threads of a run on a machine that becomes busy and quiet again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchwright.core.cpu_load import Load
from torchwright.train.run.config.run import Run
from torchwright.train.run.runtime.processes import ProcessRank
from torchwright.train.run.runtime.threads import LOOK_SECONDS, RunThreads, user_chose

QUIET, BUSY = Load(running=0, cores=2), Load(running=24, cores=2)


class Machine:
    """A machine whose load the test sets, on which two threads wait for each other once it is busy."""

    def __init__(self) -> None:
        self.load, self.now, self.looks = QUIET, 0.0, 0

    def read(self) -> Load:
        self.looks += 1
        return self.load

    def threads(self, *, fixed: bool = False) -> RunThreads:
        times = {1: 0.008, 2: 0.064}
        return RunThreads(
            fixed=fixed, load=self.read, time_on=lambda threads: times[threads], clock=lambda: self.now
        )


@pytest.fixture
def machine() -> Iterator[Machine]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Machine()
    torch.set_num_threads(before)


def test_a_run_takes_fewer_threads_while_the_machine_is_busy(machine: Machine) -> None:
    machine.load = BUSY
    threads = machine.threads()
    assert threads.look() == "training on 1 of 2 threads: machine busy (load 24 on 2 cores)"
    assert torch.get_num_threads() == 1
    assert threads.look() is None, "not at every step"
    machine.now += LOOK_SECONDS
    assert threads.look() is None, "said once"
    machine.load = QUIET
    machine.now += LOOK_SECONDS
    assert threads.look() == "training on all 2 threads again"
    assert torch.get_num_threads() == 2


def test_a_machine_that_becomes_busy_later_is_noticed(machine: Machine) -> None:
    threads = machine.threads()
    assert threads.look() is None
    machine.load = BUSY
    assert (threads.look(), machine.looks) == (None, 1)
    machine.now += LOOK_SECONDS
    assert threads.look() is not None
    assert torch.get_num_threads() == 1
    threads.restore()
    assert torch.get_num_threads() == 2


def test_threads_that_the_user_chose_are_kept(machine: Machine) -> None:
    machine.load = BUSY
    threads = machine.threads(fixed=True)
    assert (threads.look(), machine.looks, torch.get_num_threads()) == (None, 0, 2)


def test_what_counts_as_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    free = Run.model_construct(threads=None)
    alone = ProcessRank(rank=0, world=1, device="cpu")
    assert not user_chose(free, alone)
    assert user_chose(Run.model_construct(threads=2), alone)
    assert user_chose(free, ProcessRank(rank=0, world=2, device="cpu"))
    assert user_chose(free, ProcessRank(rank=0, world=1, device="cuda"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert user_chose(free, alone)
