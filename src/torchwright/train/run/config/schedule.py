"""The factor on the peak learning rate, and which windows a step reads: functions of the tokens seen (no torch)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchwright.train.run.config.run import DECAY_FRACTION, Run


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """A step: its number from 0, the tokens and rows that it reads, and its factor on the rate."""

    number: int
    tokens: int
    """Seen before the step."""
    rate: float
    """Factor on the peak learning rate."""
    context: int
    rows: int
    """Windows of the step, over all processes."""
    first: int
    """Number of its first window, counted anew where the window's length changes."""
    phase: int
    """0, or 1 in a decay with windows of another length."""


def steps(run: Run) -> int:
    """Optimizer steps of the whole run."""
    return -(-run.tokens // run.batch_tokens)


def plan_step(run: Run, number: int) -> ScheduledStep:
    """Step `number` of a run: nothing but the run file and the number decides it."""
    tokens = number * run.batch_tokens
    decay_step = steps(run) - _decay_steps(run)
    late = run.schedule.decay_context is not None and number >= decay_step
    context = run.schedule.decay_context if late and run.schedule.decay_context else run.context
    rows = run.batch_tokens // context
    return ScheduledStep(
        number=number,
        tokens=tokens,
        rate=rate(run, number),
        context=context,
        rows=rows,
        first=(number - decay_step if late else number) * rows,
        phase=int(late),
    )


def rate(run: Run, number: int) -> float:
    """The factor of step `number`: up to 1 at the warm-up's last step, down to `final` at the run's last.

    Each step goes by the tokens seen after it, so that the first warm-up step moves as well. `cosine` falls from the
    end of the warm-up on (Loshchilov and Hutter, 2017); `wsd` stays at 1 and falls in a straight line over the last
    `decay_fraction` of the steps (Hu et al., 2024). A run of a single step makes it at 1.
    """
    schedule = run.schedule
    return factor(
        schedule.name,
        warm=(number + 1) * run.batch_tokens / schedule.warmup_tokens if schedule.warmup_tokens else 1.0,
        left=steps(run) - (number + 1),
        decay=_decay_steps(run),
        final=schedule.final,
    )


def factor(name: str, *, warm: float, left: int, decay: int, final: float) -> float:
    """Return the factor on the rate: `warm` is the share of the warm-up at a step's end, `left` the steps after it."""
    fallen = max(0.0, (decay - left) / decay) if decay else 0.0
    down = 0.5 * (1 + math.cos(math.pi * fallen)) if name == "cosine" else 1 - fallen
    return min(1.0, warm) * (final + (1 - final) * down)


def _decay_steps(run: Run) -> int:
    """The steps over which the rate falls, the run's last; its first is never one of them."""
    after_first = steps(run) - 1
    if run.schedule.name == "cosine":
        warm = -(-run.schedule.warmup_tokens // run.batch_tokens)
        return max(0, min(after_first, steps(run) - warm))
    return min(after_first, max(1, round(steps(run) * (run.schedule.decay_fraction or DECAY_FRACTION))))
