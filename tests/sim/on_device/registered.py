"""A simulated device as Torchwright's registry has it; run by tests/sim/test_sim_device.py."""

from __future__ import annotations

import pytest

from torchwright.cli import main
from torchwright.hardware.devices import default_name, get_device
from torchwright.hardware.measure.toolchain import compiler_fault
from torchwright.optimization.trial.fork_server import can_fork
from torchwright.testing.test_devices import TestDevice as DeviceContract


def test_it_is_taken_by_its_name_alone(capsys: pytest.CaptureFixture[str]):
    assert default_name() != "sim"
    assert not can_fork("sim")
    assert "simulated" in str(compiler_fault(get_device("sim").identify()))
    assert main(["optimize", "--help"]) == 0
    assert "|sim" in capsys.readouterr().out


def test_it_keeps_the_contract_of_devices():
    contract, device = DeviceContract(), get_device("sim")
    contract.test_it_says_what_it_is(device)
    contract.test_its_identity_is_plain_data(device)
    contract.test_ceilings_are_positive(device)
    contract.test_memory_is_counted(device)
