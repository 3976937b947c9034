"""Schedulers by the names that other tools give them, and which of them a pipeline can take. No torch here."""

from __future__ import annotations

from typing import Any

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "dpm++_2m": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver++", "use_karras_sigmas": False},
    ),
    "dpm++_2m_karras": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver++", "use_karras_sigmas": True},
    ),
    "dpm++_2m_sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
"""Name → diffusers' class and the options that it has by this name; all else is taken from the folder's scheduler."""
FLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "lcm": ("FlowMatchLCMScheduler", {}),
}
"""The same for models of flow matching."""
EQUIVALENT = ("DPMSolverSinglestepScheduler", "LMSDiscreteScheduler", "TCDScheduler")
"""Schedulers without a name here, whose configuration the others read."""
NAMES = tuple(sorted(SCHEDULERS))


def possible(own: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the schedulers that can stand for a folder's own, which is named by its class."""
    if own.startswith("FlowMatch"):
        return FLOW
    others = {cls for cls, _ in SCHEDULERS.values()}
    return SCHEDULERS if own in others or own in EQUIVALENT else {}
