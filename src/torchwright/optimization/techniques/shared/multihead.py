"""nn.MultiheadAttention as linear layers around scaled_dot_product_attention, which techniques can see and change.

torch's module keeps three projections in one parameter and hands all weights to a function (in inference to one fused
operator), so that its linear layers are never called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.core.layer_types import deviation
from torchwright.optimization.techniques.shared.wrapping import linear_of, named, replace_module


def separate_heads(model: nn.Module) -> dict[str, str]:
    """Replace every nn.MultiheadAttention in `model`; returns the names of those left alone, and why."""
    left: dict[str, str] = {}
    for name, module in list(named(model, nn.MultiheadAttention)):
        if reason := _reason(module):
            left[name] = reason
        else:
            replace_module(model, module, SeparateHeads(module))
    return left


def _reason(module: Any) -> str | None:
    if reason := deviation(module, (nn.MultiheadAttention,)):
        return reason
    if module.bias_k is not None or module.add_zero_attn:
        return "it attends to keys that are not in its inputs"
    return None


class SeparateHeads(nn.Module):
    """Computes an nn.MultiheadAttention in eval mode, with the same signature.

    Its layers `q`, `k`, `v` and `out` are ordinary linear layers; those of one input are joined again in the graph.
    """

    in_proj_bias = None
    """torch's encoder layers read it: without one they leave their fused operator, which would not call the layers."""

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.batch_first = original.num_heads, original.batch_first
        weights = original.in_proj_weight
        weights = (
            (original.q_proj_weight, original.k_proj_weight, original.v_proj_weight)
            if weights is None
            else weights.chunk(3)
        )
        bias = original.in_proj_bias
        biases = (None, None, None) if bias is None else bias.chunk(3)
        self.q, self.k, self.v = map(linear_of, weights, biases)
        self.out = linear_of(original.out_proj.weight, original.out_proj.bias)
        self.train(original.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query (B, T, E) with `batch_first`, (T, B, E) without, or (T, E); key and value alike, over S tokens.

        Raises `ValueError` for `is_causal` without a mask, as torch does.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask, and there is none")
        batched = query.dim() == 3
        q_BHTD, k_BHSD, v_BHSD = (
            self._heads(layer(x), batched) for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _merged(attn_mask, key_padding_mask, q_BHTD, k_BHSD)
        weights = None
        if need_weights:
            scores = q_BHTD @ k_BHSD.transpose(-1, -2) * q_BHTD.shape[-1] ** -0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            y_BHTD = weights @ v_BHSD
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            y_BHTD = nn.functional.scaled_dot_product_attention(
                q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, is_causal=causal
            )
        y = y_BHTD.transpose(1, 2).flatten(2)
        if not batched:
            y = y.squeeze(0)
        elif not self.batch_first:
            y = y.transpose(0, 1)
        return self.out(y), weights

    def _heads(self, x: torch.Tensor, batched: bool) -> torch.Tensor:
        """(B, H, T, D) of a projection's output."""
        if not batched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _merged(
    attn_mask: torch.Tensor | None, padding: torch.Tensor | None, q_BHTD: torch.Tensor, k_BHSD: torch.Tensor
) -> torch.Tensor | None:
    """Return the bias of the scores, (B or 1, H or 1, T or 1, S): both masks in torch's form, where True hides."""
    B, H, S = *q_BHTD.shape[:2], k_BHSD.shape[2]
    parts = []
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (B, H))
        parts.append(_added(mask, q_BHTD.dtype))
    if padding is not None:
        parts.append(_added(padding.view(B, 1, 1, S), q_BHTD.dtype))
    if len(parts) == 2:
        return parts[0] + parts[1]
    return parts[0] if parts else None


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
