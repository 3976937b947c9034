"""The gain of a trained head when its target is served, measured at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torchwright.train.data.shards import Shards
from torchwright.train.draft.config import DraftRun
from torchwright.train.draft.regenerate import prompts
from torchwright.train.draft.report import Position
from torchwright.train.draft.target import TargetModel

PROMPT_TOKENS, PROMPTS = 64, 64
"""Tokens of a held-out prompt, and how many there are, at most: few are served twice in a minute."""
Measure = Callable[..., list[dict[str, Any]]]
"""`served_gain` of the server's engine, which this room does not import: it is handed in."""


def measure_served(
    measure: Measure,
    run: DraftRun,
    target: TargetModel,
    head: Path,
    held: Shards,
    end: int | None,
    first: Position,
) -> list[dict[str, Any]]:
    """Serve the target with the head in a folder and without on held-out prompts, in turns.

    `end` is the token that ends a text, and `first` the head's held-out figures of first proposals. Raises
    `ModelError` where no proposal is accepted, and these figures say otherwise.
    """
    return measure(
        target.loaded,
        head,
        prompts(held, end, tokens=PROMPT_TOKENS, most=PROMPTS),
        seconds=run.evaluation.served_s,
        quantize=run.target.quantize,
        agree=first.agree,
    )


def served_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return served gains in words."""
    return [
        f"served at batch {row['batch']}, temperature {row['temperature']:g}: {_ratio(row)}; "
        f"{row['accepted_tokens']:,} of {row['proposed_tokens']:,} proposals accepted"
        for row in rows
    ]


def _ratio(row: Mapping[str, Any]) -> str:
    if row["speedup"] is None:
        return f"open, an interval wants more than {row['rounds']} rounds"
    interval = f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    return f"{row['verdict']}, {row['speedup']:.2f}x {interval} of the tokens per second without a draft"
