"""A ranking for people, and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchwright.train.planning.cluster import Cluster
from torchwright.train.planning.job import Job, LayoutPlan
from torchwright.train.planning.rank import RankedLayout, Ranking

UNKNOWN = (
    "stragglers, failures, and links that other jobs share or that run below their published rate",
    "what NCCL's kernels take from the matrix units while they run beside them",
    "kernel efficiency on small or odd shapes: one figure stands for all large products, one for attention",
    "experts of unequal popularity: every expert is taken to get as many tokens",
    "the allocator's fragmentation beyond the reserve, data loading, checkpoints, evaluation",
)
"""Limits of the time and memory model."""


MARK = "*"
"""The mark of layouts that the trainer does not support."""


def table(ranking: Ranking, *, top: int) -> RenderableType:
    """The best layout in full, the ranking, the rejected by reason, and what the model does not know."""
    parts: list[RenderableType] = [_heading(ranking), Text()]
    families = ranking.families
    if not families:
        parts.append(Text("No layout is possible. The reasons:", style="bold red"))
    else:
        parts += [_ranking(families[:top]), Text()]
        rest = len(families) - top
        if rest > 0:
            parts.append(Text(f"… and {rest} more; --top shows them.", style="dim"))
        parts += [_breakdown(families[0][0]), Text()]
        parts += _refused(families[:top])
    if ranking.rejections:
        parts += [Text("Rejected", style="bold"), _rejected(ranking), Text()]
    parts.append(Text("The model does not know", style="bold"))
    parts += [Text(f"  {line}") for line in UNKNOWN]
    return Group(*parts)


def plain(ranking: Ranking, *, top: int) -> dict[str, Any]:
    """The same as plain data; bytes, seconds, tokens per second and device."""
    shape, cluster = ranking.shape, ranking.cluster
    return {
        "model": {
            "architecture": shape.config.architecture,
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "flops_per_token": shape.model_flops(ranking.job.context),
        },
        "cluster": {
            "device": asdict(cluster.device),
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
        },
        "job": asdict(ranking.job),
        "layouts": [
            _candidate(family[0]) | {"splits_of_dp": len(family)} for family in ranking.families[:top]
        ],
        "fitting": len(ranking.candidates),
        "rejected": [
            {
                "rule": rejection.rule,
                "count": rejection.count,
                "example": str(rejection.example),
                "reason": rejection.reason,
            }
            for rejection in ranking.rejections
        ],
        "not_modelled": list(UNKNOWN),
    }


def _candidate(candidate: RankedLayout) -> dict[str, Any]:
    return {
        "layout": asdict(candidate.plan.layout),
        "micro_batch": candidate.plan.micro_batch,
        "micro_batches": candidate.plan.micro_batches,
        "recompute": candidate.plan.recompute,
        "interleave": candidate.plan.interleave,
        "memory": candidate.memory.parts
        | {"total": candidate.memory.total, "moment": candidate.memory.moment},
        "seconds": candidate.time.parts | {"total": candidate.time.total},
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "bound": candidate.bound,
        "refused_by_train": candidate.refused or None,
    }


def _heading(ranking: Ranking) -> Text:
    shape, job, cluster = ranking.shape, ranking.job, ranking.cluster
    active = "" if shape.config.experts is None else f" ({count(shape.active_parameters)} for each token)"
    return Text.assemble(
        (f"{count(shape.parameters)} parameters{active}", "bold"),
        f" on {_machines(cluster)}, {_step(job)}.\n",
        f"{len(ranking.candidates)} layouts fit, "
        f"{sum(rejection.count for rejection in ranking.rejections)} do not. tok/s are of one device.",
    )


def _machines(cluster: Cluster) -> str:
    return f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"


def _step(job: Job) -> str:
    compiled = "compiled" if job.compile else "eager"
    precision = job.precision if job.gather is None else f"{job.precision} gathered in {job.gather}"
    return (
        f"{job.sequences} sequences of {job.context} tokens a step, {precision}, {job.optimizer}, {compiled}"
    )


def _ranking(families: list[list[RankedLayout]]) -> Table:
    grid = Table(box=None, padding=(0, 1), header_style="cyan")
    grid.add_column("", justify="right")
    grid.add_column("layout", overflow="fold")
    for name in ("tok/s", "MFU", "GiB"):
        grid.add_column(name, justify="right")
    grid.add_column("batch")
    grid.add_column("what takes the time", overflow="fold")
    for place, family in enumerate(families, 1):
        best = family[0]
        style = "dim" if best.refused else "bold" if place == 1 else ""
        grid.add_row(
            str(place) + (MARK if best.refused else ""),
            Text(layout_text(family), style=style),
            f"{best.tokens_per_second:,.0f}",
            f"{best.mfu:.1%}",
            f"{best.memory.total / 2**30:.1f}",
            Text(batch_text(best.plan)),
            Text(best.bound),
        )
    return grid


def _refused(families: list[list[RankedLayout]]) -> list[RenderableType]:
    """The marked layouts' reasons, each once."""
    reasons = dict.fromkeys(family[0].refused for family in families if family[0].refused)
    return [Text(f"{MARK} `torchwright train` refuses it: {reason}", style="yellow") for reason in reasons]


def layout_text(family: list[RankedLayout]) -> str:
    """The best of a family, and how many other splits of its dp fit."""
    others = len(family) - 1
    return str(family[0].plan.layout) + (f" (+{others} splits of dp)" if others else "")


def batch_text(plan: LayoutPlan) -> str:
    """Return how a device processes its sequences."""
    text = f"{plan.micro_batches} x {plan.micro_batch}"
    if plan.recompute != "none":
        text += f", {plan.recompute} recompute"
    if plan.interleave > 1:
        text += f", {plan.interleave} pieces"
    return text


def _breakdown(best: RankedLayout) -> Table:
    grid = Table(box=None, padding=(0, 1), header_style="cyan", title=None)
    grid.add_column("best: memory")
    grid.add_column("GiB", justify="right")
    grid.add_column("   time of a step")
    grid.add_column("ms", justify="right")
    memory = [(name, f"{size / 2**30:.1f}") for name, size in best.memory.parts.items() if size]
    memory.append((f"at its peak: {best.memory.moment}", f"{best.memory.total / 2**30:.1f}"))
    seconds = [(time_name(name), f"{value * 1e3:,.1f}") for name, value in best.time.parts.items() if value]
    seconds.append(("in all", f"{best.time.total * 1e3:,.1f}"))
    for row in range(max(len(memory), len(seconds))):
        left = memory[row] if row < len(memory) else ("", "")
        right = seconds[row] if row < len(seconds) else ("", "")
        grid.add_row(left[0], left[1], f"   {right[0]}", right[1])
    return grid


def time_name(part: str) -> str:
    """A part of the time in words."""
    return {
        "memory": "element-wise, through memory",
        "fsdp": "waiting for parameters and gradients",
        "replicas": "waiting for replicas",
        "tp": "tp collectives",
        "cp": "cp collectives",
        "ep": "ep collectives",
        "pipeline": "pipeline bubble and edges",
    }.get(part, part)


def _rejected(ranking: Ranking) -> Table:
    grid = Table(box=None, padding=(0, 1), show_header=False)
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    for rejection in sorted(ranking.rejections, key=lambda rejection: -rejection.count):
        text = f"{rejection.rule}; such as {rejection.example}: {rejection.reason}"
        grid.add_row(str(rejection.count), Text(text))
    return grid


def count(number: float) -> str:
    """8030261248 → 8.03 B."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"
