"""The train room's tests use the decoder's tiny random models of every family."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "decoder"))
