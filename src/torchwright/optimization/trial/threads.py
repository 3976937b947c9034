"""The number of threads of a search's trials, chosen by the original's own calls where the machine is disturbed."""

from __future__ import annotations

from torchwright.hardware.measure.threads import ThreadChoice, choose_threads
from torchwright.optimization.trial.client import Candidate, Context


def settle_threads(context: Context, original: Candidate) -> ThreadChoice | None:
    """Let all trials run on as many threads as the original is fastest on; None: on as many as torch has.

    A speed-up over an original whose threads wait for each other says nothing of the candidate. What trials compile
    from then on takes as many threads as its caller has, since a user's machine need not be busy.
    """
    if context.device != "cpu":
        return None
    process = original.process
    choice = choose_threads(
        context.sampled_load(),
        context.threads,
        lambda threads: process.ask("mean_seconds", threads=threads),
    )
    if choice is not None:
        context.any_threads = choice.threads < choice.most
        context.threads = choice.threads
        process.ask("use_threads", threads=choice.threads)
    return choice
