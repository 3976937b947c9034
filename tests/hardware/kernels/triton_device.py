"""Where the checks of Triton's kernels run: its interpreter if TRITON_INTERPRET=1, else a card.

`test_triton.py` starts both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchwright.hardware.kernels.gpu import operators

DEVICE = torch.device("cpu" if operators.INTERPRETED else "cuda")
assert operators.load_fault() is None, operators.load_fault()
ops: Any = torch.ops.torchwright_gpu


def _sum_in_float64() -> None:
    """Let the interpreter's `tl.dot` give a row the same bits whatever the tile's height, as a card's does.

    NumPy leaves it to a BLAS that sums in another order for other shapes (OpenBLAS on Zen 5: 32 rows and 64 differ).
    What the order does to sums in float64 does not reach float32.
    """
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def wide(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.data.dtype != np.float32:
            return dot(self, a, b, d, *rest)
        products = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = wide


if operators.INTERPRETED:
    _sum_in_float64()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """On a CPU whatever the device, so that a card sees the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def poison(x: torch.Tensor) -> None:
    """What `torch.empty` of this size is likely to return next holds NaN, so that an element not written is seen."""
    torch.full_like(x, torch.nan)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
