"""Every way of going about a step on a cluster, and why the others are out: the rules of divisibility, in words."""

from __future__ import annotations

from collections.abc import Iterator

from torchwright.train.layout import Layout
from torchwright.train.mixer_shape import refused
from torchwright.train.planning.cluster import Cluster
from torchwright.train.planning.job import Job, LayoutPlan, Recompute
from torchwright.train.shape import Shape

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
LARGEST_MICRO_BATCH = 64
MOST_PIECES = 4
"""Numbers of parts of a pipeline stage, for interleaved micro-batches."""


def layouts(devices: int, experts: int) -> Iterator[Layout]:
    """Every split of `devices` over dp_replicate, dp_shard, pp, cp and tp, with every ep that divides the experts."""
    for tp in divisors(devices):
        for cp in divisors(devices // tp):
            for pp in divisors(devices // tp // cp):
                data = devices // tp // cp // pp
                for dp_shard in divisors(data):
                    spread = [ep for ep in divisors(experts) if dp_shard * cp % ep == 0] if experts else [1]
                    for ep in spread:
                        yield Layout(
                            dp_replicate=data // dp_shard, dp_shard=dp_shard, pp=pp, cp=cp, tp=tp, ep=ep
                        )


def refuse(
    shape: Shape, job: Job, cluster: Cluster, layout: Layout, *, tp_across_nodes: bool = False
) -> tuple[str, str] | None:
    """The rule that `layout` breaks and the numbers that break it, or None."""
    config, tp, cp = shape.config, layout.tp, layout.cp
    if tp > cluster.devices_per_node and not tp_across_nodes:
        return (
            "tensor parallelism leaves the node",
            f"tp={tp} over nodes of {cluster.devices_per_node}; every layer would wait for the slower link",
        )
    broken = refused(config, layout)
    if broken is not None:
        return broken
    if config.layer_inputs is not None and layout.pp > 1:
        return (
            f"stages do not divide {config.architecture}",
            f"pp={layout.pp}: its layers read inputs of their own, and some the keys of earlier ones",
        )
    for name, value in (
        ("heads", config.heads),
        ("key-value heads", config.expanded_kv_heads),
        ("feed-forward columns", config.feed_forward if not all(config.sparse) else tp),
        ("columns of an expert", config.experts.feed_forward if config.experts else tp),
        ("columns of the shared expert", config.experts.shared if config.experts else tp),
    ):
        if value % tp:
            return f"tp does not divide the {name}", f"{value} {name} over tp={tp}"
    if layout.pp > config.layers:
        return "more pipeline stages than layers", f"pp={layout.pp} for {config.layers} layers"
    if job.context % (cp * tp):
        return (
            "the context does not divide into equal parts",
            f"{job.context} tokens over cp · tp = {cp * tp}",
        )
    if job.sequences % layout.batch_ways:
        return (
            "the batch does not divide",
            f"{job.sequences} sequences over dp_replicate · dp_shard = {layout.batch_ways}",
        )
    return None


def plans(job: Job, shape: Shape, layout: Layout) -> Iterator[list[LayoutPlan]]:
    """For micro-batches of each size that divides a device's sequences, largest first, the kinds of recomputation."""
    sequences = job.sequences // layout.batch_ways
    pieces = min(MOST_PIECES, shape.config.layers // layout.pp) if layout.pp > 1 else 1
    for size in reversed(divisors(sequences)):
        if size > LARGEST_MICRO_BATCH:
            continue
        micro_batches = sequences // size
        yield [
            LayoutPlan(
                layout=layout,
                micro_batch=size,
                micro_batches=micro_batches,
                recompute=recompute,
                interleave=pieces if micro_batches % layout.pp == 0 else 1,
            )
            for recompute in RECOMPUTE
        ]


def divisors(number: int) -> list[int]:
    """In rising order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
