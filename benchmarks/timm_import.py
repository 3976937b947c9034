"""Import timm on a machine whose torchvision is missing or was built for another torch.

timm imports torchvision as it is imported, and its models need one class of it. torchvision's own package index has it
for CUDA, and beside a CPU build of torch its import ends with "operator torchvision::nms does not exist".
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch
from torch import nn

STUBS = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets")
"""Modules of torchvision that timm imports unconditionally."""
MODES = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
"""Members of its InterpolationMode."""
OPERATORS = ("nms(Tensor dets, Tensor scores, float threshold) -> Tensor", "qnms(Tensor dets) -> Tensor")
"""Operators that a torchvision without its library registers kernels for."""
_LIBRARIES: list[Any] = []
"""torch.library forgets the operators of a library that nothing holds."""


class _Stub(types.ModuleType):
    """A module that has every class one asks for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = sys.modules.get(f"{self.__name__}.{name}")
        return inner or type(name, (nn.Module,), {mode: mode for mode in MODES})


def import_timm() -> Any:
    """Return the module timm. Raises ImportError if timm itself is not installed."""
    try:
        _import_torchvision()
    except ImportError:
        sys.modules.update({f"torchvision{name}": _Stub(f"torchvision{name}") for name in STUBS})
        try:
            return importlib.import_module("timm")
        finally:
            _forget()  # others ask whether torchvision is installed
    return importlib.import_module("timm")


def _import_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # its library is for another torch, and has defined no operators
        _forget()
        library = torch.library.Library("torchvision", "DEF")
        for schema in OPERATORS:
            library.define(schema)
        _LIBRARIES.append(library)
        importlib.import_module("torchvision")


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
