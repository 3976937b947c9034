"""Layouts of a recommender's tables as a table for people and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchwright.train.planning.recommender import Estimate

PARTS = ("dense", "lookups", "imbalance", "exchange", "reduce", "sync")


def table(found: Sequence[Estimate], count: int) -> RenderableType:
    """`found`, the fastest first, of `count` that fit the devices' memory."""
    if not found:
        return Text(
            "no layout fits the devices' memory: more devices share the tables out further", "bold red"
        )
    rows = Table(box=None, padding=(0, 1))
    for name in ("groups", "of", "sync_every", "flipped", "GB", "ms", *PARTS):
        rows.add_column(name, justify="right")
    for one in found:
        parts = (f"{1e3 * one.seconds[name]:.4f}" for name in PARTS)
        rows.add_row(
            str(one.replicas),
            str(one.sharding.group),
            str(one.sharding.sync_every) if one.replicas > 1 else "",
            "" if one.sharding.contiguous_replicas else "yes",
            f"{one.total_memory / 1e9:.3g}",
            f"{1e3 * one.step:.4f}",
            *parts,
        )
    return Group(
        rows, Text(f"{len(found)} of {count} that fit; milliseconds of a step on each device", "dim")
    )


def plain(found: Sequence[Estimate], count: int) -> dict[str, Any]:
    """Return the plan as JSON takes it. Bytes and seconds."""
    return {
        "fitting": count,
        "layouts": [
            {
                "groups": one.replicas,
                "group_size": one.sharding.group,
                "sync_every": one.sharding.sync_every,
                "flipped": not one.sharding.contiguous_replicas,
                "memory": one.memory | {"total": one.total_memory},
                "seconds": one.seconds | {"step": one.step},
                "traffic": one.traffic,
            }
            for one in found
        ],
    }
