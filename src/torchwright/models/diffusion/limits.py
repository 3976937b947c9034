"""Options of a picture, and their limits. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 20
"""Default number of steps."""
MOST_STEPS = 1000
MOST_PIXELS = 4096 * 4096
LONGEST_PROMPT = 10_000
MOST_SEED = 2**63 - 1
MOST_GUIDANCE = 100.0


@dataclass(frozen=True, kw_only=True)
class Style:
    """The way a prompt is followed. None leaves it to what the model was trained for (`distilled.habits`)."""

    guidance: float | None = None
    """Strength of classifier-free guidance. At 0 and 1 the denoiser sees the prompt alone."""
    negative: str | None = None
    """A prompt that the picture is guided away from."""
    scheduler: str | None = None
    """One of `schedulers.NAMES` in place of the folder's."""
