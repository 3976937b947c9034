"""Achieved rates against the machine's own, as `torchwright doctor` measures them."""

from __future__ import annotations

from torchwright.core.records import DeviceFacts
from torchwright.optimization.profile.values import Rate

ABOVE_CEILING = 1.1
"""No operator computes faster than the machine: from here on the ceiling was measured too low."""


def rate(
    operations: float | None, bytes: float | None, seconds: float, dtype: str, device: DeviceFacts
) -> Rate:
    """Return the rate achieved in `seconds`, next to the machine's rate that it comes closest to.

    Few rows against many weights are bound by bytes, many rows by operations: the larger share says which it is.
    """
    gflops = operations / seconds / 1e9 if operations else None
    gb_per_s = bytes / seconds / 1e9 if bytes else None
    tflops = device.tflops.get(dtype)
    by_operations = gflops / (tflops * 1e3) if gflops and tflops else 0.0
    if by_operations > ABOVE_CEILING:
        by_operations = 0.0
    by_bytes = gb_per_s / device.read_gb_per_s if gb_per_s and device.read_gb_per_s else 0.0
    share = max(by_operations, by_bytes)
    return Rate(
        gflops=gflops,
        gb_per_s=gb_per_s,
        dtype=dtype,
        bound_by=None if share == 0.0 else "bytes" if by_bytes >= by_operations else "operations",
        share=share or None,
    )
