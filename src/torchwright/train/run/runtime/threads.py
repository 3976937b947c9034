"""The number of threads of a run that names none: torch's, or fewer while other programs use the cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch

from torchwright.core.cpu_load import Load
from torchwright.hardware.measure.threads import (
    ThreadChoice,
    choose_threads,
    disturbance,
    mean_seconds,
    small_training_step,
)
from torchwright.train.run.config.run import RunFile
from torchwright.train.run.runtime.processes import ProcessRank

LOOK_SECONDS = 30.0
"""Between two looks at the load: one takes 0.1 s, and a calibration 0.6 s where the machine became busy."""


def user_chose(run: RunFile, place: ProcessRank) -> bool:
    """Check whether threads are not ours to choose: named by the user, several processes here, or a card."""
    named = run.threads is not None or "OMP_NUM_THREADS" in os.environ
    return named or place.world > 1 or place.device != "cpu"


class RunThreads:
    """Chooses a number of threads when the run starts, and again when the machine becomes busy or quiet."""

    def __init__(
        self,
        *,
        fixed: bool,
        load: Callable[[], Load] = Load.sampled,
        time_on: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fixed` leaves torch's number alone. `time_on(threads)` are mean seconds of a small training step."""
        self.most = torch.get_num_threads()
        self.choice: ThreadChoice | None = None
        """None while the run has all of torch's threads."""
        self._fixed = fixed or self.most == 1
        self._load, self._clock = load, clock
        self._time_on = time_on or partial(mean_seconds, small_training_step())
        self._looked_at = -LOOK_SECONDS
        self._disturbed = False

    def look(self) -> str | None:
        """Choose again if that is due; returns what to say where the number of threads changed."""
        if self._fixed or self._clock() - self._looked_at < LOOK_SECONDS:
            return None
        load, before = self._load(), torch.get_num_threads()
        disturbed = disturbance(load, self.most) is not None
        if disturbed != self._disturbed:
            self._disturbed = disturbed
            self.choice = choose_threads(load, self.most, self._time_on)
            torch.set_num_threads(self.choice.threads if self.choice else self.most)
        self._looked_at = self._clock()
        if torch.get_num_threads() == before:
            return None
        return f"training on {self.choice}" if self.choice else f"training on all {self.most} threads again"

    def restore(self) -> None:
        """Give torch back the threads that it had."""
        if not self._fixed:
            torch.set_num_threads(self.most)
