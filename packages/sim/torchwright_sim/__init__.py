"""Simulated accelerators: `torch.device("sim")`, found by `import torch` where this package is installed.

    x = torch.ones(3, device="sim") + 1          # sim:0; TORCHWRIGHT_SIM="devices=8,memory=2GiB" has eight

Each device is a process that holds its memory and computes with the CPU's operators; this process has handles.
"""

from __future__ import annotations

import os

NAME = "sim"
VARIABLE = "TORCHWRIGHT_SIM"
OFF = "off"
"""The value of the variable that leaves PyTorch's place for other backends free."""

_fault: list[str] = []


def autoload() -> None:
    """Register the devices; called at the end of `import torch`, which no failure here may break."""
    if os.environ.get(VARIABLE) == OFF:
        _fault.append(f"{VARIABLE}={OFF} turned it off")
        return
    try:
        from torchwright_sim.registration import register

        register()
    except Exception as error:  # whatever it is, PyTorch without simulated devices works
        _fault.append(f"{type(error).__name__}: {error}")


def fault() -> str | None:
    """Return why this process has no simulated devices, or None where it has some."""
    return _fault[0] if _fault else None
