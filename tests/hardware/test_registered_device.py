"""A device of another package, which has no line in ours. tests/sim has one with tensors of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchwright.cli import main
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import base, default_name, devices, get_device
from torchwright.hardware.devices.cpu import CPU
from torchwright.hardware.kernels import ops
from torchwright.hardware.measure.toolchain import compiler_fault
from torchwright.optimization.engines.safety import graph_check
from torchwright.optimization.trial.fork_server import can_fork


class Quick(CPU):
    """Better than any other."""

    name = "quick"
    preference = 9
    forks = False
    uncompiled = "its compiler is not installed"


class ByName(CPU):
    """Never taken by default."""

    name = "by-name"
    preference = -1


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Make `devices` know both, until the test ends."""
    with devices.adding({cls.name: f"{__name__}:{cls.__name__}" for cls in (Quick, ByName)}):
        yield


def test_another_packages_device_needs_no_line_of_ours(capsys: pytest.CaptureFixture[str]):
    assert default_name() == "quick"
    assert isinstance(get_device(), Quick)
    assert not can_fork("quick")
    assert compiler_fault(DeviceFacts(kind="quick", name="")) == "its compiler is not installed"
    assert graph_check.RULES["Device", "type"]("quick") == "quick"
    with pytest.raises(ValueError, match="the device 'slow'"):
        graph_check.RULES["Device", "type"]("slow")
    assert main(["bench", "--help"]) == 0
    assert "|hip|quick" in capsys.readouterr().out


def test_a_device_may_be_taken_by_its_name_alone():
    assert isinstance(get_device("by-name"), ByName)
    assert default_name() == "quick"
    with devices.adding({"quick": type("Unasked", (Quick,), {"preference": -1})}):
        assert default_name() not in ("quick", "by-name")


def test_every_device_says_what_is_asked_of_it():
    for name, cls in devices:
        assert issubclass(cls, base.Device)
        assert (cls.name, type(cls.preference), type(cls.forks)) == (name, int, bool)


def test_a_device_without_kernels_of_ours_says_so():
    assert ops.fault("quick") == "they are for cpu and cuda; this device is quick"
