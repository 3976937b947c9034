"""packages/sim: simulated accelerators, in processes that find the package installed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sim_support import install, run

ON_DEVICE = Path(__file__).with_name("on_device")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("site"))


@pytest.mark.slow  # each is a process with devices of its own, and the first compiles their host part
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["tensors", "streams", "training", "registered"])
def test_on_the_device(installed: dict[str, str], name: str) -> None:
    command = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(ON_DEVICE / f"{name}.py")]
    memory = "512MiB" if name == "training" else "64MiB"
    run(installed, *command, settings=f"devices=2,memory={memory}")


# -------------------------------------------------------------------------------------------------------------- faults

USE = """
import torch
x = torch.ones(4, device="sim")
other = torch.ones(4, device="sim:1")
for number in range(1, 100):
    try:
        x = x + 1
    except RuntimeError as error:
        print(number, type(error).__name__, error)
        break
print(other.add(1).tolist())
try:
    print((x + 1).tolist())
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_device_that_is_killed_is_lost_and_others_live_on(installed: dict[str, str]) -> None:
    lines = run(installed, "-c", USE, settings="devices=2,fault=kill@sim:0#10").stdout.splitlines()
    assert lines[0].split()[1] == "DeviceLost"
    assert "sim:0 is lost" in lines[0]
    assert lines[1] == "[2.0, 2.0, 2.0, 2.0]"
    assert "sim:0 is lost" in lines[2]


@pytest.mark.slow
def test_a_device_killed_from_outside(installed: dict[str, str]) -> None:
    code = """
import os, signal, torch
x = torch.ones(4, device="sim") + 1
other = torch.ones(4, device="sim:1") + 1
os.kill(torch.sim.get_device_properties(0).pid, signal.SIGKILL)
try:
    (x + 1).cpu()
except RuntimeError as error:
    print(error)
print(other.tolist())
del x
"""
    lines = run(installed, "-c", code, settings="devices=2").stdout.splitlines()
    assert "sim:0 is lost" in lines[0]
    assert lines[1] == "[2.0, 2.0, 2.0, 2.0]"


@pytest.mark.slow
def test_an_allocation_fails_where_it_was_asked_to(installed: dict[str, str]) -> None:
    code = """
import torch
kept = []
for number in range(1, 20):
    try:
        kept.append(torch.empty(8, device="sim:1"))
    except torch.OutOfMemoryError as error:
        print(number, error)
print(len(kept))
"""
    lines = run(installed, "-c", code, settings="devices=2,fault=oom@sim:1#7").stdout.splitlines()
    assert lines[0].startswith("7 sim out of memory")
    assert lines[-1] == "18"


@pytest.mark.slow
def test_a_command_that_fails_and_a_bit_that_flips(installed: dict[str, str]) -> None:
    lines = run(installed, "-c", USE, settings="devices=2,fault=error@sim:0#5").stdout.splitlines()
    assert "sim:0 reports an error" in lines[0]
    assert lines[2].startswith("[")
    code = "import torch\nprint((torch.ones(4, device='sim') + 1).tolist())"
    assert run(installed, "-c", code, settings="fault=flip@sim:0#2").stdout != "[2.0, 2.0, 2.0, 2.0]\n"
    assert run(installed, "-c", code).stdout == "[2.0, 2.0, 2.0, 2.0]\n"


@pytest.mark.slow
def test_device_processes_end_with_the_one_that_uses_them(installed: dict[str, str]) -> None:
    code = """
import os, signal, torch
torch.ones(2, device="sim")
print(torch.sim.get_device_properties(0).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pid = int(run(installed, "-c", code, check=False).stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_fork_is_told_to_spawn(installed: dict[str, str]) -> None:
    code = """
import os, torch
x = torch.ones(2, device="sim")
if os.fork() == 0:
    try:
        print(x + 1)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
print((x + 1).tolist())
"""
    lines = run(installed, "-c", code).stdout.splitlines()
    assert any("'spawn'" in line for line in lines)
    assert lines[-1] == "[2.0, 2.0]"


# ------------------------------------------------------------------------------------------------------------ importing


def test_a_failure_never_breaks_the_import_of_torch(installed: dict[str, str], tmp_path: Path) -> None:
    """And the first use says what it was."""
    code = """
import torch, torchwright_sim
print(torch.ones(2).tolist(), torchwright_sim.fault(), torch.sim.is_available())
try:
    torch.ones(2, device="sim")
except Exception as error:
    print(error)
"""
    told = run(installed | {"TORCHWRIGHT_CACHE": str(tmp_path)}, "-c", code, settings="devices=many").stdout
    mistake = "TORCHWRIGHT_SIM: devices=many, allowed is 1 to 64"
    assert told.splitlines() == [f"[1.0, 1.0] ValueError: {mistake} False", mistake]


@pytest.mark.slow
def test_without_a_compiler_the_first_use_says_so(installed: dict[str, str], tmp_path: Path) -> None:
    environment = installed | {"TORCHWRIGHT_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    code = """
import torch
print(torch.device("sim"), torch.ones(2).tolist())
try:
    torch.ones(2, device="sim")
except RuntimeError as error:
    print(error)
"""
    told = run(environment, "-c", code).stdout.splitlines()
    assert told[0] == "sim [1.0, 1.0]"
    assert "need a C++ compiler, once, and no-such-compiler was not found" in told[1]


@pytest.mark.slow
def test_it_leaves_the_place_to_others_where_it_is_off(installed: dict[str, str]) -> None:
    code = "import torch\nprint(torch._C._get_privateuse1_backend_name())"
    assert run(installed, "-c", code, settings="off").stdout.strip() == "privateuseone"


@pytest.mark.slow
def test_torchwright_knows_the_device(installed: dict[str, str], tmp_path: Path) -> None:
    environment = installed | {"TORCHWRIGHT_ASSUME_QUIET": "1"}
    told = run(environment, "-m", "torchwright", "doctor", "--device", "sim", "--json").stdout
    assert '"name": "a simulated device (sim:0)"' in told
    assert '"device_fault": null' in told
