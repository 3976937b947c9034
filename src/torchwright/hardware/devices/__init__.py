"""Devices: what one is, how fast at most, and how to count its memory. One file per device.

device = get_device()            the most preferred that can be used: CUDA, else the CPU
device = get_device("cpu")
device.facts()                   DeviceFacts with the measured ceilings (measured once, then read from a file)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchwright.core.errors import TorchwrightError, unknown
from torchwright.core.registry import Registry

if TYPE_CHECKING:
    from torchwright.hardware.devices.base import Device

__all__ = ["check_name", "default_name", "devices", "get_device"]

devices: Registry[type[Device]] = Registry(
    "device",
    group="torchwright.devices",
    builtins={
        "cpu": "torchwright.hardware.devices.cpu:CPU",
        "cuda": "torchwright.hardware.devices.cuda:CUDA",
        "xpu": "torchwright.hardware.devices.xpu:XPU",
        "mps": "torchwright.hardware.devices.mps:MPS",
        "npu": "torchwright.hardware.devices.npu:NPU",
        "hpu": "torchwright.hardware.devices.hpu:HPU",
        "hip": "torchwright.hardware.devices.hip:HIP",
    },
)


def check_name(name: str) -> str:
    """`name` if a device of that name is registered; raises `UnknownName` otherwise. Imports no torch."""
    if name not in devices.names():
        raise unknown("device", name, devices.names(), next="`torchwright doctor` says what this machine has")
    return name


def default_name() -> str:
    """The device that is taken when nobody names one: of those that can be used, the one of the highest preference."""
    return max(_usable(), key=lambda cls: cls.preference).name


def get_device(name: str | None = None) -> Device:
    """The device called `name`, or the default one. Before tensors lie on it, `start` is called.

    Raises `UnknownName` for a name nobody registered and `TorchwrightError` for a device this machine does not have.
    """
    cls = devices.get(check_name(name or default_name()))
    reason = cls.unavailable()
    if reason is not None:
        raise TorchwrightError(
            f"the device '{name}' was asked for, but it cannot be used here",
            found=reason,
            allowed=", ".join(usable.name for usable in _usable()),
            next=cls.remedy,
        )
    return cls()


def _usable() -> list[type[Device]]:
    return [cls for _, cls in devices if cls.preference >= 0 and cls.unavailable() is None]
