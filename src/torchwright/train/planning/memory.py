"""Memory of one device at the peak of a training step, part by part.

Parameters, gradients and optimizer state are float32 and sharded (FSDP2); a layer's parameters are gathered in the
activations' type, one layer ahead, and its gradients are reduced in float32. Which moment is the peak depends on the
batch: the loss, the backward pass of the last layer, or the end of it, when the gradients of the embedding and of the
output layer are reduced together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torchwright.train.layout import Layout
from torchwright.train.planning.activations import Activations
from torchwright.train.planning.job import OPTIMIZER_BYTES, Job, Plan
from torchwright.train.planning.shape import Kind, LayerParameters, Shape, Stage

LOSS_BYTES = 12
"""Of one logit in the loss's backward pass, eager: log-probabilities, the gradients before and behind them, in float32.

Compiled, it holds logits and their gradients in the activations' type.
"""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device, at the moment when they are the most, on the pipeline stage that needs the most."""

    moment: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from forward to backward, and those of the layer at hand."""
    logits: float
    gathered: float
    """Parameters of the layers at hand, whole."""
    reducing: float
    """Gradients of the layers at hand, whole, and their copies on the way to the others."""

    @property
    def parts(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "moment"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def held(parameters: LayerParameters, layout: Layout) -> float:
    """Parameters of a layer that one device computes with once they are gathered."""
    divided = (parameters.attention + parameters.feed_forward) / layout.tp
    return divided + parameters.replicated + parameters.experts / (layout.tp * layout.ep)


def owned(parameters: LayerParameters, layout: Layout) -> float:
    """Parameters of a layer that one device keeps."""
    divided = (parameters.attention + parameters.feed_forward + parameters.experts) / layout.tp
    # ep divides an expert's ways by as much as it divides the experts.
    return (divided + parameters.replicated) / (layout.dp_shard * layout.cp)


def peak_memory(shape: Shape, job: Job, plan: Plan, *, fused_norms: bool = True) -> Memory:
    """The memory of the stage that needs the most, at the moment when it does."""
    moments = (
        moment
        for stage in shape.stages(plan.layout.pp)
        for moment in _moments(shape, job, plan, stage, fused_norms)
    )
    return max(moments, key=lambda memory: memory.total)


def _moments(shape: Shape, job: Job, plan: Plan, stage: Stage, fused_norms: bool) -> list[Memory]:
    layout, width, ways = plan.layout, job.width, plan.layout.dp_shard * plan.layout.cp
    per_layer = {kind: shape.layer(kind) for kind, _ in stage.layers}
    layer = max(held(parameters, layout) for parameters in per_layer.values())
    whole = sum(held(per_layer[kind], layout) * count for kind, count in stage.layers)
    ends = _ends(shape, stage) / layout.tp
    mine = sum(owned(per_layer[kind], layout) * count for kind, count in stage.layers) + ends / ways
    tokens = plan.tokens(job)
    # However the batch is split into replicas and shards, a device keeps as much of it.
    same = Plan(
        layout=Layout(pp=layout.pp, cp=layout.cp, tp=layout.tp),
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        recompute=plan.recompute,
        interleave=plan.interleave,
    )
    keeps, most = _activations(shape, job, same, stage, fused_norms)
    per_logit = 2 * width if job.compile else LOSS_BYTES
    logits = per_logit * shape.config.vocabulary / layout.tp * tokens if stage.heads else 0.0
    states = {"parameters": 4 * mine, "optimizer": OPTIMIZER_BYTES[job.optimizer] * mine}
    # Gradients of the micro-batches before; in the first they only come about.
    before = 4 * mine if plan.micro_batches > 1 else 0.0

    if layout.pp > 1:
        # Stages stay gathered, and collect whole gradients in float32 until their last micro-batch.
        stays = {"gathered": width * (whole + ends), "reducing": 4 * (whole + ends), "gradients": 0.0}
        return [
            Memory(moment="loss", activations=keeps, logits=logits, **stays, **states),
            Memory(moment="backward", activations=keeps + most, logits=0.0, **stays, **states),
        ]
    head = (
        shape.embedding / layout.tp
    )  # the output layer's gradient comes first and waits for the embedding's
    return [
        Memory(
            moment="loss",
            activations=keeps,
            logits=logits,
            gathered=width * ends,
            reducing=0.0,
            gradients=before,
            **states,
        ),
        Memory(
            moment="backward",
            activations=keeps + most,
            logits=0.0,
            gathered=width * (2 * layer + ends),
            reducing=(width + 4) * layer + width * head,
            gradients=before,
            **states,
        ),
        Memory(
            moment="end of backward",
            activations=width * shape.config.model / layout.tp * tokens,
            logits=0.0,
            gathered=width * (layer + ends),
            reducing=(width + 4) * (layer + ends),
            gradients=4 * mine,
            **states,
        ),
    ]


def _ends(shape: Shape, stage: Stage) -> int:
    """Parameters of embedding, final norm and output layer that the stage has."""
    if stage.embeds and stage.heads:
        return shape.embedding + shape.head + shape.config.model
    if stage.heads:
        return shape.embedding + shape.config.model  # a tied table is held at both ends
    return shape.embedding if stage.embeds else 0


@functools.lru_cache(maxsize=10_000)
def _activations(shape: Shape, job: Job, plan: Plan, stage: Stage, fused_norms: bool) -> tuple[float, float]:
    """Bytes kept by all layers, and the most that one layer's backward pass adds."""
    per_token = Activations(shape, job, plan.layout, fused_norms=fused_norms)
    tokens = plan.tokens(job)
    # One forward, one backward (1F1B): a stage holds as many micro-batches as there are stages from it to the end.
    in_flight = min(plan.micro_batches, plan.layout.pp - stage.index)
    if plan.interleave > 1:
        in_flight *= 1 + (plan.layout.pp - 1) / (plan.layout.pp * plan.interleave)
    keeps = (
        sum(per_token.kept(kind, plan.recompute) * count for kind, count in stage.layers) * tokens * in_flight
    )
    if stage.heads:
        keeps += per_token.final() * tokens

    def adds(kind: Kind) -> float:
        again = 0.0
        if plan.recompute == "full":
            again = per_token.whole(kind)
        elif plan.recompute == "selective":  # what was kept is used, not made again
            again = max(0.0, per_token.whole(kind) - per_token.kept(kind, "selective"))
        return (again + per_token.passing(kind)) * tokens

    return keeps, max(adds(kind) for kind, _ in stage.layers)
