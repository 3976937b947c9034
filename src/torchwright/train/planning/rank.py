"""All layouts of a job on a cluster, those first that the trainer takes, and those that cannot be with reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.layout import Layout
from torchwright.train.planning.accepted import refusal
from torchwright.train.planning.cluster import Accelerator, Cluster
from torchwright.train.planning.enumerate import layouts, plans, refuse
from torchwright.train.planning.job import Job, JobError, LayoutPlan
from torchwright.train.planning.memory import DeviceMemory, peak_memory
from torchwright.train.planning.time import Clock, StepTime
from torchwright.train.shape import Shape

NEAR = 0.01
"""Layouts closer than this are equally fast to a model of such precision; the one with fewer axes goes first."""


@dataclass(frozen=True, kw_only=True)
class RankedLayout:
    """One layout with its fastest way through the batch that fits."""

    plan: LayoutPlan
    memory: DeviceMemory
    time: StepTime
    tokens_per_second: float
    """Tokens per second of one device."""
    mfu: float
    """Model operations per second over bfloat16's peak (float32's in float32), attention counted unmasked."""
    bound: str
    """The main cost in time, in words."""
    refused: str = ""
    """Why `torchwright train` does not take it; such layouts come after all that it does."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Layouts that break the same rule."""

    rule: str
    count: int
    example: Layout
    reason: str
    """The numbers of the example."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of `rank`."""

    shape: Shape
    job: Job
    cluster: Cluster
    candidates: tuple[RankedLayout, ...]
    rejections: tuple[Rejection, ...]

    @property
    def families(self) -> list[list[RankedLayout]]:
        """Candidates that differ in dp_replicate and dp_shard alone together, in the order of their best."""
        families: dict[tuple[object, ...], list[RankedLayout]] = {}
        for candidate in self.candidates:
            layout = candidate.plan.layout
            alike = (layout.pp, layout.cp, layout.tp, layout.ep, bool(candidate.refused))
            families.setdefault(alike, []).append(candidate)
        return list(families.values())

    def place(self, layout: Layout) -> int | None:
        """The rank of a layout's family by speed alone, from 1; None where the layout is not among the candidates."""
        by_speed = sorted(self.families, key=lambda family: family[0].time.total)
        for place, family in enumerate(by_speed, 1):
            if any(candidate.plan.layout == layout for candidate in family):
                return place
        return None


def rank(
    config: DecoderConfig,
    job: Job,
    cluster: Cluster,
    *,
    fixed: dict[str, int] | None = None,
    tp_across_nodes: bool = False,
) -> Ranking:
    """Rank every layout; with `fixed`, those alone that have these degrees."""
    check_job(job, cluster.device)
    shape, clock = Shape(config), Clock(Shape(config), job, cluster)
    room = cluster.device.room
    found: list[RankedLayout] = []
    rejected: dict[str, list[tuple[Layout, str, float]]] = {}
    experts = config.experts.count if config.experts else 0
    for layout in layouts(cluster.devices, experts):
        if any(getattr(layout, axis) != degree for axis, degree in (fixed or {}).items()):
            continue
        broken = refuse(shape, job, cluster, layout, tp_across_nodes=tp_across_nodes)
        if broken is not None:
            rejected.setdefault(broken[0], []).append((layout, broken[1], 0.0))
            continue
        best = _fastest(shape, job, cluster, clock, layout, room)
        if isinstance(best, RankedLayout):
            found.append(replace(best, refused=refusal(config, job, best.plan)))
        else:
            rule = f"does not fit into {room / 2**30:.1f} GiB of memory"
            rejected.setdefault(rule, []).append((layout, f"at least {_needs(best)}", best.total))
    return Ranking(
        shape=shape,
        job=job,
        cluster=cluster,
        candidates=tuple(
            candidate
            for refused in (False, True)
            for candidate in _ordered(one for one in found if bool(one.refused) == refused)
        ),
        rejections=tuple(
            Rejection(rule=rule, count=len(cases), example=case[0], reason=case[1])
            for rule, cases in rejected.items()
            for case in [min(cases, key=lambda case: case[2])]
        ),
    )


def read_degrees(text: str) -> dict[str, int]:
    """Axis → degree of `tp=8,pp=1`, ones included. Raises `UnknownName` and `LayoutError`."""
    layout = Layout.parse(text)
    named = [part.split("=")[0].strip() for part in text.split(",") if part.strip()]
    return {axis: getattr(layout, axis) for axis in named}


def evaluate(shape: Shape, job: Job, cluster: Cluster, plan: LayoutPlan) -> RankedLayout:
    """Memory and time of one plan, whether it fits or not."""
    memory = peak_memory(shape, job, plan, fused=cluster.device.fused)
    return _candidate(shape, job, cluster, plan, memory, Clock(shape, job, cluster).step(plan))


def check_job(job: Job, device: Accelerator) -> None:
    """Raise `JobError` for a type of number that the device does not compute with."""
    if job.rate not in device.flops:
        raise JobError(
            f"{device.name} has no rate for {job.precision}",
            found=", ".join(device.flops),
            next="choose another --precision, or add the rate to the device's file",
        )


def _fastest(
    shape: Shape, job: Job, cluster: Cluster, clock: Clock, layout: Layout, room: float
) -> RankedLayout | DeviceMemory:
    """The fastest plan of a layout that fits, or the memory of the smallest that does not."""
    best: tuple[StepTime, LayoutPlan, DeviceMemory] | None = None
    memory = None
    for sizes in plans(job, shape, layout):
        # From nothing recomputed to everything: the first that fits is the fastest of its micro-batch.
        for plan in sizes:
            memory = peak_memory(shape, job, plan, fused=cluster.device.fused)
            if memory.total <= room:
                time = clock.step(plan)
                if best is None or time.total < best[0].total * (1 - 1e-9):
                    best = time, plan, memory
                break
        # A smaller micro-batch hides less and gathers more often; only a pipeline gains by it.
        if best is not None and best[1].recompute == "none" and layout.pp == 1:
            break
    if best is not None:
        return _candidate(shape, job, cluster, best[1], best[2], best[0])
    assert memory is not None, "a layout that was not refused has a plan"
    return memory


def _candidate(
    shape: Shape, job: Job, cluster: Cluster, plan: LayoutPlan, memory: DeviceMemory, time: StepTime
) -> RankedLayout:
    per_second = job.tokens_per_step / time.total / cluster.devices
    peak = cluster.device.flops["float32" if job.precision == "fp32" else "bfloat16"]
    return RankedLayout(
        plan=plan,
        memory=memory,
        time=time,
        tokens_per_second=per_second,
        mfu=per_second * shape.model_flops(job.context) / peak,
        bound=_bound(time),
    )


def _ordered(found: Iterable[RankedLayout]) -> list[RankedLayout]:
    """Fastest first; among those near the fastest that is left, the one with the fewest axes."""
    left = sorted(found, key=lambda candidate: candidate.time.total)
    ordered = []
    while left:
        limit = left[0].time.total * (1 + NEAR)
        near = [candidate for candidate in left if candidate.time.total <= limit]
        chosen = min(near, key=lambda candidate: (_axes(candidate.plan.layout), candidate.time.total))
        left.remove(chosen)
        ordered.append(chosen)
    return ordered


def _axes(layout: Layout) -> int:
    return str(layout).count("=")


def _needs(memory: DeviceMemory) -> str:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts)
    return f"{memory.total / 2**30:.1f} GiB ({largest})"


def _bound(time: StepTime) -> str:
    """The two largest shares, the link or bubble first where it is a tenth or more."""
    exposed = {name: seconds for name, seconds in time.parts.items() if name not in COMPUTE}
    shares = sorted(((seconds / time.total, name) for name, seconds in exposed.items()), reverse=True)
    words = [f"computing {time.computing / time.total:.0%}"]
    words += [f"{WAITING[name]} {share:.0%}" for share, name in shares[:2] if share >= 0.01]
    return ", ".join(words)


COMPUTE = ("matrix products", "attention", "memory", "optimizer")
WAITING = {
    "fsdp": "waiting for parameters",
    "replicas": "waiting for replicas",
    "tp": "tp links",
    "cp": "cp links",
    "ep": "ep links",
    "pipeline": "pipeline bubble",
}
