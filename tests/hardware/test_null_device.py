"""The null device of examples/null_device, and a device of another package: neither has a line in the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples" / "null_device"))
from null_device import Null
from torchwright.cli import main
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import base, check_name, default_name, devices
from torchwright.hardware.devices.cpu import CPU
from torchwright.hardware.kernels import ops
from torchwright.hardware.measure.toolchain import compiler_fault
from torchwright.optimization.engines.safety import graph_check
from torchwright.optimization.trial.fork_server import can_fork
from torchwright.testing.test_devices import TestDevice as DeviceContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "null_device"
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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the example installed, by its entry point."""
    site = tmp_path_factory.mktemp("site")
    information = site / "torchwright_null_device-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchwright-null-device\nVersion: 1\n"
    )
    (information / "entry_points.txt").write_text("[torchwright.devices]\nnull = null_device:Null\n")
    path = [str(site), str(EXAMPLE), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def run(environment: dict[str, str], script: Path, code: str) -> str:
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_search_on_it_in_processes_of_their_own(installed: dict[str, str], tmp_path: Path):
    told = json.loads(run(installed, tmp_path / "script.py", USER).splitlines()[-1])
    assert (told["device"], told["tried"]) == ("null", ["dtype"])
    assert (told["from_cpu"], told["from_null"], told["close"]) == ("cpu", "null", True)
    assert "same device, but found null:0 and cpu" in told["refused"]
    assert told["default"] != "null"


@pytest.mark.slow
def test_what_forgets_to_fetch_fails(installed: dict[str, str], tmp_path: Path):
    run(installed, tmp_path / "script.py", CHECKS)


def register(monkeypatch: pytest.MonkeyPatch, name: str, target: str) -> None:
    """Make `devices` know another device, until the test ends."""
    devices.names()
    monkeypatch.setattr(devices, "_targets", {**devices._targets, name: target})
    monkeypatch.setattr(devices, "_loaded", dict(devices._loaded))


@pytest.fixture
def null(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "null", "null_device:Null")


def test_it_is_taken_by_its_name_alone(null: None):
    assert check_name("null") == "null"
    assert Null.unavailable() is None
    assert default_name() != "null"
    assert not can_fork("null")
    assert "simulated" in str(compiler_fault(Null().identify()))


def test_help_names_no_device_for_tests(capsys: pytest.CaptureFixture[str]):
    assert main(["optimize", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--device cpu|cuda|xpu" in said
    assert "null" not in said.partition("--device ")[2].split()[0]


def test_it_keeps_the_contract_of_devices(null: None):
    contract, device = DeviceContract(), Null()
    contract.test_it_says_what_it_is(device)
    contract.test_its_identity_is_plain_data(device)
    contract.test_ceilings_are_positive(device)
    contract.test_memory_is_counted(device)


# ---------------------------------------------------------------------------------------- a device of another package


class Quick(CPU):
    """Better than any other."""

    name = "quick"
    preference = 9
    forks = False
    uncompiled = "its compiler is not installed"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "quick", f"{__name__}:Quick")


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
    assert "|hip|quick" in capsys.readouterr().out


def test_every_device_says_what_is_asked_of_it(null: None):
    for name, cls in devices:
        assert issubclass(cls, base.Device)
        assert (cls.name, type(cls.preference), type(cls.forks)) == (name, int, bool)


def test_a_device_without_kernels_of_ours_says_so(quick: None):
    assert ops.fault("quick") == "they are for cpu and cuda; this device is quick"
