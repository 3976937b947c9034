"""Settings of the simulated devices, from the environment variable TORCHWRIGHT_SIM.

TORCHWRIGHT_SIM="devices=8,memory=2GiB,sync=warn,fault=oom@sim:2#1000"

devices=N          devices, from 1 to 64 (1)
memory=SIZE        capacity of each, with a unit of KiB, MiB, GiB (2GiB)
sync=error|warn|ignore    what a missing synchronisation of streams leads to (error)
fault=KIND@PLACE[#N]      a fault; may be given more than once
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from torchwright_sim import VARIABLE

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MOST_DEVICES = 64
"""The limit of csrc/streams.h."""
MOST_MEMORY = 1 << 40
DEVICE_FAULTS = ("oom", "kill", "error", "flip")
OPERATOR_FAULTS = ("wrong", "crash", "abort", "hang")
SYNC = ("error", "warn", "ignore")


@dataclass(frozen=True)
class Fault:
    """A fault that is asked for.

    On a device, at its Nth allocation or command: `oom` (the allocation fails), `kill` (its process dies), `error` (the
    command fails), `flip` (one bit of the command's result is wrong). On an operator, from its Nth call on a device on:
    `wrong` (its result is off by one), `crash` (the device's process dies), `abort` (this process dies), `hang` (it
    never returns).
    """

    kind: str
    device: int | None
    """None: an operator's."""
    operator: str | None
    """Name with its namespace, such as aten::sin, for all overloads."""
    at: int = 1


@dataclass(frozen=True)
class Settings:
    """The settings of TORCHWRIGHT_SIM."""

    devices: int = 1
    memory: int = 2 << 30
    sync: str = "error"
    faults: tuple[Fault, ...] = ()

    def on_device(self, device: int) -> dict[str, int]:
        """Return the faults of a device by kind, with the number of the allocation or command that they hit."""
        return {fault.kind: fault.at for fault in self.faults if fault.device == device}

    def on_operators(self) -> dict[str, tuple[str, int]]:
        """Return the faults of operators: name → kind and the first call that they hit."""
        return {fault.operator: (fault.kind, fault.at) for fault in self.faults if fault.operator}


def read() -> Settings:
    """Return the settings of this process."""
    return parse(os.environ.get(VARIABLE, ""))


def parse(text: str) -> Settings:
    """Parse a value of TORCHWRIGHT_SIM; raises `ValueError` that says what is wrong with it and what is allowed."""
    values: dict[str, str] = {}
    faults: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in ("devices", "memory", "sync", "fault"):
            raise ValueError(f"{VARIABLE}: '{part}' is not devices=, memory=, sync= or fault=")
        if key == "fault":
            faults.append(_fault(value))
        elif key in values:
            raise ValueError(f"{VARIABLE}: '{key}' is given twice")
        else:
            values[key] = value
    settings = Settings(
        devices=_devices(values.get("devices", "1")),
        memory=_memory(values.get("memory", "2GiB")),
        sync=values.get("sync", "error"),
        faults=tuple(faults),
    )
    if settings.sync not in SYNC:
        raise ValueError(f"{VARIABLE}: sync={settings.sync}, allowed is {', '.join(SYNC)}")
    for fault in faults:
        if fault.device is not None and fault.device >= settings.devices:
            raise ValueError(f"{VARIABLE}: a fault of sim:{fault.device}, but devices={settings.devices}")
    return settings


def _devices(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= MOST_DEVICES:
        raise ValueError(f"{VARIABLE}: devices={value}, allowed is 1 to {MOST_DEVICES}")
    return int(value)


def _memory(value: str) -> int:
    found = re.fullmatch(r"([0-9]{1,15})(B|KiB|MiB|GiB)", value)
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if not 4096 <= size <= MOST_MEMORY:
        raise ValueError(f"{VARIABLE}: memory={value}, allowed is 4KiB to 1024GiB, such as 512MiB")
    return size // 4096 * 4096  # whole pages


def _fault(value: str) -> Fault:
    found = re.fullmatch(r"([a-z]+)@(?:sim:([0-9]{1,2})|(\w+)(?:::|\.)(\w+))(?:#([0-9]{1,12}))?", value)
    allowed = DEVICE_FAULTS if found and found[2] else OPERATOR_FAULTS
    if not found or found[1] not in allowed or found[5] == "0":
        raise ValueError(
            f"{VARIABLE}: fault={value}, allowed is {'|'.join(DEVICE_FAULTS)}@sim:INDEX[#N] and "
            f"{'|'.join(OPERATOR_FAULTS)}@NAMESPACE::OPERATOR[#N]"
        )
    device = int(found[2]) if found[2] else None
    operator = f"{found[3]}::{found[4]}" if device is None else None
    return Fault(found[1], device, operator, int(found[5] or 1))
