"""Stand-in for torchvision with the names that timm imports; nothing in it computes anything."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn

MODULES = ("ops", "ops.misc", "transforms", "transforms.functional", "datasets")
MODES = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
"""Members of its InterpolationMode."""


class _StandIn(types.ModuleType):
    """Module in which every public name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {mode: mode for mode in MODES})


for _name in MODULES:
    _module = _StandIn(f"{__name__}.{_name}")
    _module.__path__ = []
    sys.modules[_module.__name__] = _module
    _outer, _, _own = _module.__name__.rpartition(".")
    setattr(sys.modules[_outer], _own, _module)
