"""Devices: what one is, how fast at most, and how to count its memory. One file per device.

device = get_device()            CUDA where it can be used, else the CPU
device = get_device("cpu")
device.facts()                   DeviceFacts with the measured ceilings (measured once, then read from a file)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchwright.errors import TorchwrightError, unknown
from torchwright.registry import Registry

if TYPE_CHECKING:
    from torchwright.devices.base import Device

__all__ = ["check_name", "default_name", "devices", "get_device"]

devices: Registry[type[Device]] = Registry(
    "device",
    group="torchwright.devices",
    builtins={"cpu": "torchwright.devices.cpu:CPU", "cuda": "torchwright.devices.cuda:CUDA"},
)


def check_name(name: str) -> str:
    """`name` if a device of that name is registered; raises `UnknownName` otherwise. Imports no torch."""
    if name not in devices.names():
        raise unknown("device", name, devices.names(), next="`torchwright doctor` says what this machine has")
    return name


def default_name() -> str:
    """The device that is taken when nobody names one: CUDA where it can be used, else the CPU."""
    return "cuda" if devices.get("cuda").unavailable() is None else "cpu"


def get_device(name: str | None = None) -> Device:
    """The device called `name`, or the default one.

    Raises `UnknownName` for a name nobody registered and `TorchwrightError` for a device this machine does not have.
    """
    cls = devices.get(check_name(name or default_name()))
    reason = cls.unavailable()
    if reason is not None:
        usable = [known for known, other in devices if other.unavailable() is None]
        raise TorchwrightError(
            f"the device '{name}' was asked for, but it cannot be used here",
            found=reason,
            allowed=", ".join(usable),
            next=cls.remedy,
        )
    return cls()
