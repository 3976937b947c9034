"""`[pipeline]` of a run file: the order in which the stages of `layout.pp` take the micro-batches (no torch)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from torchwright.train.layout import Layout, LayoutError, Schedule
from torchwright.train.run.config.data_section import Section

PIECES: dict[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2}
"""Stages of a process where `pieces` does not say."""
FIXED = ("gpipe", "1f1b", "zbv")
"""Schedules of that many and no other."""
SPLIT = ("zero_bubble", "zbv")
"""Schedules that take the gradients of weights apart from those of inputs, and later."""


class PipelineSection(Section):
    """The pipeline schedule of `layout.pp`; the micro-batches are the run's."""

    schedule: Schedule = "1f1b"
    """`gpipe`: all forward, then all backward (Huang et al., 2019). `1f1b` keeps fewer micro-batches (Narayanan et
    al., 2019). `interleaved` has several stages a process (Narayanan et al., 2021). `zero_bubble` (ZB1P) and `zbv`
    fill the bubble with the gradients of weights (Qi et al., 2023)."""
    pieces: Annotated[int, Field(gt=0)] | None = None
    """Stages of each process; by default 2 with `interleaved` and `zbv`, else 1."""

    @property
    def stages(self) -> int:
        """Stages of each process."""
        return PIECES[self.schedule] if self.pieces is None else self.pieces


def check_pipeline(
    chosen: PipelineSection, layout: Layout, micro_batches: int, asked_for: dict[str, bool]
) -> None:
    """Raise `LayoutError` for what a pipeline does not go with.

    `asked_for` says of each of lora, qat, compile and recompute whether the run has it.
    """
    if layout.pp == 1:
        if chosen != PipelineSection():
            raise LayoutError(
                "[pipeline] says how stages take turns, and the layout has none",
                found="pp=1",
                next="set layout.pp, or leave [pipeline] out",
            )
        return
    if chosen.schedule in FIXED and chosen.stages != PIECES[chosen.schedule]:
        raise LayoutError(
            f"pipeline.schedule '{chosen.schedule}' has {PIECES[chosen.schedule]} stages a process",
            found=f"pipeline.pieces={chosen.pieces}",
            next="leave `pieces` out, or use 'interleaved'",
        )
    least = 2 if chosen.schedule == "interleaved" else 1
    if chosen.stages < least:
        raise LayoutError(
            f"pipeline.schedule '{chosen.schedule}' has {least} stages a process or more",
            found=f"pipeline.pieces={chosen.pieces}",
            next="use '1f1b' for one",
        )
    even = chosen.schedule in FIXED or micro_batches % layout.pp == 0
    if micro_batches < layout.pp or not even:
        raise LayoutError(
            f"micro_batches={micro_batches} do not keep pp={layout.pp} stages busy",
            allowed=f"{layout.pp} or more, and with 'interleaved' and 'zero_bubble' a multiple of it",
            next=f"set micro_batches = {layout.pp * max(1, micro_batches // layout.pp)}",
        )
    refused = [
        ("lora", asked_for["lora"], "no [lora]"),
        ("qat", asked_for["qat"], "no [qat]"),
        (
            "compile",
            asked_for["compile"] and chosen.schedule in SPLIT,
            "compile with 'gpipe', '1f1b' and 'interleaved'",
        ),
        (
            "recompute",
            asked_for["recompute"] and chosen.schedule in SPLIT,
            "recompute with the other schedules",
        ),
    ]
    for field, asked, allowed in refused:
        if asked:
            raise LayoutError(
                f"pipeline stages (pp={layout.pp}, '{chosen.schedule}') do not go with this `{field}`",
                allowed=allowed,
                next="change the run file; `torchwright plan-layout` ranks other layouts",
            )
