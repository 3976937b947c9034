"""Attention in blocks: what a constant mask hides is left out instead of being computed and masked.

A dense mask makes scaled_dot_product_attention compute every query against every key. Where the mask does not depend
on the inputs (windows, tiles, a causal triangle built by hand), the blocks that it leaves visible are known: queries
go to SDPA block by block, each with the few blocks of keys that it sees, all in one batched call of plain operations.
Measured here with a causal window of 128, 8 heads of 64 (two Zen 5 cores, milliseconds):

    tokens, type            SDPA with the mask   FlexAttention, compiled   in blocks
    1024, float32 / bf16         14.1 / 13.3                5.7 / 6.2       5.0 / 4.6
    2048, float32 / bf16         54.2 / 56.1              11.0 / 14.3       9.4 / 9.3
    4096, float32 / bf16         246 / 233                24.5 / 29.1     25.1 / 18.8

FlexAttention is therefore not offered: it is no faster on the CPU, runs under torch.compile only, and torch.export's
file format cannot hold it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchwright.core import nested
from torchwright.optimization.techniques.shared.wrapping import AttentionBy, plain_name
from torchwright.workloads.base import Case

BLOCKS = (32, 64, 128, 256)
"""Queries, and keys, that are computed or left out together."""
DENSE = 0.75
"""With more than this share of all products left to compute there is nothing to gain."""
HIDDEN = -1e9
"""An additive mask hides what it lowers by this much or more."""
MAKES_NEW = {
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
}
"""Functions that take only the shape, type and device of their argument."""
READS_VALUES = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"}


class CannotCall(Exception):
    """The model does not take this call."""


@dataclass(kw_only=True)
class Site:
    """A module that calls scaled_dot_product_attention itself, and the masks that it uses."""

    name: str
    module: nn.Module
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """(queries, keys) → boolean mask (queries, keys); True is what may be seen."""
    blocked: list[BlockedMask] = field(default_factory=list)
    """The masks in blocks; modules with equal masks share them."""
    reason: str | None = None
    """Why it is left alone, or None."""


class BlockedMask(nn.Module):
    """A constant mask (Q, K) as blocks: which blocks of keys each block of queries sees, and the mask within them.

    Buffers: `index`, the visible key blocks of all query blocks one after another, each query block padded with
    hidden ones to the same count; `mask_GQK`, (query blocks, 1, block, count * block).
    """

    index: torch.Tensor
    mask_GQK: torch.Tensor

    def __init__(self, mask_QK: torch.Tensor) -> None:
        super().__init__()
        self.Q, self.K = mask_QK.shape
        triangle = torch.ones(self.Q, self.K, dtype=torch.bool, device=mask_QK.device).tril()
        self.causal = self.Q == self.K and torch.equal(mask_QK, triangle)
        self.share = 0.5
        if self.causal:
            return
        self.block = min(BLOCKS, key=lambda block: _cost(mask_QK, block))
        tiles = _tiles(mask_QK, self.block)
        self.blocks, count = len(tiles), _count(tiles)
        order = tiles.flatten(2).any(-1).int().argsort(dim=1, descending=True, stable=True)[:, :count]
        chosen = tiles.gather(1, order[:, :, None, None].expand(-1, -1, self.block, self.block))
        mask_GQK = chosen.transpose(1, 2).reshape(self.blocks, 1, self.block, count * self.block)
        self.register_buffer("index", order.flatten().contiguous(), persistent=False)
        self.register_buffer("mask_GQK", mask_GQK.contiguous(), persistent=False)
        self.share = mask_GQK.numel() / mask_QK.numel()

    def attention(
        self,
        q_BHQD: torch.Tensor,
        k_BHKD: torch.Tensor,
        v_BHKD: torch.Tensor,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """Return scaled_dot_product_attention with this mask: (B, H, Q, D)."""
        if self.causal:
            return F.scaled_dot_product_attention(
                q_BHQD, k_BHKD, v_BHKD, is_causal=True, scale=scale, enable_gqa=enable_gqa
            )
        B, H = q_BHQD.shape[:2]
        # The query blocks are the batch, for which the mask differs; batch and heads share it and lie in one axis.
        y_GHQD = F.scaled_dot_product_attention(
            _blocks(q_BHQD, self.block).permute(2, 0, 1, 3, 4).flatten(1, 2),
            self._visible(k_BHKD),
            self._visible(v_BHKD),
            attn_mask=self.mask_GQK,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        y = y_GHQD.unflatten(1, (B, H)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return y if y.shape[2] == self.Q else y[:, :, : self.Q]

    def _visible(self, x_BHKD: torch.Tensor) -> torch.Tensor:
        """For every query block the keys, or values, that it sees: (query blocks, B * H, count * block, D)."""
        picked = _blocks(x_BHKD, self.block).index_select(2, self.index)
        return picked.unflatten(2, (self.blocks, -1)).flatten(3, 4).permute(2, 0, 1, 3, 4).flatten(1, 2)


class BlockedAttention(nn.Module):
    """Runs the inner module with its masked attention done in blocks. Other attributes are the inner module's."""

    masks: Any

    def __init__(self, inner: nn.Module, masks: Sequence[BlockedMask]) -> None:
        super().__init__()
        self.inner = inner
        self.masks = nn.ModuleList(masks)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with AttentionBy(self._attention):
            return self.inner(*args, **kwargs)

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        for mask in self.masks:
            if attn_mask is not None and query.shape[-2] == mask.Q and key.shape[-2] == mask.K:
                return mask.attention(query, key, value, scale, enable_gqa)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def find_sites(model: nn.Module, cases: Sequence[Case]) -> list[Site]:
    """Every module that calls scaled_dot_product_attention itself in any of the cases.

    Raises `CannotCall` when the model fails on one of them.
    """
    names = {module: plain_name(name) or "the model" for name, module in model.named_modules()}
    sites: dict[nn.Module, Site] = {}
    for case in cases:
        _watch(model, case, lambda module: sites.setdefault(module, Site(name=names[module], module=module)))
    known: list[tuple[torch.Tensor, BlockedMask]] = []
    for site in sites.values():
        if site.reason is None:
            site.blocked = [_shared(known, mask) for mask in site.masks.values()]
            share = sum(mask.share for mask in site.blocked) / len(site.blocked)
            if share > DENSE:
                site.reason = (
                    f"its mask leaves {share:.0%} to compute; up to {DENSE:.0%} there is something to gain"
                )
    return list(sites.values())


class _Watch(TorchFunctionMode):
    """Notes attention calls, and follows what is computed from the values of the inputs."""

    def __init__(self, inputs: Any, current: Callable[[], Site]) -> None:
        super().__init__()
        self.current = current
        self.derived: dict[int, weakref.ref[torch.Tensor]] = {}
        self.values_read = False
        self._derive(inputs)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = nested.tensors((args, kwargs))
        derived = any(self._is_derived(tensor) for tensor in tensors)
        if func is F.scaled_dot_product_attention:
            site = self.current()
            site.reason = site.reason or self._note(site, *args, **kwargs)
        result = func(*args, **kwargs)
        if derived and name not in MAKES_NEW:
            self.values_read = self.values_read or name in READS_VALUES
            self._derive(result)
            if name.endswith("_") or name == "__setitem__" or "out" in kwargs:
                self._derive(tensors)
        return result

    def _note(
        self,
        site: Site,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> str | None:
        """Keep this call's mask in `site`, or say why attention cannot be done in blocks."""
        if attn_mask is None:
            return "it has no mask"
        if self.values_read or self._is_derived(attn_mask):
            return "its mask depends on the inputs"
        if dropout_p:
            return f"it drops out {dropout_p:.0%} at random"
        if query.dim() != 4:
            return f"its queries have {query.dim()} axes, not (batch, heads, tokens, features)"
        mask = attn_mask
        if mask.dtype != torch.bool:
            mask = mask > HIDDEN
            if bool((attn_mask[mask] != 0).any()):
                return "its mask adds a bias"
        size = query.shape[-2], key.shape[-2]
        mask = mask.expand(*mask.shape[:-2], *size).reshape(-1, *size)
        if not bool((mask == mask[:1]).all()):
            return "its mask differs over the batch or the heads"
        mask_QK = mask[0]
        if not bool(mask_QK.any(-1).all()):
            return "its mask hides everything from some queries"
        if size in site.masks and not torch.equal(site.masks[size], mask_QK):
            return "it uses several masks of one size"
        site.masks[size] = mask_QK.clone()
        return None

    def _is_derived(self, tensor: torch.Tensor) -> bool:
        known = self.derived.get(id(tensor))
        return known is not None and known() is tensor

    def _derive(self, value: Any) -> None:
        for leaf in nested.leaves(value):
            if isinstance(leaf, torch.Tensor):
                self.derived[id(leaf)] = weakref.ref(leaf)


def _watch(model: nn.Module, case: Case, site: Callable[[nn.Module], Site]) -> None:
    """Run one case; every attention call is noted in the site of the innermost module that makes it."""
    stack: list[nn.Module] = []
    handles = []

    def enter(module: nn.Module, args: Any) -> None:
        stack.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with torch.no_grad(), _Watch((case.args, case.kwargs), lambda: site(stack[-1])):
            model(*case.args, **case.kwargs)
    except Exception as error:
        raise CannotCall(type(model).__name__) from error
    finally:
        for handle in handles:
            handle.remove()


def _shared(known: list[tuple[torch.Tensor, BlockedMask]], mask_QK: torch.Tensor) -> BlockedMask:
    """This mask in blocks; one that another module has already is used again."""
    for other_QK, blocked in known:
        if torch.equal(other_QK, mask_QK):
            return blocked
    known.append((mask_QK, BlockedMask(mask_QK)))
    return known[-1][1]


def _tiles(mask_QK: torch.Tensor, block: int) -> torch.Tensor:
    """The mask cut into (query blocks, key blocks, block, block), hidden where it is padded."""
    Q, K = mask_QK.shape
    padded = F.pad(mask_QK, (0, -K % block, 0, -Q % block))
    return padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2)


def _count(tiles: torch.Tensor) -> int:
    """The most key blocks that one block of queries sees."""
    return int(tiles.flatten(2).any(-1).sum(1).max())


def _cost(mask_QK: torch.Tensor, block: int) -> float:
    """Products to compute, dearer the smaller the pieces: fitted to windows of 32 to 512 among 512 to 2048 tokens."""
    tiles = _tiles(mask_QK, block)
    count = _count(tiles)
    return len(tiles) * count * block**2 * (1 + 0.5 * max(0, count - 2))


def _blocks(x_BHTD: torch.Tensor, block: int) -> torch.Tensor:
    """(B, H, T, D) as (B, H, blocks, block, D), padded with zeros."""
    missing = -x_BHTD.shape[2] % block
    return (F.pad(x_BHTD, (0, 0, 0, missing)) if missing else x_BHTD).unflatten(2, (-1, block))
