"""The kernels as the decoder calls them: the compiled operators where they can run, else what `reference` says.

Compiled: float32 and bfloat16, by C++ on a CPU and by Triton on a GPU. float64, other devices and machines without a
C++ compiler or Triton take the plain PyTorch of `reference`, with the same results within rounding.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from torchwright.hardware.kernels import pack, recurrent, reference
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.gpu import pack as gpu_pack
from torchwright.hardware.kernels.limits import LANES, LARGEST_HEAD, LARGEST_HEAD_OF_GPUS

native: Any = torch.ops.torchwright
triton: Any = torch.ops.torchwright_gpu
FAST = (torch.float32, torch.bfloat16)
COMPILED: dict[str, Any] = {"cpu": build, "cuda": gpu}
"""Type of a torch device → the module that compiles its kernels."""


def fault(kind: str) -> str | None:
    """Why a kind of device has no kernels here, or None where they are ready; the first call may compile them."""
    if kind not in COMPILED:
        return f"they are for {' and '.join(COMPILED)}; this device is {kind}"
    return COMPILED[kind].load_fault()


def on(device: torch.device, dtype: torch.dtype) -> Any:
    """The operators that take tensors of this type on this device, or None where `reference` has to."""
    if dtype not in FAST:
        return None
    if device.type == "cpu" and not gpu.INTERPRETED:  # asked for every operator of a decode step
        return native if build.load_fault() is None else None
    return triton if gpu.takes(device) and gpu.load_fault() is None else None


def layout(*, for_gpu: bool) -> ModuleType:
    """Return the module that packs weights: `pack_bf16`, `unpack_bf16` and so on."""
    return gpu_pack if for_gpu else pack


def fast(x: torch.Tensor) -> bool:
    """Check whether compiled kernels take this tensor."""
    return on(x.device, x.dtype) is not None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`."""
    return (on(x.device, x.dtype) or reference).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`."""
    return (on(x.device, x.dtype) or reference).add_rms_norm(x, residual, weight, eps)


def gated(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See `reference.gated`."""
    kernels = on(gate_up.device, gate_up.dtype)
    return (_of_cpus(kernels) if kind == "clamped_swiglu" else kernels or reference).gated(gate_up, kind)


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """See `reference.activate`."""
    return _of_cpus(on(x.device, x.dtype)).activate(x, kind)


def route(score_TX: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.route`."""
    return _of_cpus(on(score_TX.device, score_TX.dtype)).route(score_TX, *args)


def rope_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *args: Any,
) -> torch.Tensor:
    """See `reference.rope_store`."""
    kernels = _paged(qkv, v_pages.shape[-2 if v_pages.dim() == reference.PAIRED else -1])
    kv_heads = args[3]
    return (kernels if kv_heads else _of_cpus(kernels)).rope_store(
        qkv, cos, sin, positions_T, slots_T, k_pages, v_pages, *args
    )


def paged_attention(
    q_THD: torch.Tensor,
    *args: Any,
    causal: bool = True,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.paged_attention`."""
    kernels = _paged(q_THD, q_THD.shape[-1])
    if causal and bias is None and sinks is None:
        return kernels.paged_attention(q_THD, *args)
    return _of_cpus(kernels).paged_attention(q_THD, *args, causal=causal, bias=bias, sinks=sinks)


def varlen_attention(qkv_NF: torch.Tensor, *args: Any) -> torch.Tensor:
    """See `reference.varlen_attention`."""
    return _of_cpus(on(qkv_NF.device, qkv_NF.dtype)).varlen_attention(qkv_NF, *args)


def short_conv(x_TC: torch.Tensor, *args: Any) -> torch.Tensor:
    """See `recurrent.short_conv`."""
    return _recurrent(x_TC).short_conv(x_TC, *args)


def gated_delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
    """See `recurrent.gated_delta`."""
    return _recurrent(q, args[4].shape[-1]).gated_delta(q, k, v, *args)


def selective_scan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
    """See `recurrent.selective_scan`."""
    return _recurrent(q, args[4].shape[-1]).selective_scan(q, k, v, *args)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gate_first: bool = False
) -> torch.Tensor:
    """See `recurrent.gated_norm`."""
    return _recurrent(x, weight.shape[-1]).gated_norm(x, gate, weight, eps, gate_first)


def _recurrent(x: torch.Tensor, size: int = LANES) -> Any:
    """The compiled kernels of recurrent layers, which CPUs have, or the reference."""
    return native if on(x.device, x.dtype) is native and size % LANES == 0 else recurrent


def _of_cpus(kernels: Any) -> Any:
    """Kernels that have what those for GPUs lack so far, or the reference."""
    return reference if kernels is None or kernels is triton else kernels


def _paged(x: torch.Tensor, head_size: int) -> Any:
    kernels = on(x.device, x.dtype)
    if kernels is None:
        return reference
    if kernels is native:
        return reference if head_size % LANES or head_size > LARGEST_HEAD else native
    return reference if head_size > LARGEST_HEAD_OF_GPUS else kernels
