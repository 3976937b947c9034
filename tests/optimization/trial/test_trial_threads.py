"""Trials on a busy machine run on the threads that the original is fastest on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

from torchwright.core.cpu_load import Load
from torchwright.core.errors import ModelError
from torchwright.hardware.devices import get_device
from torchwright.optimization.trial.client import Candidate, Context, TrialProcess
from torchwright.optimization.trial.session import TrialSession
from torchwright.optimization.trial.threads import settle_threads
from torchwright.optimization.trial.travel import pack
from torchwright.workloads.module import ModuleWorkload

BUSY = Load(running=24, cores=2)


class Telling(nn.Module):
    """Fails with the number of threads that it runs on, and that code is compiled for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"on {torch.get_num_threads()}, for any: {inductor.cpp.dynamic_threads}")


def context(scratch: Path, load: Load, **options: Any) -> Context:
    fields: dict[str, Any] = {"workload": scratch, "device": "cpu", "threads": 2, "seed": 0, "deadline": 1e9}
    return Context(scratch=scratch, sampled_load=lambda: load, **fields | options)


class Process:
    """A process whose calls collapse on two threads."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def ask(self, method: str, *, threads: int) -> float:
        self.asked.append((method, threads))
        return 0.064 if threads > 1 else 0.008


def settled(given: Context) -> tuple[str | None, list[tuple[str, int]]]:
    process = Process()
    choice = settle_threads(given, cast("Candidate", SimpleNamespace(process=process)))
    return None if choice is None else str(choice), process.asked


def test_the_original_and_later_trials_run_on_the_threads_that_do_not_collapse(tmp_path: Path) -> None:
    given = context(tmp_path, BUSY)
    choice, asked = settled(given)
    assert choice == "1 of 2 threads: machine busy (load 24 on 2 cores)"
    assert asked[-1] == ("use_threads", 1)
    assert (given.threads, given.any_threads) == (1, True)


@pytest.mark.parametrize(
    "options",
    [{"load": Load(running=0, cores=2)}, {"load": BUSY, "device": "cuda"}, {"load": BUSY, "threads": 1}],
)
def test_otherwise_trials_have_the_threads_of_the_user(tmp_path: Path, options: dict[str, Any]) -> None:
    given = context(tmp_path, **options)
    threads = given.threads
    assert settled(given) == (None, [])
    assert (given.threads, given.any_threads) == (threads, False)


@pytest.mark.slow
@pytest.mark.parametrize("any_threads", [False, True])
def test_a_trial_compiles_for_any_number_of_threads_where_that_is_asked(
    tmp_path: Path, any_threads: bool
) -> None:
    workload = pack(ModuleWorkload(Telling(), (torch.ones(1),)), tmp_path)
    with (
        context(tmp_path, BUSY, workload=workload, threads=1, any_threads=any_threads) as given,
        TrialProcess(given) as process,
        pytest.raises(ModelError, match=f"on 1, for any: {any_threads}"),
    ):
        process.ask("prepare", steps=())


def test_a_session_times_its_calls_on_a_number_of_threads() -> None:
    session, before = TrialSession(), torch.get_num_threads()
    session.seed, session.device = 0, get_device("cpu")
    session.workload = ModuleWorkload(nn.Identity(), torch.ones(2))
    session.prepare(steps=())
    try:
        assert session.mean_seconds(threads=before + 1) > 0
        assert torch.get_num_threads() == before
        session.use_threads(threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
