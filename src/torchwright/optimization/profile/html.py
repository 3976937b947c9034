"""A profile as one self-contained HTML page: no script, nothing loaded from anywhere, every name escaped."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from torchwright.core.process.files import replacing
from torchwright.optimization.profile.terminal import TOP, achieved
from torchwright.optimization.profile.values import Kind, Profile
from torchwright.report.html import environment


def render(profile: Profile, top: int = TOP) -> str:
    """The page: a row of kinds for each stage, the longest operators of each, and the graph breaks."""
    recorded = [stage.recording for stage in profile.stages if stage.recording]
    spent = {found.kind for recording in recorded for found in recording.kinds if found.share >= 0.0005}
    return (
        environment()
        .get_template("profile.html.j2")
        .render(
            profile=profile,
            kinds=[kind for kind in get_args(Kind) if kind in spent],
            shares=[
                {found.kind: found.share for found in stage.recording.kinds} if stage.recording else {}
                for stage in profile.stages
            ],
            top=top,
            achieved=achieved,
        )
    )


def write(profile: Profile, out: Path, top: int = TOP) -> None:
    """Write the page next to `out` and rename it."""
    with replacing(out) as beside:
        beside.write_text(render(profile, top), encoding="utf-8")
