"""The most that a picture may ask for. No torch here."""

from __future__ import annotations

STEPS = 20
"""Where nobody says how many."""
MOST_STEPS = 1000
MOST_PIXELS = 4096 * 4096
LONGEST_PROMPT = 10_000
MOST_SEED = 2**63 - 1
