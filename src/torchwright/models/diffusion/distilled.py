"""Distilled models, which make a picture in few steps: what they were trained for, by the folder's configurations.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchwright.hub.folder import find_object
from torchwright.models.diffusion.limits import STEPS

if TYPE_CHECKING:
    from torchwright.models.diffusion.folder import PipelineFolder


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Steps and guidance that are used where nobody says them; a guidance of None is the pipeline's own."""

    steps: int = STEPS
    guidance: float | None = None
    why: str | None = None
    """The sign of distillation, for the user; None for a model that is not distilled."""


def habits(folder: PipelineFolder) -> Habits:
    """Return what a folder's model was trained for.

    Consistency models come with a scheduler of their own. Adversarial ones (SD-Turbo, SDXL-Turbo, SDXL-Lightning) come
    with Euler steps that are counted from the last one ("trailing") of a model that predicts noise. Flow models without
    an input for guidance (FLUX.1-schnell) take four steps.
    """
    scheduler = find_object(folder.path / "scheduler" / "scheduler_config.json")
    denoiser = find_object(folder.path / folder.family.denoiser / "config.json")
    kind: Any = folder.components["scheduler"][1]
    if kind in ("LCMScheduler", "TCDScheduler"):
        embedded = denoiser.get("time_cond_proj_dim") is not None
        return Habits(steps=4, guidance=8.0 if embedded else 1.0 if kind == "LCMScheduler" else 0.0, why=kind)
    euler = kind in ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")
    noise = scheduler.get("prediction_type", "epsilon") == "epsilon"
    if euler and noise and scheduler.get("timestep_spacing") == "trailing":
        return Habits(steps=4, guidance=0.0, why=f"{kind} with trailing steps")
    if folder.pipeline == "FluxPipeline" and not denoiser.get("guidance_embeds", False):
        return Habits(steps=4, why="no input for guidance")
    return Habits()
