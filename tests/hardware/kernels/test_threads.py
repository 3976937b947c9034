"""The kernels' own threads: the same bits as on PyTorch's, from any number of them, callers and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchwright.core.scheme import MADE
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.cpu.threads import own_threads, torch_threads
from torchwright.hardware.kernels.linear import PackedLinear

STRESS = Path(__file__).with_name("pool_stress.cpp")


def calls(native: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """Operators with enough work to be divided, over fresh inputs; one row is the decode step of a stream."""
    made: dict[str, Callable[[], torch.Tensor]] = {}
    weight = torch.randn(900, 512)
    for rows in (1, 7, 600):
        x = torch.randn(rows, 512)
        for scheme in MADE:
            layer = PackedLinear(weight, None, MADE[scheme])
            made[f"{scheme} {rows}"] = lambda layer=layer, x=x: layer(x)
        made[f"norm {rows}"] = lambda x=x: native.rms_norm(x, torch.ones(512), 1e-5)
        made[f"gated {rows}"] = lambda x=x: native.gated(x, "silu")
    k, v = (torch.randn(200, 2, 8, 16, 2).bfloat16() for _ in range(2))
    starts = {"one long": [0, 1], "several": [0, 1, 40, 41]}
    for name, bounds in starts.items():
        contexts = torch.tensor([1500, 900, 700][: len(bounds) - 1], dtype=torch.int32)
        tables = torch.randint(200, (len(contexts), 100), dtype=torch.int32)
        q = torch.randn(bounds[-1], 4, 16).bfloat16()
        made[f"attention {name}"] = lambda q=q, tables=tables, bounds=bounds, contexts=contexts: (
            native.paged_attention(
                q, k, v, None, None, tables, torch.tensor(bounds).int(), contexts, 0.25, 0, 0.0
            )
        )
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_bits_are_those_of_torchs_threads(native: Any, count: int):
    for name, call in calls(native).items():
        with torch_threads(2):
            expected = call()
        with own_threads(count):
            assert torch.equal(call(), expected), name


def test_callers_at_once_get_what_they_get_alone(native: Any):
    made = calls(native)
    expected = {name: call() for name, call in made.items()}
    wrong: list[str] = []

    def caller() -> None:
        for _ in range(3):
            for name, call in made.items():
                with own_threads(3):
                    if not torch.equal(call(), expected[name]):
                        wrong.append(name)

    callers = [threading.Thread(target=caller) for _ in range(20)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert not wrong


def test_settings_are_the_callers_again(native: Any):
    before = torch.get_num_threads()

    def fail() -> None:
        with own_threads(3):
            assert torch.get_num_threads() == 1
            with own_threads(2):  # of a model that another calls
                pass
            assert native.own_threads(3) == 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before
    assert native.own_threads(0) == 0


def test_as_many_as_torch_has_unless_told(native: Any):
    with torch_threads(5), own_threads():
        assert native.own_threads(5) == 5


def test_a_negative_number_is_refused(native: Any):
    with pytest.raises(ValueError, match="count is -1"):
        native.own_threads(-1)


FORKS = """
import os, torch
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.core.scheme import W8A8
from torchwright.hardware.kernels.cpu.threads import own_threads
assert build.load_fault() is None
layer, x = PackedLinear(torch.randn(900, 512), None, W8A8), torch.randn(600, 512)
with own_threads(4):
    expected = layer(x)
    child = os.fork()
    same = torch.equal(layer(x), expected)
    if not child:
        os._exit(0 if same else 3)
    print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_forked_child_computes(native: Any):
    found = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["True", "0"], found.stderr


def stress(tmp_path: Path, *flags: str) -> list[str]:
    """The program of `pool_stress.cpp`."""
    program = tmp_path / "stress"
    source = ["-std=c++20", "-O2", "-pthread", *flags, f"-I{build.SOURCES}", str(STRESS)]
    made = subprocess.run(
        [build.find_compiler(), *source, "-o", str(program)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"it cannot be compiled here: {made.stderr[-300:]}")
    return [str(program)]


@pytest.mark.slow
def test_every_task_runs_once_whoever_calls(native: Any, tmp_path: Path):
    program = stress(tmp_path)
    for cores in (os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}):
        found = subprocess.run(
            [*program, "fork"],
            capture_output=True,
            text=True,
            preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores),
        )
        assert (found.stdout.strip(), found.returncode) == ("0", 0), found.stderr


@pytest.mark.slow
def test_no_thread_races_another(native: Any, tmp_path: Path):
    found = subprocess.run(stress(tmp_path, "-fsanitize=thread", "-g"), capture_output=True, text=True)
    assert (found.stdout.strip(), found.returncode) == ("0", 0), found.stderr
