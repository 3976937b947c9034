"""oneDNN's bf16 mode: what is computed in it, and that the process is left as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.records import DeviceFacts, Step
from torchwright.hardware.devices.cpu import onednn_computes
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.fast_math import _MODE, FastFloat32, FastMath
from torchwright.testing.forks import check_in_child
from torchwright.workloads.module import ModuleWorkload

CPU = DeviceFacts(kind="cpu", name="test")


def modes() -> tuple[Any, Any]:
    backend: Any = torch.backends.mkldnn
    return backend.matmul.fp32_precision, backend.conv.fp32_precision


class Seen(nn.Module):
    """Says in which mode it is called, and fails or waits where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[tuple[Any, Any]] = []
        self.entered, self.go_on = threading.Event(), threading.Event()

    def forward(self, what: str) -> None:
        self.modes.append(modes())
        if what == "fail":
            raise ValueError(what)
        if what == "wait":
            self.entered.set()
            assert self.go_on.wait(30)


@pytest.mark.skipif(not onednn_computes("bfloat16"), reason="this processor has no instructions for bfloat16")
def test_numbers_are_those_of_float64_within_the_tolerance() -> None:
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 64)).eval()
    x = torch.randn(33, 256)
    target = make_target(ModuleWorkload(model, x), CPU)
    apply_steps(target, [Step(name="fast_math")])
    assert (target.coverage[0].changed, target.coverage[0].total) == (2, 2)
    assert "float32" not in target.properties
    with torch.inference_mode():
        found, expected = target.model(x), model.double()(x.double())
    assert found.dtype == torch.float32
    assert (found - expected).norm() < FastMath.tolerance * expected.norm()


def test_mode_holds_inside_alone() -> None:
    before, seen = modes(), Seen()
    fast = FastFloat32(seen)
    fast("")
    with pytest.raises(ValueError, match="fail"):
        fast("fail")
    assert seen.modes == [("bf16", "bf16")] * 2
    assert modes() == before


def test_callers_in_several_threads_leave_the_process_as_it_was() -> None:
    """The second enters while the first is inside, and leaves after it."""
    before = modes()
    first, second = Seen(), Seen()
    threads = [threading.Thread(target=FastFloat32(seen), args=("wait",)) for seen in (first, second)]
    for thread, seen in zip(threads, (first, second), strict=True):
        thread.start()
        assert seen.entered.wait(30)
    first.go_on.set()
    threads[0].join()
    assert modes() == ("bf16", "bf16")
    second.go_on.set()
    threads[1].join()
    assert modes() == before


def test_a_child_of_fork_leaves_the_mode_of_the_parents_other_threads() -> None:
    before = modes()

    def check() -> None:
        assert modes() == before

    with _MODE.fast():  # pyright: ignore[reportPrivateUsage]
        check_in_child(check)
    check()


def test_an_exported_graph_is_the_inner_modules() -> None:
    inner = nn.Linear(8, 8)
    program = torch.export.export(FastFloat32(inner), (torch.randn(2, 8),))
    x = torch.randn(2, 8)
    torch.testing.assert_close(program.module()(x), inner(x))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FastMath.available(DeviceFacts(kind="cuda", name="test")) == (
        "oneDNN multiplies on CPUs; this device is cuda"
    )
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert "this processor has neither" in (FastMath.available(CPU) or "")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert FastMath.available(CPU) == "this build of PyTorch has no oneDNN"
