"""Import timm on a machine whose torchvision is missing or was built for another torch.

timm imports torchvision as it is imported, and its models need one of its classes. torchvision's own package index
has it for CUDA; next to a CPU build of torch its import ends with "operator torchvision::nms does not exist".
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

STAND_INS = str(Path(__file__).resolve().parent / "stand_ins")


def import_timm() -> Any:
    """Return the module timm. Raises ImportError if timm itself is not installed.

    A stand-in for torchvision stays on sys.path, which the processes of a search take over: they import timm too.
    """
    if STAND_INS not in sys.path and not _torchvision_works():
        sys.path.insert(1, STAND_INS)
    return importlib.import_module("timm")


def _torchvision_works() -> bool:
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # missing, or its library is for another torch
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return False
    return True
