"""The backend: importing this module makes `torch.device("abacus")` work, and this module is `torch.abacus`.

backend.cpp is compiled at the first import and kept by torch.utils.cpp_extension; a vendor ships it built.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load

NAME = "abacus"
load(name="abacus_backend", sources=[str(Path(__file__).with_suffix(".cpp"))], is_python_module=False)
_native: Any = torch.ops.abacus


# Functions that PyTorch asks for


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def manual_seed_all(seed: int) -> None:
    """Do nothing: numbers are drawn on the CPU, whose generator has its own seed."""


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Do nothing: see `manual_seed_all`."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Do nothing: no driver has to be started."""


# Functions that Torchwright asks for


def get_device_name(device: Any = None) -> str:
    return "an abacus"


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return free and total memory in bytes: an abacus has a gigabyte."""
    total = 1 << 30
    return total - _native.held(), total


def synchronize(device: Any = None) -> None:
    """Do nothing: an operator returns when it is done."""


def max_memory_allocated(device: Any = None) -> int:
    return _native.peak()


def reset_peak_memory_stats(device: Any = None) -> None:
    _native.reset_peak()


torch.utils.rename_privateuse1_backend(NAME)  # pyright: ignore[reportPrivateImportUsage]
torch._register_device_module(NAME, sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend()  # pyright: ignore[reportPrivateImportUsage]
