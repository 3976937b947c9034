"""Bytes that one device takes in over each kind of link in a training step, axis by axis."""

from __future__ import annotations

from torchwright.train.planning.activations import copies, rings
from torchwright.train.planning.cluster import Cluster
from torchwright.train.planning.job import Job, LayoutPlan
from torchwright.train.planning.memory import Ends, arriving, held
from torchwright.train.planning.time import plan_groups
from torchwright.train.shape import Shape


def traffic(shape: Shape, job: Job, cluster: Cluster, plan: LayoutPlan) -> dict[str, dict[str, float]]:
    """Axis (fsdp, replicas, tp, cp, ep) → link → bytes of a device and step; the pipeline's edges are left out."""
    layout, groups, width = plan.layout, plan_groups(plan), job.width
    times = plan.micro_batches if layout.pp == 1 else 1
    tokens = plan.tokens(job)
    repeats = 3 if plan.recompute == "full" else 2
    stage = shape.stages(layout.pp)[0]
    found: dict[str, dict[str, float]] = {}

    def add(axis: str, links: dict[str, float], count: float) -> None:
        here = found.setdefault(axis, {})
        for name, size in links.items():
            here[name] = here.get(name, 0.0) + size * count

    ends = Ends.of(shape, stage, layout, width)
    if groups["fsdp"].size > 1:
        add("fsdp", cluster.entering(groups["fsdp"], ends.gathered + 4 * ends.parameters), times)
    if layout.dp_replicate > 1:
        size = 2 * 4 * ends.parameters / groups["fsdp"].size
        add("replicas", cluster.entering(groups["dp_replicate"], size), times)
    for kind, count in stage.layers:
        parameters = held(shape.layer(kind), layout)
        gathers = 2 if layout.pp == 1 else 1
        if groups["fsdp"].size > 1:
            size = gathers * arriving(shape.layer(kind), layout, job) + 4 * parameters
            add("fsdp", cluster.entering(groups["fsdp"], size), count * times)
        if layout.dp_replicate > 1:
            size = 2 * 4 * parameters / groups["fsdp"].size
            add("replicas", cluster.entering(groups["dp_replicate"], size), count * times)
        every = count * plan.micro_batches
        if layout.tp > 1:
            size = shape.exchanges * repeats * width * shape.config.model * tokens
            add("tp", cluster.entering(groups["tp"], size), every)
        if layout.cp > 1 and not rings(shape, layout):
            widths = shape.of(kind).q_width + shape.of(kind).kv_width
            size = repeats * width * 2 * widths / layout.tp * tokens
            add("cp", cluster.leaving(groups["cp"], size), every)
        if layout.cp > 1 and rings(shape, layout):
            # Every process sees every other's keys and values, backward their float32 gradients as well.
            size = (repeats * width + 4) * 2 * shape.of(kind).kv_width / layout.tp * tokens * layout.cp
            add("cp", cluster.entering(groups["cp"], size), every)
        if layout.ep > 1 and kind.sparse and shape.config.experts is not None:
            rows = width * shape.config.model * tokens * copies(shape, layout) / layout.tp
            add("ep", cluster.leaving(groups["ep"], 2 * repeats * rows), every)
    return found
