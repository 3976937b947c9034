"""Compiling what may come next beside what is compiled now."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from search_techniques import Quantize
from search_world import World, fake_world, lossy, product, step
from torchwright.core.json_file import read_json
from torchwright.core.records import Step
from torchwright.core.system import LAST
from torchwright.optimization.search import estimate
from torchwright.optimization.search.prefetch_compile import CompilePrefetcher
from torchwright.optimization.techniques.base import conversion_of
from torchwright.optimization.trial.client import CONVERSIONS, Context, start_candidate
from torchwright.optimization.trial.fork_server import ForkServer, can_fork
from torchwright.optimization.trial.travel import pack
from torchwright.workloads.module import ModuleWorkload

COMPILE = Step(name="compile", options={"engine": "aot"})
HALF = Step(name="dtype", options={})
forks = pytest.mark.skipif(not can_fork("cpu"), reason="forks on Linux only")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ForkServer]]:
    """A workload's folder, and what its trials are forked from: the contexts of all tests, which imports for 7 s."""
    folder = tmp_path_factory.mktemp("workload")
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    workload = pack(ModuleWorkload(model, (torch.ones(2, 8),)), folder)
    made = ForkServer(workload, folder)
    yield workload, made
    made.close()


@pytest.fixture
def context(
    server: tuple[Path, ForkServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Context]:
    monkeypatch.setattr("torchwright.optimization.search.prefetch_compile.usable_cores", lambda: 2)
    workload, shared = server
    with Context(
        fork=True,
        workload=workload,
        device="cpu",
        threads=1,
        seed=0,
        scratch=tmp_path,
        deadline=time.monotonic() + 300,
        _server=shared,
    ) as made:
        yield made
        if made._server is shared:  # pyright: ignore[reportPrivateUsage]
            made._server = None  # pyright: ignore[reportPrivateUsage]


def pids(context: Context) -> list[int]:
    return [process._process.pid for process in context.processes]  # pyright: ignore[reportPrivateUsage]


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def becomes(found: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not found() and time.monotonic() < end:
        time.sleep(0.01)
    return found()


def is_gone(pid: int) -> bool:
    return becomes(lambda: state(pid) == "gone")


@pytest.mark.slow
@forks
def test_what_was_compiled_ahead_is_taken_over_and_stands_still_in_between(context: Context):
    prefetcher, now, then = CompilePrefetcher(context), (COMPILE,), (HALF, COMPILE)
    prefetcher.begin(then, now, 1)
    (pid,) = pids(context)
    assert becomes(lambda: state(pid) == "T")
    assert os.getpriority(os.PRIO_PROCESS, pid) == LAST
    assert prefetcher.seconds(then) == 0.0
    with prefetcher.beside(now):
        assert becomes(lambda: state(pid) != "T")
        time.sleep(0.5)
    assert becomes(lambda: state(pid) == "T")
    before = prefetcher.seconds(then)
    assert before >= 0.5
    paused = time.monotonic()
    time.sleep(2.0)
    assert prefetcher.seconds(then) == before
    paused = time.monotonic() - paused
    begun = time.monotonic()
    with prefetcher.beside(then):
        waited = time.monotonic() - begun
        assert state(pid) == "gone"
        candidate = start_candidate(context, then)
    assert (
        0
        < candidate.prepared.spared
        == prefetcher.seconds(then)
        < before + waited + 0.5
        < before + waited + paused
    )
    assert candidate.prepared.converted == 0
    kept = context.scratch / CONVERSIONS / str(conversion_of(then))
    assert read_json(kept / "conversion.json")["seconds"] == candidate.prepared.spared
    assert pids(context) == [candidate.process._process.pid]  # pyright: ignore[reportPrivateUsage]
    candidate.close()


@pytest.mark.slow
@forks
def test_a_wrong_guess_is_given_up_and_nothing_of_it_is_left(context: Context):
    prefetcher = CompilePrefetcher(context)
    prefetcher.begin((HALF, COMPILE), (COMPILE,), 1)
    (first,) = pids(context)
    prefetcher.begin((COMPILE,), (HALF,), 1)
    assert is_gone(first)
    assert len(pids(context)) == 0  # eager code is tried meanwhile, which needs all cores
    for end in (prefetcher.close, lambda: prefetcher.begin((), (HALF,), 1)):
        prefetcher.begin((HALF, COMPILE), (COMPILE,), 1)
        (second,) = pids(context)
        end()
        assert is_gone(second)
    assert not pids(context)
    assert not list(context.scratch.glob("tmp*"))


@pytest.mark.slow
@forks
def test_what_fails_ahead_is_left_to_the_trial_to_tell(context: Context):
    prefetcher, broken = CompilePrefetcher(context), (Step(name="pointwise_linear", options={}), COMPILE)
    prefetcher.begin(broken, (COMPILE,), 1)
    assert len(pids(context)) == 1
    with prefetcher.beside(broken):
        pass
    assert not pids(context)
    assert prefetcher.seconds(broken) == 0.0
    assert not (context.scratch / CONVERSIONS).exists()


@forks
@pytest.mark.parametrize("lack", ["cores", "memory", "quiet", "fork", "done", "same"])
def test_nothing_is_compiled_ahead_where_it_would_disturb_or_is_there(
    context: Context, lack: str, monkeypatch: pytest.MonkeyPatch
):
    now, then = (COMPILE,), (HALF, COMPILE)
    if lack == "cores":
        monkeypatch.setattr("torchwright.optimization.search.prefetch_compile.usable_cores", lambda: 1)
    elif lack == "memory":
        monkeypatch.setattr(
            "torchwright.optimization.search.prefetch_compile.available_memory_bytes", lambda: 2**31
        )
    elif lack == "quiet":
        now = (COMPILE, Step(name="max_autotune", options={}))
    elif lack == "fork":
        context.fork = False
    elif lack == "same":
        then = (Step(name="allocator", options={}), COMPILE)
    else:
        (context.scratch / CONVERSIONS / str(conversion_of(then))).mkdir(parents=True)
    CompilePrefetcher(context).begin(then, now, 1)
    assert not pids(context)


def test_what_comes_next_if_this_is_kept_is_begun(monkeypatch: pytest.MonkeyPatch):
    world: World = fake_world(monkeypatch)
    world.gain = product(fuse=2.0, quantize=2.0, half=2.0)
    begun: list[tuple[Step, ...]] = []
    monkeypatch.setattr(CompilePrefetcher, "able", True)
    monkeypatch.setattr(
        CompilePrefetcher, "begin", lambda prefetcher, steps, now, weight_bytes: begun.append(steps)
    )
    world.search(step("half"), step("fuse"), step("quantize"))
    tried = [steps for steps in world.started if steps]
    assert begun[-1] == ()
    assert tried == [tried[0], *begun[:-1]]
    assert {each.name for each in tried[-1]} == {"half", "fuse", "quantize"}


@pytest.mark.parametrize("able", [True, False])
def test_what_loses_too_much_in_eager_code_is_no_guess(monkeypatch: pytest.MonkeyPatch, able: bool):
    world: World = fake_world(monkeypatch)
    world.gain, world.drop = product(fuse=2.0, quantize=3.0, half=1.1), lossy(quantize=0.05)
    world.cost = {"fuse": 20.0}
    monkeypatch.setattr(Quantize, "tolerance", 0.1)
    begun: list[tuple[Step, ...]] = []
    monkeypatch.setattr(CompilePrefetcher, "able", able)
    monkeypatch.setattr(
        CompilePrefetcher, "begin", lambda prefetcher, steps, now, weight_bytes: begun.append(steps)
    )
    monkeypatch.setattr(estimate, "COMPILER_EXPORTS", 200.0)
    world.search(step("fuse"), step("quantize"), step("half"))
    assert len(world.looked) == 1
    assert all(each.name != "quantize" for steps in [*begun, *world.started] for each in steps)
    first = [{each.name for each in steps} for steps in begun if steps][:1]
    assert first == ([{"half", "fuse"}] if able else [])
