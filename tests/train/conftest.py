"""The train room's tests use the decoder's tiny random models of every family."""

from __future__ import annotations

import sys
from pathlib import Path

from preloaded import PRELOADED
from torchwright.train.prove import processes

sys.path.insert(0, str(Path(__file__).parents[1] / "decoder"))

# Their processes need a quarter of a second where they need not import what their tests do.
processes.PRELOADED = PRELOADED
