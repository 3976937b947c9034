"""`torchwright bench`: times, without a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchwright.cli.failures import packages_of
from torchwright.cli.options import (
    decoder_options,
    device_option,
    eval_text_option,
    json_option,
    shape_options,
    trust_option,
)
from torchwright.cli.printing import console, print_result
from torchwright.core.process.interrupts import importing


@click.command("bench")
@click.argument("model", metavar="DIR|MODEL")
@shape_options
@decoder_options
@click.option(
    "--draft",
    metavar="DIR|mtp",
    help="Serve a language model with this draft and without, in turns, and compare; as in `torchwright serve`.",
)
@eval_text_option
@device_option
@trust_option
@json_option
def command(
    model: str, draft: str | None, eval_text: Path | None, device: str | None, as_json: bool, **options: Any
) -> None:
    """Time an artifact or a model as it is.

    With --quantize, --kv or --dtype a language model runs on Torchwright's own decoder instead, without a search. With
    --draft its prompts are pieces of the text.
    """
    if draft is None and eval_text is not None:
        raise click.UsageError("--eval-text is for --draft, whose gain depends on the text")
    if draft is not None and device not in (None, "cpu"):
        raise click.UsageError(f"--draft is timed on the CPU alone, and not on {device}")
    found = _bench(model, draft, eval_text, device, options)
    rows = None if as_json else found.pop("proposals", None)
    print_result(f"bench {model}", found, as_json)
    if rows:
        _print_proposals(rows)


def _bench(
    model: str, draft: str | None, eval_text: Path | None, device: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    if draft is None:
        with importing():
            from torchwright.optimization import api

        return api.bench(model, device=device, **options)
    with packages_of("serve", "the server's packages"):
        from torchwright.serve.engine.draft_bench import bench_draft

    return bench_draft(model, draft, eval_text=eval_text, **options)


def _print_proposals(rows: list[dict[str, Any]]) -> None:
    from rich.table import Column, Table

    columns = ("temperature", "proposals by", "tokens/s", "over none", "over n-gram", "accepted")
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None, padding=(0, 2, 0, 0))
    for row in rows:
        over = (
            f"{row[name]:.2f}x [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"
            for name in ("speedup", "over_n_gram")
        )
        accepted = (
            f"{row['accepted_tokens']} of {row['proposed_tokens']}" if row["proposed_tokens"] else "none"
        )
        speed = f"{row['tokens_per_s']:.0f}"
        table.add_row(f"{row['temperature']:g}", row["proposed_by"], speed, *over, accepted)
    console().print(table)
