"""A draft head's run made from words: `torchwright train --draft eagle3|mtp --model DIR --data FILE`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchwright.core.errors import unknown
from torchwright.hub.folder import resolve
from torchwright.train.draft.config import KIND, METHODS, Regenerate, parse_draft
from torchwright.train.draft.trainer import train_draft_run
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run_file import with_settings
from torchwright.train.run.quick import QuickRun, own_reasons, quick_run, read_fields
from torchwright.train.run.words import made_once

LARGE_RATE = 1e-4
"""Peak learning rate for targets of a billion parameters or more, SpecForge's; smaller ones take more."""
FULL_RATE = 2e-5
"""The rate that `quick_run` chooses for whole weights of such a model, by which others are scaled alike."""
OWN = ("target.", "head.", "features.", "regenerate.", "evaluation.served_s")
"""Fields that runs of text do not have."""
SHARED = (
    "tokens",
    "batch_tokens",
    "context",
    "micro_batches",
    "log_every",
    "precision",
    "data",
    "checkpoint",
    "evaluation",
    "layout",
)


@contextlib.contextmanager
def from_words(
    model: str,
    data: Sequence[str],
    *,
    world: int,
    out: Path,
    draft: str,
    fresh: bool = False,
    quantize: str | None = None,
    regenerate: str | None = None,
    start: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Generator[tuple[str, Callable[..., Any]]]:
    """Make the run file of a target and its data, and what trains by it into `out`. Raises as `read_draft`.

    The data are tokenized and counted once, as for runs of text.
    """
    if draft not in METHODS:
        raise unknown("method of --draft", draft, METHODS)
    for name in ("lora", "dpo"):
        if options.pop(name, None) is not None:
            raise RunError(
                f"--{name} trains the model itself, and --draft a head for it", next="leave one out"
            )
    merge = options.pop("merge", False)
    section = {"method": draft} | ({} if start is None else {"start": str(resolve(start).resolve())})
    more: dict[str, Any] = {"target": {} if quantize is None else {"quantize": quantize}, "head": section}
    if regenerate is not None:
        more["regenerate"] = {"temperature": Regenerate().temperature} | read_fields(
            "--regenerate", regenerate, Regenerate
        )

    def make(cache: Path) -> QuickRun:
        return _made(model, data, more, dict(settings or {}), world, cache, options)

    with made_once(make, world=world, out=out, fresh=fresh) as (made, beside):
        run = parse_draft(made.values, "the run that these words make")
        text = made.written()
        how = {"text": text, "fresh": fresh, "merge": merge, "tokens": beside}
        yield text, partial(train_draft_run, run, out, **how)


def _made(
    model: str,
    data: Sequence[str],
    more: dict[str, Any],
    settings: dict[str, Any],
    world: int,
    cache: Path,
    options: dict[str, Any],
) -> QuickRun:
    """The run file, whose sizes are those of a run of text over the same data."""
    own = {
        name: value
        for name, value in settings.items()
        if name.startswith(OWN) or name in ("precision", "clip")
    }
    shared = {name: value for name, value in settings.items() if name not in own}
    text = quick_run(model, data, world=world, settings=shared, cache=cache, **options)
    values: dict[str, Any] = {"kind": KIND, "out": "."}
    values |= {name: text.values[name] for name in SHARED if name in text.values}
    # Fields that were asked for go along, and are refused by name where a head has none.
    values |= {
        name: value
        for name, value in text.values.items()
        if name in {key.partition(".")[0] for key in shared}
    }
    values["target"] = {"folder": text.values["model"]["folder"]} | more.pop("target")
    chosen = text.values["optimizer"]["lr"]
    rate = chosen if "optimizer.lr" in shared else chosen / FULL_RATE * LARGE_RATE
    values["optimizer"] = text.values["optimizer"] | {"lr": rate}
    values["schedule"] = text.values["schedule"]
    return QuickRun(values=with_settings(values | more, own), reasons=own_reasons(text.reasons, own))
