"""The simulated device as Torchwright asks about devices; Torchwright itself need not be installed."""

from __future__ import annotations

import torchwright_sim
from torchwright.hardware.devices.accelerator import Accelerator
from torchwright.hardware.devices.base import Ceilings


class Sim(Accelerator):
    """A simulated accelerator: its times mean nothing."""

    name = "sim"
    package = "torchwright_sim.registered"
    uncompiled = "no compiler makes code for a simulated device"
    remedy = "install a C++ compiler, with which its host part is built once, or use --device cpu"

    @classmethod
    def unavailable(cls) -> str | None:
        return torchwright_sim.fault() or super().unavailable()

    def measure(self) -> Ceilings:
        """Return a rate without a meaning, as all times here: products that fill a card take the CPU minutes."""
        return Ceilings(read_gb_per_s=1.0)
