"""A small run that keeps what a run file divides, rounds and repeats: each kind of layer, each branch, real degrees."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchwright.models.decoder.config import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    LayerShape,
    Mixer,
    ShortConvConfig,
)
from torchwright.models.decoder.rope import Rope
from torchwright.train.layout import Layout
from torchwright.train.run.config import run as runs

STEPS = 3
ROWS, TOKENS = 8, 16
"""The least rows of a step and tokens of a row."""
WINDOW = 5
"""Wider than one token, narrower than half a sequence, and no divisor of its parts."""
HEAD, MODEL, FEED_FORWARD, EXPERT, VOCABULARY = 8, 24, 20, 12, 66
INPUT = 48
"""Numbers of a layer's own input of a token: of few numbers, a product is almost nothing for some tokens, and a norm
follows it.
"""
BLOCK_MODEL, BLOCK_VOCABULARY = 64, 512
"""Sizes for a run that rounds in blocks: sides that float8 and MX formats take, parameters long enough for 8-bit
moments.
"""
CLIP = 0.5
"""Small enough that gradients are clipped."""
LR, EPS = 0.005, 1e-4
"""A large eps: gradients that are zero but for rounding must not become steps of full size."""


NORM_EPS = 0.01
"""The eps of norms in a model with normed mixers: a head that has read one token gives next to nothing, and its norm
would make large numbers of what float32 has rounded.
"""
BIAS_RATE = 0.05
"""Large enough that a bias sends tokens elsewhere in the next step."""


@dataclass(frozen=True, kw_only=True)
class Small:
    """The small model that is trained in place of a run's."""

    run: runs.Run
    config: DecoderConfig


def shrink(run: runs.Run, full: DecoderConfig, layout: Layout) -> Small:
    """Return `run` at a few kilobytes in `layout`, which is its own or a part of it.

    Compilation, recomputation, micro-batches, precision, clipping and the kind of optimizer stay; learning rate and eps
    become such that every gradient is seen in the weights, and the rate falls from step to step.
    """
    tokens = _tokens(layout)
    unit = layout.batch_ways * run.micro_batches
    rows = unit * -(-ROWS // unit)
    chosen = run.optimizer
    small = run.model_copy(
        update={
            "tokens": STEPS * rows * tokens,
            "batch_tokens": rows * tokens,
            "context": tokens,
            "clip": None if run.clip is None else CLIP,
            "layout": {axis: degree for axis, degree in vars(layout).items() if degree > 1},
            "model": runs.Model(config={}),
            "optimizer": chosen.model_copy(update={"lr": LR, "eps": EPS}),
            "schedule": runs.Schedule(name="wsd", decay_fraction=1.0),
            "experts": _shrink_experts(run),
            # A part of the layout may hold every matrix whole.
            "gather": run.gather if layout.dp_shard * layout.cp > 1 else None,
        }
    )
    return Small(run=small, config=_shrink_config(full, run, layout, tokens))


def _tokens(layout: Layout) -> int:
    """Return the least length of a row whose parts over cp and tp are whole, those of cp in two equal pieces."""
    unit = 2 * layout.cp * layout.tp
    return unit * -(-max(TOKENS, 2 * unit) // unit)


def rounds(run: runs.Run) -> bool:
    """Check whether anything in the run is rounded below float32."""
    return run.precision != "fp32" or run.qat is not None or run.optimizer.name != "adamw"


def exact(run: runs.Run) -> runs.Run:
    """The run without what it rounds, to be computed in float64."""
    update: dict[str, object] = {"precision": "fp32", "gather": None, "qat": None}
    if run.optimizer.name in runs.FEW_BITS:
        update["optimizer"] = run.optimizer.model_copy(update={"name": "adamw"})
    return run.model_copy(update=update)


def _shrink_config(full: DecoderConfig, run: runs.Run, layout: Layout, tokens: int) -> DecoderConfig:
    """The model's family; heads divide by tp as they did, and by cp or not as they did.

    So the same way of context parallelism is proved. A vocabulary that tp does not divide stays one.
    """
    layers = _kinds(full, layout.pp * run.pipeline.stages if layout.pp > 1 else 1)
    blocks = (
        run.precision not in ("fp32", "bf16") or run.qat is not None or run.optimizer.name in runs.FEW_BITS
    )
    model = BLOCK_MODEL if blocks else MODEL
    if isinstance(full.mixer, ShortConvConfig):  # whose channels tp divides
        model = math.lcm(model, layout.tp * (BLOCK_MODEL // 2 if blocks else 1))
    full_kv_heads = full.expanded_kv_heads
    ring = layout.cp > 1 and full.kv_heads_of(run.parallel.tp) % run.parallel.cp != 0
    kv_heads = layout.tp if ring else layout.tp * layout.cp
    if full_kv_heads > 1 and kv_heads == 1 and not ring:
        kv_heads = 2
    heads = kv_heads * min(full.heads // full_kv_heads, 2)
    repeats = full.heads % run.parallel.tp == 0 and full_kv_heads % run.parallel.tp != 0
    if repeats and layout.tp > 1:  # several processes have the same head, here as well
        kv_heads = max(1, layout.tp * full_kv_heads // run.parallel.tp)
        heads = layout.tp * min(full.heads // run.parallel.tp, 2)
    head = BLOCK_MODEL // math.gcd(BLOCK_MODEL, heads) if blocks else HEAD
    block = BLOCK_MODEL
    if blocks and layout.tp > 1:  # each process's part is of whole blocks
        head, block = BLOCK_MODEL // 2, layout.tp * BLOCK_MODEL // 2
    latent = None if full.latent is None else _shrink_latent(full.latent, BLOCK_MODEL if blocks else head)
    turned = full.head_dim if full.latent is None else full.latent.turned
    small = latent.turned if latent else head
    ropes = tuple(None if rope is None else _shrink_rope(rope, turned, small, tokens) for rope in full.ropes)
    width = math.lcm(block if blocks else EXPERT, layout.tp)
    experts = full.experts and _shrink_mixture(full.experts, layout, width, every=rounds(run))
    sizes = (head, head) if latent is None else (latent.rank + latent.turned, latent.plain + latent.turned)
    head_dim, expanded = sizes
    scale = full.scale * (full.expanded_head_dim / expanded) ** 0.5
    if full.qk_norm in (
        "head",
        "rotated",
    ):  # of random norms: Gemma 4's scale of 1 would make every softmax a choice of one key
        scale = min(scale, expanded**-0.5)
    vocabulary = math.lcm(BLOCK_VOCABULARY if blocks else VOCABULARY, layout.tp)
    vocabulary += full.vocabulary % run.parallel.tp != 0
    inner = math.lcm(block if blocks else FEED_FORWARD, layout.tp)
    inputs = full.layer_inputs
    if inputs is not None:
        width = 0 if inputs.width == 0 else BLOCK_MODEL if blocks else INPUT
        inputs = replace(inputs, width=width, vocabulary=vocabulary)
    usual = LayerShape(kv_heads=kv_heads, head_dim=head_dim, feed_forward=inner)
    return replace(
        full,
        vocabulary=vocabulary,
        layer_inputs=inputs,
        shapes=tuple(
            _shrink_shape(full, full.shapes[layer], usual, heads) for layer in layers if full.shapes
        ),
        reads=_shrink_reads(full, layers) if full.reads else (),
        model=model,
        layers=len(layers),
        heads=heads,
        kv_heads=kv_heads if latent is None else 1,
        head_dim=head_dim,
        latent=latent,
        feed_forward=inner,
        context=2 * tokens,
        ropes=tuple(ropes[layer] for layer in layers),
        windows=tuple(WINDOW if full.windows[layer] else 0 for layer in layers),
        sparse=tuple(full.sparse[layer] for layer in layers),
        recurrent=tuple(full.recurrent[layer] for layer in layers) if full.recurrent else (),
        eps=full.eps if full.mixer is None or isinstance(full.mixer, ShortConvConfig) else NORM_EPS,
        mixer=full.mixer and _shrink_mixer(full.mixer, layout, BLOCK_MODEL // 2 if blocks else HEAD),
        experts=experts,
        scale=scale,
        embedding_scale=1.0
        if full.embedding_scale == 1
        else full.embedding_scale * (model / full.model) ** 0.5,
        # Low enough for the small model's values to reach them.
        clip_qkv=None if full.clip_qkv is None else 1.0,
        attention_soft_cap=min(full.attention_soft_cap, 2.0),
        logit_soft_cap=min(full.logit_soft_cap, 5.0),
    )


def _shrink_shape(full: DecoderConfig, shape: LayerShape, usual: LayerShape, heads: int) -> LayerShape:
    """A layer's sizes: as many times the usual ones as they were; keys of all heads where they were of more."""
    kv_heads = heads if shape.kv_heads > full.expanded_kv_heads else usual.kv_heads
    return replace(
        shape,
        kv_heads=kv_heads if shape.kv_heads else 0,
        head_dim=usual.head_dim * shape.head_dim // full.head_dim,
        feed_forward=usual.feed_forward * shape.feed_forward // full.feed_forward,
    )


def _shrink_reads(full: DecoderConfig, layers: list[int]) -> tuple[int, ...]:
    """Each layer reads its own keys, or those of the last one before it of the same window that has any."""
    found: list[int] = []
    for place, layer in enumerate(layers):
        if full.shapes[layer].kv_heads:
            found.append(place)
            continue
        alike = [other for other in range(place) if full.windows[layers[other]] == full.windows[layer]]
        found.append(max(other for other in alike if full.shapes[layers[other]].kv_heads))
    return tuple(found)


def _shrink_latent(full: LatentConfig, head: int) -> LatentConfig:
    """Every part as large as a head: values stay smaller than queries, which have a part that turns and one that does
    not."""
    rank = None if full.query_rank is None else head
    return replace(full, rank=head, query_rank=rank, plain=head, turned=head, value=head)


def _shrink_mixer(full: Mixer, layout: Layout, head: int) -> Mixer:
    """Two groups of heads with the same keys for each process, if there are several, and two heads in each.

    One group that processes divide stays one.
    """
    if isinstance(full, ShortConvConfig):
        return full
    if full.key_heads == 1:
        heads = layout.tp * min(full.heads // layout.tp, 2)
        return replace(full, heads=heads, key_dim=head, head_dim=head)
    groups = layout.tp * min(full.key_heads // layout.tp, 2)
    heads = groups * min(full.heads // full.key_heads, 2)
    return replace(full, key_heads=groups, heads=heads, key_dim=head, head_dim=head)


def _shrink_mixture(full: ExpertsConfig, layout: Layout, width: int, *, every: bool) -> ExpertsConfig:
    """A few experts, in two groups where there are groups; each token goes to `every` one of them, or to two.

    Rounding would turn choices, each of which is an error of no size that it has itself.
    """
    count = math.lcm(4, layout.ep)
    grouped = full.chosen_groups < full.groups and not every
    return replace(
        full,
        count=count,
        chosen=count if every else min(full.chosen, 2),
        feed_forward=width,
        groups=2 if grouped else 1,
        chosen_groups=1,
        shared=width if full.shared else 0,
    )


def _shrink_experts(run: runs.Run) -> runs.Experts | None:
    if run.experts is None:
        return None
    # DeepEP is for cards; the arrangement of tokens is the same.
    here = run.experts.model_copy(update={"dispatch": "all_to_all"})
    return here.model_copy(update={"bias_rate": BIAS_RATE}) if here.balance == "bias" else here


def _kinds(config: DecoderConfig, stages: int) -> list[int]:
    """One layer of each kind, at least two layers: the first must not be the only one that receives gradients.

    Of a pipeline, at least a layer for each stage.
    """
    first: dict[tuple[object, ...], int] = {}
    for layer in range(config.layers):
        recurrent = bool(config.recurrent) and config.recurrent[layer]
        sizes = config.shapes[layer] if config.shapes else None
        kind = (config.ropes[layer], config.windows[layer] > 0, config.sparse[layer], recurrent, sizes)
        first.setdefault(kind, layer)
    layers = sorted(first.values())
    times = -(-max(2, stages) // len(layers))
    return layers * times


def _shrink_rope(rope: Rope, head_dim: int, head: int, tokens: int) -> Rope:
    rotated = max(2, 2 * round(head * rope.rotated / head_dim / 2))
    return replace(
        rope,
        rotated=rotated,
        original=tokens // 2,
        short_factor=rope.short_factor[: rotated // 2],
        long_factor=rope.long_factor[: rotated // 2],
    )
