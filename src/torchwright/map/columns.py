"""Which columns a task reads: those that were named, or the first that go by a usual name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchwright.core.errors import DataError
from torchwright.map.compute import type_name
from torchwright.map.options import TaskName, TaskOptions
from torchwright.map.sources import Source
from torchwright.map.tasks.base import PAIRS, TaskFacts

ID = "id"
MOST_LISTED = 40


def choose(
    sources: Sequence[Source],
    task: TaskName,
    facts: TaskFacts,
    options: TaskOptions,
    keep: Sequence[str] | None,
) -> tuple[TaskOptions, dict[str, str]]:
    """Return the options with the columns that are read, and the types of those that the output repeats.

    The first row of each input decides; `keep` is what the user named, by default `id` where there is one. Raises
    `DataError`, which lists the columns, where no column can be read.
    """
    first = next((row for source in sources if (row := source.peek()) is not None), None)
    if first is None:
        raise DataError("the input has no rows", found=", ".join(source.label for source in sources))
    if task == "openai":
        return options, {}
    if task == "score":
        text, pair = _pair(first, options)
    else:
        text, pair = options.text_column or _guess(first, facts.columns[0], "--text-column"), None
        if options.pair_column is not None:
            pair = options.pair_column
    kept = _kept(first, keep)
    for source in sources:
        row = source.peek()
        for name in filter(None, (text, pair, *(keep or ()))):
            if row is not None and name not in row:
                raise _missing(f"{source.label} has no column '{name}'", row)
        source.columns = tuple(dict.fromkeys(filter(None, (text, pair, *kept))))
    return replace(options, text_column=text, pair_column=pair, keep=tuple(kept)), kept


def _guess(row: dict[str, Any], names: Sequence[str], option: str) -> str:
    found = next((name for name in names if name in row), None)
    if found is not None:
        return found
    texts = [name for name, value in row.items() if isinstance(value, str) and name != ID]
    if len(texts) == 1:
        return texts[0]
    raise _missing("no column goes by a usual name", row, f"name one: {option} NAME")


def _pair(row: dict[str, Any], options: TaskOptions) -> tuple[str, str]:
    if options.text_column is not None and options.pair_column is not None:
        return options.text_column, options.pair_column
    for first, second in PAIRS:
        if first in row and second in row:
            return options.text_column or first, options.pair_column or second
    raise _missing(
        "no two columns go by usual names", row, "name both: --text-column NAME --pair-column NAME"
    )


def _kept(row: dict[str, Any], keep: Sequence[str] | None) -> dict[str, str]:
    names = keep if keep is not None else [ID] if ID in row else []
    return {name: type_name(row.get(name)) for name in names}


def _missing(summary: str, row: dict[str, Any], next: str | None = None) -> DataError:
    names = list(row)[:MOST_LISTED]
    return DataError(
        summary, found=f"columns {', '.join(names)}" if names else "a row without columns", next=next
    )
