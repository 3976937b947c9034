"""A step as one operator: a decoder's layers over one cache, told to the kernels once.

Results are to the bit those of the layers' own calls, because both run the same kernels on the same rows in the same
order. What a layer lacks for that its `unplanned` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchwright.decoder.batch import Batch
from torchwright.decoder.cache import PagedCache
from torchwright.decoder.config import DecoderConfig
from torchwright.decoder.layers import Layer, Turn
from torchwright.kernels import ops
from torchwright.kernels.limits import LANES

MOST_ROWS = 64
"""Tokens of a step that takes the plan: more spend their time in products, and a plan keeps memory for its rows."""


class DecodePlan:
    """The layers of a decoder over one cache, and what the kernels were told of them."""

    def __init__(
        self,
        modules: nn.ModuleList,
        turns: Sequence[int],
        norm_E: torch.Tensor,
        config: DecoderConfig,
        dtype: torch.dtype,
        cache: PagedCache,
    ) -> None:
        """`turns` are the layers' places among the turns of a step; `dtype` is that of the residual stream."""
        self._modules = modules
        layers = [cast(Layer, module) for module in modules]
        self._linears = [place for layer in layers for place in layer.linears()]
        self._hooks = [
            hooks for part in modules.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]
        self.unplanned = _unplanned(layers, config, dtype, cache.device)
        """Why these layers cannot run as one operator, None where they can."""
        if self.unplanned is None:
            made: Any = torch.classes.torchwright.DecodePlan
            cap, silu = config.attention_soft_cap, config.activation == "silu"
            self.native = made(config.heads, config.scale, cap, silu, config.eps, norm_E)
            for layer, turn, pages in zip(layers, turns, cache.layers, strict=True):
                layer.plan(self.native, turn, pages)

    def holds(self, modules: nn.ModuleList) -> bool:
        """Whether these are its layers, as they were when it was made: a technique may have put others in their
        place."""
        return modules is self._modules and all(
            owner.get(name) is linear for owner, name, linear in self._linears
        )

    @property
    def watched(self) -> bool:
        """Whether somebody wants to see what a part of a layer is given, which the operator does not show."""
        return any(self._hooks)

    def __call__(self, stream_TE: torch.Tensor, turns: Iterable[Turn], batch: Batch) -> torch.Tensor:
        """Hidden states (T, E) after the final norm."""
        return self.native.step(
            stream_TE,
            [tensor for turn in turns for tensor in turn],
            batch.slots_T,
            batch.block_tables_BP,
            batch.query_starts,
            batch.context_lens_B,
        )


plans: WeakKeyDictionary[PagedCache, DecodePlan] = WeakKeyDictionary()
"""Of every cache that a step was computed over. Beside the caches, so that a copy of one has a plan of its own."""


def _unplanned(
    layers: Sequence[Layer], config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    if ops.on(device, dtype) is not ops.native:
        return f"there are no compiled kernels for {dtype} on {device.type}"
    if config.head_dim % LANES:
        return f"heads of {config.head_dim} dimensions, which the compiled attention does not take"
    return next((layer.unplanned for layer in layers if layer.unplanned), None)
