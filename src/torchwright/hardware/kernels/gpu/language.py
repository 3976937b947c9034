"""Shared parts of the kernels: conversions, rounding, products of tiles.

Triton's interpreter keeps bfloat16 as the bits of an integer, truncates where a GPU rounds to nearest, and multiplies
the bits in `tl.dot`. Here it is given the operations on bits that a GPU has as instructions.
"""

# Kernels are compiled by Triton, not run by Python: a type checker knows neither tiles nor launches.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter, on NumPy."""


@triton.jit
def convert(x, dtype: tl.constexpr):
    """x (int8, bfloat16 or float32) as bfloat16 or float32; to the nearest, halves to even."""
    if x.dtype == dtype:
        y = x
    elif not INTERPRETED:
        y = x.to(tl.float32).to(dtype)
    elif x.dtype == tl.bfloat16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif dtype == tl.float32:
        y = x.to(tl.float32)
    else:
        wide = x.to(tl.float32)
        bits = wide.to(tl.uint32, bitcast=True)
        nearest = tl.where(wide == wide, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        y = (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def dot(a, b, total):
    """total + a · b of two tiles of one type: bfloat16 or float32 to float32, int8 to int32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = convert(a, tl.float32)
        b = convert(b, tl.float32)
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def round_even(x):
    """The nearest whole number, halves to even, of float32 within ±2²²; NaN becomes 0."""
    # Numbers of 2²³ and more have no fractional bits. Compilers may not fold the pair of sums.
    rounded = (x + 12582912.0) - 12582912.0
    return tl.where(rounded == rounded, rounded, 0.0)


@triton.jit
def step_inverse(peak):
    """127 / peak, and 0 where that overflows, as `reference.steps` has it."""
    usable = peak > 127 * 1e-38
    return tl.where(usable, tl.div_rn(127.0, tl.where(usable, peak, 1.0)), 0.0)
