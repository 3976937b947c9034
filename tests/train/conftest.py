"""The train room's tests use the decoder's tiny random models of every family."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from preloaded import PRELOADED
from torchwright.train.prove import processes

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "decoder"))

# Runs are compared to the bit, and the load of this machine must not choose their threads.
os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))

# Their processes need a quarter of a second where they need not import what their tests do.
processes.PRELOADED = PRELOADED
