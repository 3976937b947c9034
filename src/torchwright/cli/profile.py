"""`torchwright profile`: where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchwright.cli.options import (
    count_option,
    eval_text_option,
    json_option,
    quiet_option,
    settings_option,
    shape_options,
    tokens_option,
    trust_option,
)
from torchwright.cli.printing import console, print_json
from torchwright.core.process.interrupts import importing


@click.command("profile")
@click.argument("model", metavar="[DIR|MODEL]", required=False)
@click.option(
    "--with",
    "with_steps",
    multiple=True,
    metavar="TECH[:opt=value,…]",
    help="Of a model: apply this technique and profile again. Repeatable; each is applied with those before it.",
)
@click.option(
    "--rungs",
    is_flag=True,
    help="Of an artifact: apply its recipe again, step by step, and profile after each.",
)
@count_option("--top", default=10, show_default=True, help="Operators shown of each stage.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a trace for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the tables as one page without scripts.",
)
@shape_options
@tokens_option
@eval_text_option
@settings_option
@trust_option
@quiet_option
@json_option
def command(
    model: str | None,
    with_steps: tuple[str, ...],
    rungs: bool,
    top: int,
    out: Path | None,
    html: Path | None,
    settings: tuple[str, ...],
    trust: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """See where the time of a model's calls goes.

    Operators by their own time with the rates they achieve, idle time, casts and copies: of the original, after each
    step, and of an artifact as it is loaded. Lines at which compiling breaks off are named, each with its cure.
    """
    with importing():
        from torchwright.optimization import profile_stages
    from torchwright.optimization.profile.html import write
    from torchwright.optimization.profile.terminal import shown
    from torchwright.report.terminal import LiveProgress

    with LiveProgress(quiet=quiet) as progress:
        found = profile_stages.profile(
            model,
            with_steps=with_steps,
            rungs=rungs,
            trust=trust,
            trace=out,
            page=html,
            settings=settings,
            on_event=progress,
            **options,
        )
    if html is not None:
        write(found, html, top)
    if as_json:
        print_json(found)
    else:
        console().print(shown(found, top))
