"""A language model's run made from the words of a command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torchwright.train.run.check import check_run
from torchwright.train.run.loop import train_run
from torchwright.train.run.quick import quick_run, to_toml
from torchwright.train.run.read import parse_run


def from_words(
    model: str, data: Sequence[str], *, world: int, **options: Any
) -> tuple[str, Callable[..., Any]]:
    """The run file that `quick_run` makes, and what trains by it into a folder. Raises as `read_run`."""
    values = quick_run(model, data, world=world, **options)
    text = to_toml(values) + "\n"
    run = parse_run(values, "the run that these words make")
    check_run(run)
    return text, partial(train_run, run, text=text)
