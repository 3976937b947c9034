"""Low-rank matrices in the order in which the kernels read them (`csrc/low_rank_ops.cpp`).

A   (ranks / 16, input features / 2, 16, 2) bfloat16
B   blocks of 16 output features, each (pairs of ranks, 16, 2) bfloat16: the ranks of its segment alone
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from torchwright.hardware.kernels.pack import BLOCK

Segment = tuple[int, int, int]
"""The output feature behind a run of them, the first rank that it reads, and how many ranks, an even number."""


def pack_low_rank(
    a_RK: torch.Tensor, b_NR: torch.Tensor, segments: Sequence[Segment]
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return A, B and the segments as `Adapter.add` takes them; every segment but the last ends at a whole block."""
    a = F.pad(a_RK.bfloat16(), (0, a_RK.shape[1] % 2, 0, -len(a_RK) % BLOCK))
    a = a.view(len(a) // BLOCK, BLOCK, -1, 2).transpose(1, 2).contiguous()
    blocks, runs, begin = list[torch.Tensor](), list[int](), 0
    for end, first, ranks in segments:
        part = F.pad(b_NR[begin:end, first : first + ranks].bfloat16(), (0, 0, 0, (begin - end) % BLOCK))
        blocks.append(part.reshape(len(part) // BLOCK, BLOCK, ranks // 2, 2).transpose(1, 2).flatten())
        runs += [-(-end // BLOCK), first, ranks // 2]
        begin = end
    return a, torch.cat(blocks), runs
