"""The operators of `torch.ops.torchwright_gpu`: those of the C++ by name and schema, checked, on Triton's kernels.

`load_fault` registers them on first use. In Triton's interpreter (TRITON_INTERPRET=1, set before the process starts)
they take tensors on a CPU as well, in the place of the C++: that is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchwright.core.paths import UnsafeFolder, cache_folder, private_folder
from torchwright.hardware.kernels import fake

NAMESPACE = "torchwright_gpu"
CACHE_VARIABLE = "TRITON_CACHE_DIR"
SCHEMAS = {
    "linear_bf16": "(Tensor x, Tensor weight, Tensor? bias, int features) -> Tensor",
    "linear_w8a8": "(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int features) -> Tensor",
    "linear_w4a8": "(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int features, int group_size) -> Tensor",
    "linear_w4a16": "(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int features, int group_size) -> Tensor",
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "norm": "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centered) -> (Tensor, Tensor, Tensor)",
    "norm_backward": (
        "(Tensor grad, Tensor x, Tensor mean, Tensor inverse, Tensor? weight, bool[3] wanted) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "gated": "(Tensor x, str kind) -> Tensor",
    "rope_store": (
        "(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor slots, Tensor(a!) k_pages, "
        "Tensor(b!) v_pages, Tensor(c!)? k_scale, Tensor(d!)? v_scale, int heads, int kv_heads, Tensor? q_norm, "
        "Tensor? k_norm, float eps) -> Tensor"
    ),
    "paged_attention": (
        "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor? k_scale, Tensor? v_scale, Tensor block_tables, "
        "Tensor query_starts, Tensor context_lens, float scale, int window, float soft_cap, "
        "bool causal=True, Tensor? bias=None, Tensor? sinks=None) -> Tensor"
    ),
    "grid_attention": "(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor columns, float scale) -> Tensor",
}

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton's kernels run in its interpreter, which takes tensors on a CPU; Triton also reads this once."""

_outcome: list[str | None] = []
"""The result of the first `load_fault`; a plain list, as in `build.py`."""
_library: list[torch.library.Library] = []
"""Operators are there as long as this is."""


def takes(device: torch.device) -> bool:
    """Check whether a model on this device is laid out for these operators."""
    return device.type == "cuda" or (device.type == "cpu" and INTERPRETED)


def load_fault() -> str | None:
    """Register the operators: the fault that prevented it, or None. Importing this file imports no Triton."""
    if not _outcome:
        _outcome.append(_attempt())
    return _outcome[0]


def _attempt() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; CUDA builds of PyTorch bring it, `pip install triton` where one does not"
    try:
        _use_private_cache()
    except (UnsafeFolder, OSError) as error:
        return f"Triton has no folder for compiled kernels: {error}"
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, function in _functions().items():
        library.define(name + SCHEMAS[name])
        for key in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
            library.impl(name, _on_its_device(function), key)
    fake.register(NAMESPACE)
    _library.append(library)
    return None


def _use_private_cache() -> None:
    """Make Triton load compiled kernels, which are code, from a folder that only this user can write to.

    A folder that the user chose is kept. The other is where Inductor keeps its kernels for the first GPU, so that
    both find the same folder whichever comes first.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    folder = Path(chosen) if chosen else cache_folder() / "inductor" / "triton" / "0"
    os.environ[CACHE_VARIABLE] = str(private_folder(folder))


def _functions() -> dict[str, Callable[..., Any]]:
    from torchwright.hardware.kernels.gpu import attention, grid, linear, norm, pointwise

    modules = (linear, pointwise, norm, attention, grid)
    return {name: next(getattr(m, name) for m in modules if hasattr(m, name)) for name in SCHEMAS}


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which need not be that of the tensors."""

    @functools.wraps(function)
    def launch(x: torch.Tensor, *args: Any) -> Any:
        with torch.cuda.device_of(x):
            return function(x, *args)

    return launch
