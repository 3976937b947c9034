# pyright: basic
"""The dependencies of compiled code: versions, the processor, flags, paths."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu.build import BuildError, find_compiler

NAMES = {
    "isa": "the processor's instructions",
    "threads": "threads",
    "compiler": "the C++ compiler",
    "libraries": "where torch lies",
}
"""Printed names of fields."""


@dataclass(frozen=True, kw_only=True)
class BuildEnvironment:
    """A machine and its versions, as far as compiled code depends on them."""

    torch: str
    python: str
    system: str
    isa: tuple[str, ...]
    threads: int
    compiler: str
    libraries: str
    """torch's folder: the C++ compiler's command names it, and objects are found by their command."""
    flags: dict[str, str]
    """Inductor's settings, but for its private ones, as Python writes them."""


def place_here() -> BuildEnvironment:
    """This machine, and Inductor's settings as they are now."""
    import torch._inductor.config as inductor

    settings = inductor.save_config_portable(ignore_private_configs=True)
    return BuildEnvironment(
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        isa=tuple(sorted(get_device("cpu").identify().isa)),
        threads=torch.get_num_threads(),
        compiler=_compiler(),
        libraries=str(Path(torch.__file__).parent),
        flags={name: repr(value) for name, value in sorted(settings.items())},
    )


def differences(there: BuildEnvironment, here: BuildEnvironment) -> list[str]:
    """Return the differences here, each as a line."""
    found = []
    for name in (field.name for field in fields(BuildEnvironment)):
        then, now = getattr(there, name), getattr(here, name)
        if name == "flags":
            found += _flags(then, now)
        elif name == "isa":
            if missing := sorted(set(then) - set(now)):
                found.append(f"{NAMES[name]}: {', '.join(missing)} there, not here")
            if more := sorted(set(now) - set(then)):
                found.append(f"{NAMES[name]}: {', '.join(more)} here, not there")
        elif then != now:
            found.append(f"{NAMES.get(name, name)}: {then} there, {now} here")
    return found


def _flags(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    return [
        f"the flag {name}: {there.get(name, 'none')} there, {here.get(name, 'none')} here" for name in names
    ]


def _compiler() -> str:
    """Return the compiler that Inductor calls, and its version; "none" if there is none."""
    try:
        command = os.environ.get("CXX") or find_compiler()
        said = subprocess.run(
            [command, "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=20,
            check=True,
        )
    except (BuildError, OSError, subprocess.SubprocessError):
        return "none"
    return said.stdout.splitlines()[0]
