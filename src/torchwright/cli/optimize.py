"""`torchwright optimize`: the search."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import Any, get_args

import click

from torchwright.cli.completion import techniques
from torchwright.cli.options import (
    Duration,
    Share,
    all_option,
    device_option,
    eval_text_option,
    images_option,
    json_option,
    points_option,
    prompts_option,
    quiet_option,
    settings_option,
    shape_options,
    size_option,
    steps_option,
    tokens_option,
)
from torchwright.cli.printing import console, print_json
from torchwright.core.process.interrupts import importing
from torchwright.core.records import Budget, Objective

BUDGET = Budget()


@click.command("optimize")
@click.argument("model", required=False)
@click.option(
    "--max-drop",
    type=Share(),
    metavar="DROP",
    default=BUDGET.max_drop,
    show_default=True,
    help="Most that the metric may lose: 0.01 or 1%.",
)
@click.option(
    "--objective",
    type=click.Choice(get_args(Objective)),
    default=BUDGET.objective,
    show_default=True,
    help="What to make better.",
)
@click.option(
    "--time-budget",
    type=Duration(),
    default=f"{BUDGET.time_seconds:g}s",
    show_default=True,
    metavar="TIME",
    help="How long all of it may take: 90s, 2m, 1h, or a number of seconds.",
)
@shape_options
@tokens_option
@eval_text_option
@click.option(
    "--audio",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="FILE",
    show_default="made-up sound",
    help="Speech models: a recording to be judged by. Repeatable.",
)
@click.option(
    "--reference",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="FILE",
    show_default="the original's own words",
    help="Speech: what is said in the --audio of the same place, as a text file; repeatable. Translators and "
    "summarizers: a file with the answer to each line of --eval-text.",
)
@images_option
@points_option
@steps_option
@size_option
@prompts_option
@settings_option
@click.option(
    "--with",
    "with_steps",
    multiple=True,
    metavar="TECH[:opt=value,…]",
    shell_complete=techniques,
    help="Try this technique first; an error if it cannot run here, exit 1 if it fails. Repeatable.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="TECH[:opt=value,…]",
    shell_complete=techniques,
    help="Try this technique and no other that --only does not name; errors as of --with. Repeatable.",
)
@click.option(
    "--draft",
    metavar="DIR",
    help="Language models: an EAGLE-3 head or small model with the same tokens, kept in the artifact if pieces of "
    "--eval-text are served faster with it.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="TECH",
    shell_complete=techniques,
    help="Never try this technique. Repeatable.",
)
@device_option
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False),
    metavar="DIR",
    show_default="a folder named after the model",
    help="Where the artifact goes.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of random inputs.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the search whose artifact is in --out: what it measured is kept, what it left is tried.",
)
@click.option(
    "--exhaustive",
    is_flag=True,
    help="Go without the experience of recorded searches, which orders the trials.",
)
@all_option
@quiet_option
@json_option
def command(
    model: str | None,
    settings: tuple[str, ...],
    with_steps: tuple[str, ...],
    only: tuple[str, ...],
    without: tuple[str, ...],
    draft: str | None,
    every: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the fastest recipe within the budget.

    Each technique is tried in a fresh process. The waterfall at the end says what each one gained, what it cost, and
    why it was kept or not. The result is written to a folder, the artifact.
    """
    if only and (with_steps or without):
        both = "--with" if with_steps else "--without"
        raise click.UsageError(f"--only names all that is tried, and {both} would say otherwise")
    with importing():
        from torchwright.optimization import api
    from torchwright.report.terminal import LiveProgress, waterfall

    with LiveProgress(quiet=quiet) as progress:
        result = api.optimize_cli(
            model,
            settings=settings,
            with_steps=list(with_steps),
            only=list(only),
            without=list(without),
            draft=draft,
            on_event=progress,
            command=shlex.join(["torchwright", *sys.argv[1:]]),
            **options,
        )
    facts = {"path": str(result.path), "recipe": dataclasses.asdict(result.recipe)}
    failed = api.asked_and_failed(result, only or with_steps, facts, draft)
    if not as_json:
        console().print(waterfall(result.recipe, artifact=str(result.path), every=every))
    elif failed is None:
        print_json(facts)
    if failed is not None:
        raise failed
