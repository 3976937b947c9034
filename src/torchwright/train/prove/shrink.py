"""A small model that keeps what a layout divides: each degree at most two, every kind of layer, every branch."""

from __future__ import annotations

from dataclasses import asdict, replace

from torchwright.decoder.config import DecoderConfig
from torchwright.decoder.rope import Rope
from torchwright.train.layout import Layout

TOKENS = 16
ROWS = 8
"""The batch: divisible by every pair and triple of degrees of two, and by dp_replicate · dp_shard of three."""
WINDOW = 5
"""Wider than one token, narrower than half a sequence, and no divisor of its parts."""
HEAD = 8
MODEL = 24


def shrink_layout(layout: Layout) -> Layout:
    """Every degree above one at two."""
    return Layout.from_degrees({axis: min(degree, 2) for axis, degree in asdict(layout).items()})


def shrink_config(config: DecoderConfig, layout: Layout) -> DecoderConfig:
    """The model's family at a few kilobytes.

    `layout` is the full one: key-value heads divide by tp as they did, and by cp or not as they did, so that the same
    way of context parallelism is proved; a vocabulary that tp does not divide stays one.
    """
    layers = _kinds(config)
    tp, cp = min(layout.tp, 2), min(layout.cp, 2)
    ring = config.kv_heads // layout.tp % layout.cp != 0
    kv_heads = tp if ring else tp * cp
    if config.kv_heads > 1 and kv_heads == 1 and not ring:
        kv_heads = 2
    groups = min(config.groups, 2)
    heads = kv_heads * groups
    ropes = tuple(None if rope is None else _shrink_rope(rope, config.head_dim) for rope in config.ropes)
    experts = config.experts
    if experts is not None:
        experts = replace(experts, count=4, chosen=min(experts.chosen, 2), feed_forward=12)
    return replace(
        config,
        vocabulary=66 if config.vocabulary % layout.tp == 0 else 67,
        model=MODEL,
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD,
        feed_forward=20,
        context=2 * TOKENS,
        ropes=tuple(ropes[layer] for layer in layers),
        windows=tuple(WINDOW if config.windows[layer] else 0 for layer in layers),
        sparse=tuple(config.sparse[layer] for layer in layers),
        experts=experts,
        scale=config.scale * (config.head_dim / HEAD) ** 0.5,
        embedding_scale=1.0
        if config.embedding_scale == 1
        else config.embedding_scale * (MODEL / config.model) ** 0.5,
        # Low enough for the small model's values to reach them.
        clip_qkv=None if config.clip_qkv is None else 1.0,
        attention_soft_cap=min(config.attention_soft_cap, 2.0),
        logit_soft_cap=min(config.logit_soft_cap, 5.0),
    )


def _kinds(config: DecoderConfig) -> list[int]:
    """One layer of each kind, at least two layers: the first must not be the only one that receives gradients."""
    first: dict[tuple[object, ...], int] = {}
    for layer in range(config.layers):
        kind = (config.ropes[layer], config.windows[layer] > 0, config.sparse[layer])
        first.setdefault(kind, layer)
    layers = sorted(first.values())
    return layers if len(layers) > 1 else [layers[0], layers[0]]


def _shrink_rope(rope: Rope, head_dim: int) -> Rope:
    rotated = max(2, 2 * round(HEAD * rope.rotated / head_dim / 2))
    return replace(
        rope,
        rotated=rotated,
        original=TOKENS // 2,
        short_factor=rope.short_factor[: rotated // 2],
        long_factor=rope.long_factor[: rotated // 2],
    )
