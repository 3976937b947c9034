"""Registers the devices with PyTorch: the name at once, the compiled part if it is there, else at the first use."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import torch

from torchwright_sim import NAME, build, settings

SPARE = "privateuseone"
"""PyTorch's own name for the one place that it has for a backend of another package."""

_starting = threading.RLock()
_started: list[settings.Settings] = []
_failed: list[str] = []


def register() -> None:
    """Name the devices, and start them where nothing has to be compiled for that. No process is started."""
    taken: Any = torch._C._get_privateuse1_backend_name()
    if taken not in (SPARE, NAME):
        raise RuntimeError(f"PyTorch has room for one backend of another package, and '{taken}' has taken it")
    module = importlib.import_module("torchwright_sim.module")
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    utils.generate_methods_for_privateuse1_backend(for_storage=True)
    settings.read()  # with a mistake there the name is known, and the first use says what it is
    if build.library(build=False) is not None:
        start()


def start() -> settings.Settings:
    """Load the compiled part, which is built where it was not yet, and have PyTorch's operators reach the devices."""
    with _starting:
        if _started:
            return _started[0]
        if _failed:  # some operators may be registered, which cannot be undone
            raise RuntimeError(f"the simulated devices could not be started: {_failed[0]}")
        chosen = settings.read()
        library = build.library()
        try:
            _load(str(library), chosen)
        except Exception as error:
            _failed.append(f"{type(error).__name__}: {error}")
            raise
        _started.append(chosen)
        importlib.import_module("torchwright_sim.module").started()
        return chosen


def _load(library: str, chosen: settings.Settings) -> None:
    torch.ops.load_library(library)
    torch.ops.sim._start(chosen.devices, chosen.memory)
    from torchwright_sim import driver, faults, kernels

    driver.start(chosen)
    kernels.register()
    faults.start(chosen)


def is_started() -> bool:
    """Check whether the compiled part is loaded."""
    return bool(_started)
