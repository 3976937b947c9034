"""Trial processes, real ones, on models that do what models do at their worst."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.errors import ModelError, RefusedTechnique, WorkloadError
from torchwright.core.records import Step
from torchwright.hardware.devices.allocator import retain_fault
from torchwright.optimization.trial.client import (
    CONVERSIONS,
    Context,
    TrialFailed,
    TrialProcess,
    start_candidate,
)
from torchwright.optimization.trial.fork_server import can_fork
from torchwright.optimization.trial.travel import CODE, TENSORS, pack, unpack
from torchwright.workloads.module import ModuleWorkload


class Trap(nn.Module):
    """A linear layer, and a `deed` that is done at the n-th call and after it."""

    def __init__(self, deed: Any = None, after: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.deed, self.after, self.calls = deed, after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.deed and self.calls > self.after:
            self.deed()
        return self.linear(x)


def leave() -> None:
    os._exit(7)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fault() -> None:
    ctypes.string_at(0)


def hang() -> None:
    time.sleep(1000)


def fail() -> None:
    raise ValueError("no such luck\nand more")


def chatter() -> None:
    """What a chatty model and its C++ libraries print, straight to the file descriptors."""
    print("loading 100%|███")
    sys.stdout.write("\x00\xff" * 1000)
    os.write(1, b"\x80\x04\x95 not a pickle")
    os.write(2, b"warning: \xff")


def context(
    model: nn.Module, scratch: Path, seconds: float = 120.0, fork: bool = False, **options: Any
) -> Context:
    return Context(
        fork=fork,
        workload=pack(ModuleWorkload(model, (torch.ones(2, 4),), **options), scratch),
        device="cpu",
        threads=1,
        seed=0,
        scratch=scratch,
        deadline=time.monotonic() + seconds,
    )


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> bool:
    for _ in range(100):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


forks = pytest.mark.skipif(not can_fork("cpu"), reason="forks on Linux only")
# A fork server imports for 7 s of processor time, so the plain run has few of them.
forked_or_not = pytest.mark.parametrize(
    "fork", [False, pytest.param(True, marks=[forks, pytest.mark.slow])], ids=["started", "forked"]
)

# ------------------------------------------------------------------------------------- how trials end


@pytest.mark.parametrize(
    ("deed", "reason", "fork"),
    [
        (leave, "ended with exit code 7", False),
        pytest.param(
            kill, "killed (signal 9): most likely out of memory", True, marks=[forks, pytest.mark.slow]
        ),
        pytest.param(fault, "crashed (SIGSEGV)", False, marks=pytest.mark.slow),
        pytest.param(leave, "ended with exit code 7", True, marks=[forks, pytest.mark.slow]),
        pytest.param(kill, "killed (signal 9): most likely out of memory", False, marks=pytest.mark.slow),
        pytest.param(fault, "crashed (SIGSEGV)", True, marks=[forks, pytest.mark.slow]),
    ],
)
def test_a_process_that_ends_is_a_reason_in_words(tmp_path: Path, deed: Any, reason: str, fork: bool):
    with context(Trap(deed), tmp_path, fork=fork) as shared, TrialProcess(shared) as process:
        with pytest.raises(TrialFailed) as found:
            process.ask("prepare", steps=())
        assert found.value.reason == reason
        assert not found.value.timed_out
        with pytest.raises(TrialFailed) as again:  # and it stays the reason
            process.ask("time")
        assert again.value.reason == reason


def test_a_crash_leaves_the_original_and_further_trials(tmp_path: Path):
    """The server that forks them waited twice for the process that had crashed, and ended: with it all others."""
    with context(Trap(lambda: os.kill(os.getpid(), signal.SIGFPE)), tmp_path, fork=True) as shared:
        original = TrialProcess(shared)
        for _ in range(2):
            with TrialProcess(shared) as process, pytest.raises(TrialFailed, match=r"crashed \(SIGFPE\)"):
                process.ask("prepare", steps=())
        with pytest.raises(TrialFailed, match=r"crashed \(SIGFPE\)"):
            original.ask("prepare", steps=())  # it has lived until it did the same


@forked_or_not
def test_a_hanging_process_is_ended_at_the_deadline_with_all_that_it_started(tmp_path: Path, fork: bool):
    pid_file = tmp_path / "pid"

    def start_child_and_hang() -> None:
        pid_file.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(1000)

    with context(Trap(start_child_and_hang), tmp_path, fork=fork) as shared:
        process = TrialProcess(shared)
        shared.deadline = time.monotonic() + 3.0
        with pytest.raises(TrialFailed, match="the time that was left") as found:
            process.ask("prepare", steps=())
        assert found.value.timed_out
        assert wait_until_gone(process._process.pid)
        assert wait_until_gone(int(pid_file.read_text()))
        with pytest.raises(TrialFailed, match="not done in time"):
            process.ask("time")
        process.close()


def test_no_time_left_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[int] = []
    real = subprocess.Popen

    def remember(*args: Any, **kwargs: Any) -> Any:
        process = real(*args, **kwargs)
        started.append(process.pid)
        return process

    monkeypatch.setattr("torchwright.optimization.trial.fork_server.subprocess.Popen", remember)
    with pytest.raises(TrialFailed) as found:
        TrialProcess(context(Trap(), tmp_path, seconds=0.0))
    assert found.value.timed_out
    assert len(started) == 1
    assert wait_until_gone(started[0])


class Unpacked:
    """What does `deed` where it is unpacked; a copy in this process is none."""

    def __init__(self, deed: Any, home: int) -> None:
        self.deed, self.home = deed, home
        if os.getpid() != home:
            deed()

    def __reduce__(self) -> Any:
        return Unpacked, (self.deed, self.home)


@forks
@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        pytest.param(fail, "ValueError: no such luck", marks=pytest.mark.slow),
        pytest.param(leave, "the process that trials are forked from has ended", marks=pytest.mark.slow),
        pytest.param(hang, "not done after 8 s, the time that was left", marks=pytest.mark.slow),
    ],
)
def test_a_workload_that_cannot_be_unpacked_fails_the_trial_and_not_the_search(
    tmp_path: Path, deed: Any, reason: str
):
    model = Trap()
    model.trap = Unpacked(deed, os.getpid())  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    with context(model, tmp_path, fork=True, seconds=8.0 if deed is hang else 60.0) as shared:
        for _ in range(2 if deed is not hang else 1):
            with pytest.raises(TrialFailed) as found:
                TrialProcess(shared)
            assert found.value.reason == reason
        server = shared.server()
    assert server.ended
    assert shared.processes == []


@pytest.mark.slow
@forks
def test_trials_that_are_forked_start_alike_and_change_nothing_for_each_other(tmp_path: Path):
    """And one that is killed is a reason in words, as one that was started is."""
    with context(Trap(kill, after=60), tmp_path, fork=True) as shared:
        pids, answers = set[int](), list[Any]()
        for _ in range(2):
            with TrialProcess(shared) as process:
                process.ask("prepare", steps=(Step(name="dtype"),))
                answers.append(process.ask("observe"))
                pids.add(process._process.pid)
        with TrialProcess(shared) as original:
            original.ask("prepare", steps=())
            answers.append(original.ask("observe"))
            with pytest.raises(TrialFailed) as found:
                collections.deque((original.ask("time") for _ in range(100)), maxlen=0)
            assert found.value.reason == "killed (signal 9): most likely out of memory"
        server = shared.server()
    assert len(pids) == 2
    assert server.ended
    first, second, wide = [answer[0].outputs[0] for answer in answers]
    assert torch.equal(first, second)
    assert not torch.equal(first, wide)


@pytest.mark.slow
@forks
def test_a_fork_server_that_was_killed_is_started_again(tmp_path: Path):
    with context(Trap(), tmp_path, fork=True) as shared:
        process = TrialProcess(shared)
        shared.server()._process.kill()
        assert wait_until_gone(process._process.pid)
        with pytest.raises(TrialFailed, match="signal 9"):
            process.ask("prepare", steps=())
        with TrialProcess(shared) as another:
            assert another.ask("prepare", steps=()).engine == "eager"


# ------------------------------------------------------------------------------ errors that it survives


@pytest.mark.slow
def test_a_model_that_raises_on_its_own_inputs_is_the_users_error(tmp_path: Path):
    with TrialProcess(context(Trap(fail), tmp_path)) as process:
        with pytest.raises(ModelError, match=r"fails on its own inputs.*ValueError: no such luck"):
            process.ask("prepare", steps=())
        with pytest.raises(TrialFailed) as found:
            process.ask("no_such_request")
        assert found.value.reason.startswith("AttributeError: ")
        assert "Traceback" in found.value.details


@pytest.mark.slow
def test_a_model_that_raises_later_fails_the_trial_with_its_first_line(tmp_path: Path):
    with TrialProcess(context(Trap(fail, after=20), tmp_path)) as process:
        process.ask("prepare", steps=())
        with pytest.raises(TrialFailed) as found:
            collections.deque((process.ask("time") for _ in range(40)), maxlen=0)
        assert found.value.reason == "ValueError: no such luck"
        assert "and more" in found.value.details


def fill() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "scratch")


@pytest.mark.slow
def test_a_full_disk_is_no_fault_of_the_trial(tmp_path: Path):
    """It comes back as what it is, for the command line to say, and not as a row of the waterfall."""
    with TrialProcess(context(Trap(fill, after=20), tmp_path)) as process:
        process.ask("prepare", steps=())
        with pytest.raises(OSError, match="No space left on device: 'scratch'") as found:
            collections.deque((process.ask("time") for _ in range(40)), maxlen=0)
        assert found.value.errno == errno.ENOSPC


def bad_metric(model: Any) -> float:
    raise KeyError("label")


@forked_or_not
def test_neither_what_a_model_prints_nor_a_metric_that_raises_disturbs_the_answers(
    tmp_path: Path, fork: bool
):
    with (
        context(Trap(chatter), tmp_path, fork=fork, metric=bad_metric) as shared,
        TrialProcess(shared) as process,
    ):
        assert process.ask("prepare", steps=()).engine == "eager"
        with pytest.raises(WorkloadError, match=r"'bad_metric' failed.*KeyError"):
            process.ask("observe")
        assert process.ask("time")["forward"] > 0
        assert process.ask("waited") >= 0
        assert process.ask("memory").peak > 0


class Large(nn.Module):
    """An activation of 64 MB, which glibc maps anew for each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((16 << 20,), 2.0)[: x.numel()].view_as(x) * x


@pytest.mark.slow
@pytest.mark.skipif(retain_fault() is not None, reason=str(retain_fault()))
def test_fresh_pages_are_counted_and_memory_that_stays_has_none(tmp_path: Path):
    seconds = {}
    with context(Large(), tmp_path) as shared:
        for steps in ((), (Step(name="allocator"),)):
            with TrialProcess(shared) as process:
                process.ask("prepare", steps=steps)
                seconds[len(steps)] = process.ask("memory").faulting["forward"]
    assert 0 <= seconds[1] < seconds[0] / 10


# --------------------------------------------------------------------------------- models of any origin


@forked_or_not
def test_a_model_and_metric_from_a_notebook_travel(tmp_path: Path, fork: bool):
    """Classes of `__main__` exist in no file that the worker could import."""
    cell = """
import torch
scale = 3.0
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return helper(self.linear(x))
def helper(x):
    return x * scale
def metric(model):
    return float(model(torch.ones(2, 4)).sum().detach())
"""
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, notebook)
    model = notebook["Scaled"]()
    expected = notebook["metric"](model)
    with (
        context(model, tmp_path, fork=fork, metric=notebook["metric"]) as shared,
        TrialProcess(shared) as process,
    ):
        process.ask("prepare", steps=())
        observed = process.ask("observe")
    assert observed == pytest.approx(expected, rel=1e-5)


class Doubtful(nn.Module):
    """Looks at its numbers within a loop, which is where Dynamo gives a whole function up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if float(x.detach().mean()) > 100:
                x = x / 2
        return x


@pytest.mark.slow
def test_a_compiler_that_compiled_nothing_is_refused_and_not_timed(tmp_path: Path):
    """Otherwise the original, run in silence, would be compared with itself and called compiled."""
    step = Step(name="compile", options={"engine": "jit"})
    with (
        context(Doubtful(), tmp_path) as shared,
        TrialProcess(shared) as process,  # what other tests compiled in this process is known there
        pytest.raises(RefusedTechnique, match=r"compiled nothing of it: Unsupported Tensor\.item"),
    ):
        process.ask("prepare", steps=(step,))


class WritesWhereCompiled(nn.Module):
    """Leaves its input as it is in eager PyTorch, and doubles it in place where it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            x.mul_(2)
        return x + 1


class DoublesInPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1


@pytest.mark.slow
@pytest.mark.parametrize("model", [WritesWhereCompiled(), DoublesInPlace()], ids=lambda m: type(m).__name__)
def test_compiled_code_that_overwrites_its_callers_tensors_is_refused(model: nn.Module, tmp_path: Path):
    """But a model that does so itself may."""
    refused = (
        pytest.raises(RefusedTechnique, match=r"writes into its inputs.*the inputs of forward")
        if isinstance(model, WritesWhereCompiled)
        else contextlib.nullcontext()
    )
    with context(model, tmp_path) as shared, TrialProcess(shared) as process, refused:
        process.ask("prepare", steps=(Step(name="compile", options={"engine": "jit"}),))


@pytest.mark.slow
def test_what_is_compiled_and_not_warm_in_time_is_given_up(tmp_path: Path):
    """And not for want of time for trials: a kernel 7,000 times slower than another once took a third of a search."""
    step = Step(name="compile", options={"engine": "aot"})
    with context(nn.Linear(4, 4), tmp_path) as shared:
        shared.patience, deadline = 0.0, shared.deadline
        with pytest.raises(TrialFailed, match="far longer than the original's") as found:
            start_candidate(shared, (step,))
        assert not found.value.timed_out
        assert shared.deadline == deadline
        assert not shared.processes
    assert {path.name for path in tmp_path.iterdir()} == {CODE, TENSORS, CONVERSIONS}


@pytest.mark.slow
def test_a_candidate_carries_what_the_worker_found_and_cleans_up(tmp_path: Path):
    step = Step(name="threads", options={"count": 1})
    shared = context(Trap(), tmp_path)
    shared.threads = 2
    candidate = start_candidate(shared, (step,))
    try:
        assert (candidate.prepared.engine, candidate.prepared.threads, candidate.folder) == ("eager", 1, None)
        assert [item.technique for item in candidate.prepared.coverage] == ["threads"]
        assert candidate.prepared.weight_bytes == 4 * (4 * 4 + 4)
        candidate.turn()
        candidate.prepared = replace(candidate.prepared, repeats={"forward": 3})
        measured = candidate.measurement()
        assert measured.seconds == pytest.approx(3 * measured.cases[0].seconds)
    finally:
        candidate.close()
    assert wait_until_gone(candidate.process._process.pid)  # pyright: ignore[reportPrivateUsage]
    assert {path.name for path in tmp_path.iterdir()} == {CODE, TENSORS}


def test_what_cannot_travel_is_said_in_words(tmp_path: Path):
    model = Trap()
    workload = ModuleWorkload(model, (torch.ones(2, 4),))
    workload.model.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    with pytest.raises(WorkloadError, match=r"cannot be sent to a trial process.*locks and sockets"):
        pack(workload, tmp_path)


class Around:
    """As transformers keeps one."""

    def __init__(self) -> None:
        self.variable: contextvars.ContextVar[int] = contextvars.ContextVar("around", default=5)


AROUND = Around()
RECORDING: contextvars.ContextVar[int] = contextvars.ContextVar("recording", default=3)


def test_hooks_that_know_a_context_variable_travel(tmp_path: Path):
    """transformers puts such hooks on a model when it is first called."""

    def record(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * RECORDING.get() * AROUND.variable.get()

    model = nn.Linear(2, 2).eval()
    model.register_forward_hook(record)
    x = torch.randn(3, 2)
    travelled = unpack(pack(ModuleWorkload(model, (x,)), tmp_path)).build()
    torch.testing.assert_close(travelled(x), model(x))
