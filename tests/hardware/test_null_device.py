"""The null device, chosen by its name, and a device of another package: neither has a line elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchwright.cli import main
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import base, check_name, default_name, devices
from torchwright.hardware.devices.cpu import CPU
from torchwright.hardware.devices.null import Null
from torchwright.hardware.kernels import ops
from torchwright.hardware.measure.toolchain import compiler_fault
from torchwright.optimization.engines import graph_check
from torchwright.optimization.trial.fork_server import can_fork

USER = """
import json
import torch
from torch import nn
import torchwright as tw

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
x = torch.randn(8, 16)
if __name__ == "__main__":
    result = tw.optimize(model, (x,), device="null", techniques=["dtype"], max_drop=0.5, progress=False)
    fast = result.model  # which is loaded here, so that this process may have tensors there
    there = x.to("null")
    refused = None
    try:
        model(there)
    except RuntimeError as error:
        refused = str(error)
    print(json.dumps({
        "device": result.recipe.fingerprint.device.kind,
        "tried": [rung.step.name for rung in result.steps],
        "from_cpu": fast(x).device.type,
        "from_null": fast(there).device.type,
        "close": torch.allclose(fast(x), model(x), atol=0.1),
        "refused": refused,
        "default": tw.hardware.devices.default_name(),
    }))
"""


CHECKS = """
import pytest
import torch
from torch import nn

from torchwright.hardware.devices import get_device

get_device("null").start()
get_device("null").start()  # once is enough
x = torch.randn(3, 4).to("null")
assert x.device == torch.device("null", 0)
assert not x.is_cuda
layer = nn.Linear(4, 2).requires_grad_(False)
with pytest.raises(RuntimeError, match="same device"):
    layer(x)
found = layer.to("null")(x)
assert (found.device.type, found.cpu().device.type) == ("null", "cpu")
with pytest.raises(RuntimeError, match="numpy"):
    found.numpy()
assert torch.zeros(2, device="null").device.type == "null"
assert torch.tensor([1], device=x.device).device.type == "null"
assert torch.randn(2).device.type == "cpu"
with torch.random.fork_rng():
    torch.manual_seed(0)
"""


@pytest.mark.slow
def test_a_search_on_it_in_processes_of_their_own(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(USER)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout.splitlines()[-1])
    assert (told["device"], told["tried"]) == ("null", ["dtype"])
    assert (told["from_cpu"], told["from_null"], told["close"]) == ("cpu", "null", True)
    assert "same device, but found null:0 and cpu" in told["refused"]
    assert told["default"] != "null"


def test_what_forgets_to_fetch_fails(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(CHECKS)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_it_is_taken_by_its_name_alone(capsys: pytest.CaptureFixture[str]):
    assert check_name("null") == "null"
    assert Null.unavailable() is None
    assert default_name() != "null"
    assert not can_fork("null")
    assert "simulated" in str(compiler_fault(Null().identify()))
    assert main(["optimize", "--help"]) == 0
    assert "--device cpu|cuda|null" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- a device of another package


class Quick(CPU):
    """Better than any other."""

    name = "quick"
    preference = 9
    forks = False
    uncompiled = "its compiler is not installed"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.names()
    monkeypatch.setattr(devices, "_targets", {**devices._targets, "quick": f"{__name__}:Quick"})
    monkeypatch.setattr(devices, "_loaded", dict(devices._loaded))


def test_another_packages_device_needs_no_line_of_ours(quick: None, capsys: pytest.CaptureFixture[str]):
    from torchwright.hardware.devices import get_device

    assert default_name() == "quick"
    assert isinstance(get_device(), Quick)
    assert not can_fork("quick")
    assert compiler_fault(DeviceFacts(kind="quick", name="")) == "its compiler is not installed"
    assert graph_check.RULES["Device", "type"]("quick") == "quick"
    with pytest.raises(ValueError, match="the device 'slow'"):
        graph_check.RULES["Device", "type"]("slow")
    assert main(["bench", "--help"]) == 0
    assert "cpu|cuda|null|quick" in capsys.readouterr().out


def test_every_device_says_what_is_asked_of_it():
    for name, cls in devices:
        assert issubclass(cls, base.Device)
        assert (cls.name, type(cls.preference), type(cls.forks)) == (name, int, bool)


def test_a_device_without_kernels_of_ours_says_so(quick: None):
    assert ops.fault("quick") == "they are for cpu and cuda; this device is quick"
