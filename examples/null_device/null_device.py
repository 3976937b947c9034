"""The null device: a card that is not there, for tests on machines without one.

    pip install examples/null_device && torchwright optimize MODEL --device null

Tensors have to be brought to it and fetched from it as with a real card, and what forgets to fails. It computes on the
CPU, slowly, so that its times mean nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import types
from typing import Any

import torch

from simulated_device import simulated
from torchwright.core.errors import TorchwrightError
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.base import Ceilings, Device
from torchwright.hardware.devices.cpu import CPU

SPARE = "privateuseone"
"""torch's name for a backend that it does not know, which may be given another once in a process."""

_started: list[contextlib.AbstractContextManager[None]] = []
"""The simulation that this process is in."""


class Null(Device):
    """A device whose tensors lie on the CPU and say that they do not. Once a process has used it, its main thread
    takes no gradients any more."""

    name = "null"
    preference = -1
    uncompiled = "it is simulated: nothing is compiled for it"

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    @classmethod
    def start(cls) -> None:
        if _started:
            return
        name_backend()
        simulation = simulated(torch.device(cls.name, 0))
        simulation.__enter__()
        _started.append(simulation)
        atexit.register(simulation.__exit__, None, None, None)  # torch ends badly within it

    def identify(self) -> DeviceFacts:
        here = CPU().identify()
        return DeviceFacts(
            kind=self.name, name="a simulated device", cores=here.cores, memory_bytes=here.memory_bytes
        )

    def measure(self) -> Ceilings:
        return Ceilings(read_gb_per_s=1.0)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def reset_peak_memory(self) -> bool:
        return CPU().reset_peak_memory()

    def peak_memory_bytes(self) -> int:
        return CPU().peak_memory_bytes()


def name_backend() -> None:
    """Have torch take "null" for a device; raises `TorchwrightError` where another backend has that place."""
    taken: Any = torch._C._get_privateuse1_backend_name()
    if taken not in (SPARE, Null.name):
        raise TorchwrightError(
            "the null device cannot be used beside a backend that torch does not bring itself",
            found=f"'{taken}' in this process",
            next="use it in a process that does not import that backend",
        )
    if hasattr(torch, Null.name):
        return
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(Null.name)
    backend: Any = types.ModuleType(f"torch.{Null.name}")
    backend.is_available = backend.is_initialized = lambda: True
    backend.device_count = lambda: 1
    backend.current_device = lambda: 0
    backend._lazy_init = lambda: None
    backend._is_in_bad_fork = lambda: False
    backend.manual_seed_all = lambda seed: None
    backend.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    backend.set_rng_state = lambda state, device=None: None
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(Null.name, backend)
