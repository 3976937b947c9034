"""Where the checks of Triton's kernels run: its interpreter if TRITON_INTERPRET=1, else a card.

`test_triton.py` starts both.
"""

from __future__ import annotations

from typing import Any

import torch

from torchwright.kernels.gpu import operators

DEVICE = torch.device("cpu" if operators.INTERPRETED else "cuda")
assert operators.load() is None, operators.load()
ops: Any = torch.ops.torchwright_gpu


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """On a CPU whatever the device, so that a card sees the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def poison(x: torch.Tensor) -> None:
    """What `torch.empty` of this size is likely to return next holds NaN, so that an element not written is seen."""
    torch.full_like(x, torch.nan)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
