"""GPTQ: rounding a weight's input features one after another, each making up for the errors of those before it."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from torchwright.hardware.kernels import pack

DAMPING = 0.01
"""Share of the mean of the moments' diagonal that is added to it: it bounds features that calibration hardly saw."""


def gptq_w4(
    weight_NK: torch.Tensor, group_size: int, moments_KK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `pack.quantize_w4` does, with the least error of the layer's output instead of its weights.

    `moments_KK` are the means of products of input features over calibration data. Scales come from the weights as they
    were; each group's multipliers from what earlier errors have made of it (Frantar et al., 2023).
    """
    N, K = weight_NK.shape
    missing = -K % group_size
    wide = F.pad(weight_NK.float(), (0, missing)).clone()
    moments = F.pad(moments_KK.float(), (0, missing, 0, missing))
    importance = moments.diagonal().clone()
    upper = influence(moments.double(), DAMPING)
    scale_N = pack.row_scale(wide, group_size)
    integers, multipliers = torch.empty_like(wide), []
    for begin in range(0, wide.shape[1], group_size):
        end = begin + group_size
        chosen = pack.best_multipliers(wide[:, None, begin:end], importance[begin:end], scale_N)
        multipliers.append(chosen[:, 0])
        step_N = scale_N * chosen[:, 0]
        errors = torch.empty(N, group_size)
        for k in range(begin, end):
            integers[:, k] = torch.round(wide[:, k] / step_N).clamp_(-8, 7)
            errors[:, k - begin] = (wide[:, k] - integers[:, k] * step_N) / upper[k, k]
            wide[:, k + 1 : end] -= errors[:, k - begin, None] * upper[k, k + 1 : end]
        wide[:, end:] -= errors @ upper[begin:end, end:]
    return integers[:, :K].to(torch.int8), torch.stack(multipliers, 1).to(torch.int8), scale_N


def influence(moments: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse: row k corrects later features for an error.

    `moments` are (..., K, K), in the type to factorize them in. `damping` times the mean of their diagonal is added to
    it.
    """
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)
    identity = torch.eye(moments.shape[-1], dtype=moments.dtype)
    damped = moments + damping * mean[..., None, None] * identity
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
