"""A language model's run made from the words of a command line."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchwright.train.run.config.check import check_run
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.config.run import Run
from torchwright.train.run.loop.train import train_run
from torchwright.train.run.quick import QuickRun, quick_run
from torchwright.train.run.runtime.corpus import TOKENS
from torchwright.train.run.runtime.patience import patient
from torchwright.train.run.runtime.processes import on_first, processes

WAIT_S: float = Run.model_fields["timeout_s"].default
"""Seconds that processes wait for each other before there is a run file to say how long."""


@contextlib.contextmanager
def made_once(
    make: Callable[[Path], QuickRun], *, world: int, out: Path, fresh: bool
) -> Generator[tuple[QuickRun, Path | None]]:
    """Make a run in the first process, for all: the run, and the folder of its tokens if it is next to the run's own.

    `make` tokenizes and counts the data, and the other processes wait for it. Tokens go into the run's own folder if a
    run goes on there, else into one next to it. The run takes them once it has begun; nothing stays there.
    """
    kept = out / TOKENS
    whole = out.resolve()
    beside = None if kept.is_dir() and not fresh else whole.with_name(f".{whole.name}.{TOKENS}")
    cached = partial(make, beside or kept)
    with contextlib.ExitStack() as held:
        first = True
        if world > 1:
            first = held.enter_context(processes(WAIT_S)).first
        if beside is not None and first:
            held.callback(shutil.rmtree, beside, ignore_errors=True)
        if world > 1:
            with patient(WAIT_S):
                made = on_first(cached)
        else:
            made = cached()
        yield made, beside


@contextlib.contextmanager
def from_words(
    model: str, data: Sequence[str], *, world: int, out: Path, fresh: bool = False, **options: Any
) -> Generator[tuple[str, Callable[..., Any]]]:
    """Make the run file of a model and its data, and what trains by it into `out`. Raises as `read_run`.

    The data are tokenized and counted as `made_once` says.
    """

    def make(cache: Path) -> QuickRun:
        return quick_run(model, data, world=world, cache=cache, **options)

    with made_once(make, world=world, out=out, fresh=fresh) as (made, beside):
        run = parse_run(made.values, "the run that these words make")
        check_run(run)
        text = made.written()
        yield text, partial(train_run, run, out, text=text, fresh=fresh, tokens=beside)
