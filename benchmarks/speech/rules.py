"""The task of speed.py for every contender, whichever library it runs on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FRAMES, RATE, BANDS = 3000, 16_000, 80
SIZE, END, START = 51865, 50257, 50258
"""Vocabulary of Whisper base and small."""
PROMPT = [START, 50259, 50359, 50363]
"""Start, English, transcribe, no timestamps."""
Windows = Sequence[np.ndarray]
