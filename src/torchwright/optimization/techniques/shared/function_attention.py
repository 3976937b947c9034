"""Every call of attention in a model, given to FlexAttention with the user's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from torchwright.optimization.techniques.shared.wrapping import AttentionBy

NAMES = ("score_mod", "mask_mod")
"""FlexAttention's names for the user's functions."""
Modification = Callable[..., torch.Tensor]
"""Called with (score,) batch, head, query, key."""


class FunctionAttention(nn.Module):
    """Runs the inner module with functions in the place of every mask: blocks that they hide are left out."""

    def __init__(self, inner: nn.Module, functions: dict[str, Modification]) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0
        self.score, self.mask = (functions.get(name) for name in NAMES)
        self._blocks: dict[tuple[int, int, str], BlockMask] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls = 0
        with AttentionBy(self._attend):
            return self.inner(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        self.calls += 1
        blocks = self._block_mask(query.shape[-2], key.shape[-2], query.device.type)
        output: Any = flex_attention(
            query, key, value, self.score, blocks, scale=scale, enable_gqa=enable_gqa
        )
        return output

    def _block_mask(self, T: int, S: int, device: str) -> BlockMask | None:
        if self.mask is None:
            return None
        if (T, S, device) not in self._blocks:
            self._blocks[T, S, device] = create_block_mask(self.mask, None, None, T, S, device=device)
        return self._blocks[T, S, device]
