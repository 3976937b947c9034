"""Short causal convolutions over whole sequences, each channel with its own taps."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F


class Taps(nn.Module):
    """Weights (C, W) of a convolution, the one of a token itself last; a part of the channels works as well."""

    def __init__(self, channels: int, width: int, *, bias: bool, silu: bool) -> None:
        super().__init__()
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x_BTC: torch.Tensor, documents_BT: torch.Tensor | None = None) -> torch.Tensor:
        bias_C = None if self.bias is None else own(self.bias)
        out_BTC = convolve(x_BTC, own(self.weight), bias_C, documents_BT)
        return F.silu(out_BTC) if self.silu else out_BTC


def convolve(
    x_BTC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    documents_BT: torch.Tensor | None,
) -> torch.Tensor:
    """Each token and those before it in its document, weighted and summed in float32 or better.

    A tap is a product of the padded sequence from another place: nothing else of the input is kept for it.
    """
    T, past = x_BTC.shape[1], weight_CW.shape[1] - 1
    exact = torch.promote_types(x_BTC.dtype, torch.float32)
    padded_BTC, weight_CW = F.pad(x_BTC, (0, 0, past, 0)), weight_CW.to(exact)
    places_T = torch.arange(T, device=x_BTC.device)
    out_BTC = padded_BTC[:, past:] * weight_CW[:, past]
    for back in range(1, past + 1):
        tap_BTC = padded_BTC[:, past - back : past - back + T] * weight_CW[:, past - back]
        if documents_BT is not None:
            tap_BTC = tap_BTC.masked_fill((places_T - back < documents_BT)[..., None], 0)
        out_BTC = out_BTC + tap_BTC
    out_BTC = out_BTC if bias_C is None else out_BTC + bias_C
    return out_BTC.to(x_BTC.dtype)


def own(parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of a parameter.

    Of one that all processes have whole, each gives the gradient of its own use; these are summed.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    placements = [Partial() if place.is_replicate() else place for place in parameter.placements]
    return parameter.to_local(grad_placements=placements)
