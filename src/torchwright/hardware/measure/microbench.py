"""Micro-benchmarks of the matrix kernels on a model's own shapes: what cannot pay is not tried.

Each kernel is timed on the (M, N, K) that the model's linear layers really see. It has as many copies of the weight as
the model has layers of that shape, up to an amount that no cache holds: decode then streams from where it will stream.
Weights are one number all over: no kernel's speed depends on them, and random ones of a large model take longer to make
than to multiply.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from torchwright.core.records import DeviceFacts

Shape = tuple[int, int, int]
"""(M rows, N outputs, K inputs)."""

ROTATE_BYTES = 96 * 2**20
BUDGET_SECONDS = 1.5
PRODUCTS, FEWEST_ROWS = 2**29, 256
"""A call is timed with so many multiplications a core, and as many rows at least; what more rows take goes with their
number. AST's, of 4,856 rows, took 4.5 of the 90 s of its search."""
INT4_GROUP = 64


class LinearCalls:
    """Counts a model's linear calls by their shape while its block runs.

    `calls` are those of one pass over the workload, each counted `repeat` times; `layers` are how many have a shape.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: Counter[Shape] = Counter()
        self.layers: Counter[Shape] = Counter()
        self.repeat = 1
        self._seen: set[tuple[int, Shape]] = set()
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        linears = [module for module in self._model.modules() if isinstance(module, nn.Linear)]
        self._handles = [module.register_forward_hook(self._count) for module in linears]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            return  # a subclass with a return value of its own: no kernel here would stand for it
        shape = (output.numel() // module.out_features, module.out_features, module.in_features)
        self.calls[shape] += self.repeat
        if (id(module), shape) not in self._seen:
            self._seen.add((id(module), shape))
            self.layers[shape] += 1


def linear_kernel_seconds(
    linears: LinearCalls,
    device: DeviceFacts,
    *,
    kernels: Mapping[str, Callable[[Shape], Callable[[], torch.Tensor]]] | None = None,
    timed: Callable[[Sequence[Callable[[], torch.Tensor]], float], float] | None = None,
) -> dict[str, float]:
    """Seconds that all linear layers of one pass take with each kernel: float32, bfloat16, float16, int8, int4.

    A kernel that cannot run one of the shapes is left out of the result, and so is every kernel off the CPU; float16,
    too, where its products are slower than those of float32, for which it is refused in any case. `kernels` makes the
    calls, and `timed` returns the median seconds of calls within a budget.
    """
    kernels, timed = kernels or KERNELS, timed or _median_seconds
    if device.kind != "cpu":
        return {}
    calls = linears.calls
    heavy = sorted(calls, key=lambda s: calls[s] * s[0] * s[1] * s[2], reverse=True)[:12]
    slot = BUDGET_SECONDS / max(1, len(heavy) * len(kernels))
    totals: dict[str, float] = {}
    for name, kernel in kernels.items():
        if name == "float16" and device.tflops.get(name, math.inf) < device.tflops.get("float32", 0.0):
            continue
        total = 0.0
        for shape in heavy:
            M, N, K = shape
            copies = max(1, min(linears.layers[shape], ROTATE_BYTES // (4 * N * K) + 1))
            rows = min(M, max(FEWEST_ROWS, PRODUCTS * device.cores // (N * K)))
            try:
                one = timed([kernel((rows, N, K)) for _ in range(copies)], slot)
                total += calls[shape] * one * M / rows
            except (RuntimeError, NotImplementedError, ValueError, AttributeError):
                break
        else:
            totals[name] = total
    return totals


def _float(dtype: torch.dtype) -> Callable[[Shape], Callable[[], torch.Tensor]]:
    def make(shape: Shape) -> Callable[[], torch.Tensor]:
        M, N, K = shape
        x_MK, w_NK = torch.full((M, K), 0.5, dtype=dtype), torch.full((N, K), 0.5, dtype=dtype)
        return lambda: nn.functional.linear(x_MK, w_NK)

    return make


def _int8(shape: Shape) -> Callable[[], torch.Tensor]:
    """oneDNN's int8 linear with the dynamic quantization of its input that comes with it."""
    M, N, K = shape
    x_MK = torch.full((M, K), 0.5)
    packed = torch.ops.onednn.qlinear_prepack(torch.full((N, K), 3, dtype=torch.int8), None)
    scale_N, zero_N = torch.full((N,), 0.01), torch.zeros(N, dtype=torch.int32)

    def run() -> torch.Tensor:
        q_MK = x_MK.mul(20.0).add_(128.0).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            q_MK, 0.05, 128, packed, scale_N, zero_N, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return run


def _int4(shape: Shape) -> Callable[[], torch.Tensor]:
    M, N, K = shape
    if K % INT4_GROUP or N % 16:
        raise ValueError("shape")
    x_MK = torch.full((M, K), 0.5, dtype=torch.bfloat16)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.full((N, K), 3, dtype=torch.int32), 2)
    scales = torch.full((K // INT4_GROUP, N, 2), 0.5, dtype=torch.bfloat16)
    return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK, packed, INT4_GROUP, scales)


KERNELS: dict[str, Callable[[Shape], Callable[[], torch.Tensor]]] = {
    "float32": _float(torch.float32),
    "bfloat16": _float(torch.bfloat16),
    "float16": _float(torch.float16),
    "int8": _int8,
    "int4": _int4,
}


def _median_seconds(calls: Sequence[Callable[[], torch.Tensor]], seconds: float) -> float:
    for call in calls[:2]:
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
