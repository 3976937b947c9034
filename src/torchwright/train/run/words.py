"""A language model's run made from the words of a command line."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchwright.train.run.check import check_run
from torchwright.train.run.corpus import TOKENS
from torchwright.train.run.loop import train_run
from torchwright.train.run.quick import quick_run
from torchwright.train.run.read import parse_run


@contextlib.contextmanager
def from_words(
    model: str, data: Sequence[str], *, world: int, out: Path, fresh: bool = False, **options: Any
) -> Generator[tuple[str, Callable[..., Any]]]:
    """The run file that `quick_run` makes, and what trains by it into `out`. Raises as `read_run`.

    The data are tokenized to be counted: into the run's own folder where there is one that goes on, else beside it,
    from where the run takes them once it has begun. Nothing is left there afterwards.
    """
    kept = out / TOKENS
    whole = out.resolve()
    beside = None if kept.is_dir() and not fresh else whole.with_name(f".{whole.name}.{TOKENS}")
    try:
        made = quick_run(model, data, world=world, cache=beside or kept, **options)
        run = parse_run(made.values, "the run that these words make")
        check_run(run)
        text = made.written()
        yield text, partial(train_run, run, out, text=text, fresh=fresh, tokens=beside)
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
