"""Memory of one device at the peak of a training step, part by part.

Parameters, gradients and optimizer state are float32 and sharded (FSDP2). A layer's parameters are gathered in the
activations' dtype, one layer ahead, the embedding's in float32, and gradients are reduced in float32. A single
process gathers nothing, and keeps the copies that autocast makes of its parameters. The batch decides where the peak
is: the loss, the backward pass of the last layer, or the end of the pass. There the gradients of the embedding and of
the output layer are reduced together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torchwright.train.layout import Layout
from torchwright.train.planning.activations import Activations
from torchwright.train.planning.job import OPTIMIZER_BYTES, Job, LayoutPlan
from torchwright.train.shape import Kind, LayerParameters, Shape, Stage

LOSS_BYTES = 12
"""Bytes of one logit in the loss's backward pass, eager: log-probabilities and the gradients before and after them,
in float32.

Compiled, it holds logits and their gradients in the activations' type.
"""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device, at the moment when they are the most, on the pipeline stage that needs the most."""

    moment: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Activations kept from forward to backward, and those of the current layer."""
    logits: float
    gathered: float
    """Parameters of the current layers, whole."""
    reducing: float
    """Gradients of the current layers, whole, and their copies on the way to the other processes."""

    @property
    def parts(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "moment"}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def held(parameters: LayerParameters, layout: Layout) -> float:
    """Parameters of a layer that one device computes with once they are gathered."""
    divided = (parameters.attention + parameters.feed_forward) / layout.tp
    undivided = parameters.whole + parameters.replicated
    return divided + undivided + parameters.experts / (layout.tp * layout.ep)


def gathered(parameters: LayerParameters, layout: Layout, job: Job) -> float:
    """Bytes of a layer's parameters on one device, once they are gathered."""
    if job.precision != "float8_tensorwise":  # what was rounded by rows for its way is written out behind it
        return job.width * held(parameters, layout)
    return arriving(parameters, layout, job)


def arriving(parameters: LayerParameters, layout: Layout, job: Job) -> float:
    """Bytes of a layer's parameters on their way to a device that gathers them, without the scales of rows."""
    whole = job.width * held(parameters, layout)
    if job.gather is None:
        return whole
    matrices = (parameters.attention + parameters.feed_forward - parameters.biases) / layout.tp
    return whole - (job.width - 1) * matrices


def owned(parameters: LayerParameters, layout: Layout) -> float:
    """Parameters of a layer that one device keeps."""
    divided = (parameters.attention + parameters.feed_forward + parameters.experts) / layout.tp
    # ep divides an expert's ways by as much as it divides the experts.
    return (divided + parameters.whole + parameters.replicated) / (layout.dp_shard * layout.cp)


def peak_memory(shape: Shape, job: Job, plan: LayoutPlan, *, fused: bool = True) -> DeviceMemory:
    """The memory of the stage that needs the most, at the moment when it does."""
    moments = (
        moment
        for stage in shape.stages(plan.layout.pp)
        for moment in _moments(shape, job, plan, stage, fused)
    )
    return max(moments, key=lambda memory: memory.total)


def _moments(shape: Shape, job: Job, plan: LayoutPlan, stage: Stage, fused: bool) -> list[DeviceMemory]:
    layout, width = plan.layout, job.width
    per_layer = {kind: shape.layer(kind) for kind, _ in stage.layers}
    layer = max(held(parameters, layout) for parameters in per_layer.values())
    whole = sum(held(per_layer[kind], layout) * count for kind, count in stage.layers)
    arrived = {kind: gathered(parameters, layout, job) for kind, parameters in per_layer.items()}
    ends = Ends.of(shape, stage, layout, width)
    mine = owned_by(shape, stage, layout)
    tokens = plan.tokens(job)
    # A device keeps the same share of the batch, however it is split into replicas and shards.
    same = LayoutPlan(
        layout=Layout(dp_shard=layout.ep, pp=layout.pp, cp=layout.cp, tp=layout.tp, ep=layout.ep),
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        recompute=plan.recompute,
        interleave=plan.interleave,
    )
    keeps, most = _activations(shape, job, same, stage, fused)
    per_logit = 2 * width if job.fused_loss else LOSS_BYTES
    logits = per_logit * shape.config.vocabulary / layout.tp * tokens if stage.heads else 0.0
    states = {"parameters": 4 * mine, "optimizer": OPTIMIZER_BYTES[job.optimizer] * mine}
    # Gradients of the micro-batches before; in the first they only come about.
    before = 4 * mine if plan.micro_batches > 1 else 0.0

    if layout.processes == 1:
        copies = width * (whole + ends.parameters) if width < 4 else 0.0
        return [
            DeviceMemory(
                moment=moment,
                activations=held_back,
                logits=logits_now,
                gathered=copies,
                reducing=width * layer,
                gradients=gradients,
                **states,
            )
            for moment, held_back, logits_now, gradients in (
                ("loss", keeps, logits, before),
                ("backward", keeps + most, 0.0, max(before, 4 * shape.embedding)),
                ("end of backward", width * shape.config.model * tokens, 0.0, 4 * mine),
            )
        ]
    if layout.pp > 1:
        # Stages stay gathered, and collect whole gradients in float32 until their last micro-batch.
        stays = {
            "gathered": sum(arrived[kind] * count for kind, count in stage.layers) + ends.gathered,
            "reducing": 4 * (whole + ends.parameters),
            "gradients": 0.0,
        }
        return [
            DeviceMemory(moment="loss", activations=keeps, logits=logits, **stays, **states),
            DeviceMemory(moment="backward", activations=keeps + most, logits=0.0, **stays, **states),
        ]
    return [
        DeviceMemory(
            moment="loss",
            activations=keeps,
            logits=logits,
            gathered=ends.gathered,
            reducing=0.0,
            gradients=before,
            **states,
        ),
        DeviceMemory(
            moment="backward",
            activations=keeps + most,
            logits=0.0,
            gathered=2 * max(arrived.values()) + ends.gathered,
            reducing=(width + 4) * layer + ends.first_gradient,
            gradients=before,
            **states,
        ),
        DeviceMemory(
            moment="end of backward",
            activations=width * shape.config.model / layout.tp * tokens,
            logits=0.0,
            gathered=ends.embedding,
            reducing=ends.reducing,
            gradients=4 * mine,
            **states,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Bytes of the embedding and the output layer of a stage while they are whole."""

    parameters: float
    """The number of parameters, not bytes."""
    embedding: float
    """The embedding's, in float32; that of a tied output layer."""
    gathered: float
    """Both, and of a tied output layer the copy that autocast makes."""
    first_gradient: float
    """The output layer's gradient, which comes first and waits for the embedding's."""
    reducing: float
    """Both gradients and what is sent of them; a tied table's is added up from two."""

    @classmethod
    def of(cls, shape: Shape, stage: Stage, layout: Layout, width: int) -> Ends:
        tied_here = stage.heads and shape.config.tied
        table = shape.embedding / layout.tp if stage.embeds or tied_here else 0.0
        head = shape.head / layout.tp if stage.heads else 0.0
        copied = width * table if tied_here and width < 4 else 0.0
        inputs = (
            shape.input_table / layout.tp + (shape.token_inputs - shape.input_table) if stage.embeds else 0.0
        )
        return cls(
            parameters=table + head + inputs + (shape.config.model if stage.heads else 0),
            embedding=4 * (table + inputs),
            gathered=4 * (table + inputs) + width * head + copied,
            first_gradient=4 * table if tied_here else width * head,
            reducing=(12 if tied_here else 8) * table + 4 * head + 8 * inputs,
        )


def owned_by(shape: Shape, stage: Stage, layout: Layout) -> float:
    """Parameters of a stage that one device keeps."""
    layers = sum(owned(shape.layer(kind), layout) * count for kind, count in stage.layers)
    return layers + Ends.of(shape, stage, layout, 4).parameters / (layout.dp_shard * layout.cp)


@functools.lru_cache(maxsize=10_000)
def _activations(shape: Shape, job: Job, plan: LayoutPlan, stage: Stage, fused: bool) -> tuple[float, float]:
    """Bytes kept by all layers, and the most that one layer's backward pass adds."""
    per_token = {kind: Activations(shape.of(kind), job, plan.layout, fused=fused) for kind, _ in stage.layers}
    tokens = plan.tokens(job)
    # One forward, one backward (1F1B): a stage holds as many micro-batches as there are stages from it to the end.
    in_flight = min(plan.micro_batches, plan.layout.pp - stage.index)
    if plan.interleave > 1:
        in_flight *= 1 + (plan.layout.pp - 1) / (plan.layout.pp * plan.interleave)
    keeps = (
        sum(per_token[kind].kept(kind, plan.recompute) * count for kind, count in stage.layers)
        * tokens
        * in_flight
    )
    first = per_token[stage.layers[0][0]]
    if stage.heads:
        keeps += first.final() * tokens
    if stage.embeds:
        keeps += first.token_inputs() * tokens

    def adds(kind: Kind) -> float:
        return (per_token[kind].again(kind, plan.recompute) + per_token[kind].passing(kind)) * tokens

    return keeps, max(adds(kind) for kind, _ in stage.layers)
