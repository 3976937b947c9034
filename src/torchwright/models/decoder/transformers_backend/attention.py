"""Attention of transformers' models over the paged cache.

transformers lets a model be given another attention function, and another function that makes its masks
(`AttentionInterface`, `AttentionMaskInterface`). Those of `PagedAttentionFunctions` write the new tokens' keys and
values into pages and attend over all of each sequence's pages. So a model takes the tokens of many sequences in one
row, one sequence after the other.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels.limits import LANES, LARGEST_HEAD
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.pages import LayerPages, PageShape

MASK_PROBES = 4
"""A mask is looked at as far as this many windows, which is beyond every border that a window or a chunk has."""
UNREAD = ("cache_position", "logits_to_keep", "position_ids")
"""Tensors that some models hand on to attention, which does not read them: the keys are turned already."""
_numbers = itertools.count()


class CannotPage(Exception):
    """A model's attention cannot run over pages; the text says why."""


@dataclass(frozen=True)
class Pass:
    """One forward call: its tokens, and each attention call's pages."""

    batch: Batch
    layers: list[LayerPages]


class PagedAttentionFunctions:
    """One model's attention and mask functions, under a name of their own in transformers' tables.

    The n-th attention call of a pass has the n-th pages: a layer that is called twice has two.
    """

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        self.name = f"torchwright_paged_{next(_numbers)}"
        self.shapes: list[PageShape] = []
        """The page shape of each attention call; filled by the first pass, which has no pages."""
        self._pass: Pass | None = None
        self._calls = 0
        self._masks: dict[int, tuple[torch.Tensor, int]] = {}
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._mask)
        weakref.finalize(model, _unregister, self.name)

    def begin(self, work: Pass | None) -> None:
        """Start a forward call; None is the one that finds the shapes."""
        self._pass, self._calls = work, 0
        if work is None:
            self.shapes.clear()

    def finish(self) -> None:
        """End a forward call; raises `CannotPage` where it attended more or fewer times than the first."""
        self._pass = None
        if not self.shapes:
            raise CannotPage(
                "its class has an attention of its own, which transformers does not let be replaced"
            )
        if self._calls != len(self.shapes):
            raise CannotPage(f"it attends {self._calls} times a pass, at first {len(self.shapes)} times")

    def _mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        *,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return a mask without content that `_attend` knows by its storage; the pages have the lengths."""
        window = window_of(mask_function, local_size)
        known = next((mask for mask, width in self._masks.values() if width == window), None)
        if known is None:
            known = torch.ones(1, dtype=torch.bool)
            self._masks[known.untyped_storage().data_ptr()] = known, window
        return known.expand(batch_size, 1, q_length, kv_length)

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention (1, T, H, D) of queries (1, H, T, D) to their sequences' keys and values (1, K, T, D)."""
        # Beside a mask, `is_causal` only says that the mask is not to be made by the kernel.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is None and not causal:
            raise CannotPage("its attention is not causal")
        if position_bias is not None:
            raise CannotPage("it adds a bias to attention scores")
        # Such as the keys that an indexer has chosen, which for a short text are all of them.
        unknown = [
            name for name, given in others.items() if isinstance(given, torch.Tensor) and name not in UNREAD
        ]
        if unknown:
            raise CannotPage(f"its attention also depends on '{unknown[0]}'")
        place, self._calls = self._calls, self._calls + 1
        if self._pass is None:
            self.shapes.append(_shape(query, key, value))
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
        if place >= len(self._pass.layers) or key.shape[2] != query.shape[2]:
            raise CannotPage("its attention has other keys than its tokens'")
        window = self._window(attention_mask, sliding_window)
        pages, batch = self._pass.layers[place], self._pass.batch
        _store(key, value, batch, pages)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        out_THD = ops.paged_attention(
            _padded(query, pages).contiguous(),
            *pages.tensors,
            batch.block_tables_BP,
            batch.query_starts,
            batch.context_lens_B,
            scale,
            window,
            softcap or 0.0,
            sinks=_floats(s_aux if sinks is None else sinks),
        )
        return out_THD[None, ..., : value.shape[-1]].to(value.dtype), None

    def _window(self, mask: torch.Tensor | None, sliding_window: int | None) -> int:
        """Return the width of the sliding window, 0 for full attention."""
        if mask is None:
            return sliding_window or 0
        known = self._masks.get(mask.untyped_storage().data_ptr())
        if known is None:
            raise CannotPage("it makes attention masks of its own")
        return known[1]


def window_of(mask_function: Callable[..., Any], local_size: int | None) -> int:
    """Return the sliding window of a mask function of transformers, 0 for a causal mask.

    The function is asked for pairs of positions around the window's borders. Raises `CannotPage` for any other mask.
    """
    width = 1 if local_size is None else int(local_size)
    near = sorted({max(0, n * width + step) for n in range(MASK_PROBES + 1) for step in (-1, 0, 1)})
    query, key = torch.tensor(near)[:, None], torch.tensor(near)[None, :]
    zero = torch.tensor(0)
    try:
        seen = torch.as_tensor(mask_function(zero, zero, query, key)).expand(len(near), len(near))
    except Exception as error:  # it may read what a cache or a padding would give it
        raise CannotPage("its attention mask depends on more than positions") from error
    causal = key <= query
    if torch.equal(seen, causal):
        return 0
    if local_size is not None and torch.equal(seen, causal & (query - key < width)):
        return width
    raise CannotPage("its attention mask is neither causal nor a sliding window")


def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> PageShape:
    """Return the pages' shape for one attention call; heads are padded to what the kernels take."""
    largest = max(key.shape[-1], value.shape[-1])
    size = -(-largest // LANES) * LANES
    if query.dim() != 4 or len(query) != 1 or query.shape[1] % key.shape[1] or size > LARGEST_HEAD:
        raise CannotPage(f"its heads are {list(query.shape)} over {list(key.shape)}")
    return PageShape(key.shape[1], size)


def _floats(sinks: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None else sinks.float().flatten().contiguous()


def _padded(x: torch.Tensor, pages: LayerPages) -> torch.Tensor:
    """(1, H, T, D) as (T, H, the pages' head size), zeros behind."""
    return F.pad(x[0].transpose(0, 1), (0, pages.head_dim - x.shape[-1]))


def _store(key: torch.Tensor, value: torch.Tensor, batch: Batch, pages: LayerPages) -> None:
    """Write the tokens' keys and values into their slots, without a rotation: the model has rotated them."""
    kv_T = torch.cat([_padded(key, pages), _padded(value, pages)], dim=1).flatten(1)
    none = torch.zeros(1, 0, device=kv_T.device)
    rows_T = torch.zeros_like(batch.slots_T)
    ops.rope_store(kv_T, none, none, rows_T, batch.slots_T, *pages.tensors, 0, key.shape[1], None, None, 0.0)


def _unregister(name: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)
