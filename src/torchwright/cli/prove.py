"""`torchwright prove`: a run or a layout checked on this machine, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import console, print_json
from torchwright.core.process.interrupts import importing


@click.command("prove")
@click.argument("target", metavar="RUN.toml|MODEL")
@click.option(
    "--layout", metavar="AXIS=N,…", help="Of MODEL, such as dp_shard=4,tp=2; a run file has its own."
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="The most that run at a time; a layout that takes more is proved in parts, and it is said which.",
)
@json_option
def command(target: str, layout: str | None, processes: int, as_json: bool) -> None:
    """Prove on this machine that a run computes what one process computes.

    RUN.toml is proved with all that it says: layout, compilation, recomputation, micro-batches, precision, optimizer.
    MODEL is a Hugging Face folder or hub id, and is proved in --layout; only its config.json is read. A small model of
    the same kind takes three of the trainer's own steps, in float64 and in the run's precision. Every value is compared
    with the same steps written down plainly; of a recommender a small one, its tables cut in every way, in groups that
    meet as the file says. Where one differs the exit code is 1, and the first one is named, with
    its axis, its layer and the likely cause.
    """
    with importing():
        from torchwright.train.kinds import DEFAULT, kind_of, verb
        from torchwright.train.layout import Layout
        from torchwright.train.prove import prove_layout

    def announce(part: Any) -> None:
        if not as_json:
            screen.print(render.line(part))

    screen, is_file = console(), target.endswith(".toml")
    if is_file is (layout is not None):
        raise click.UsageError(
            "--layout goes with a model; a run file has its own" if is_file else "give --layout"
        )
    kind = kind_of(Path(target)) if is_file else DEFAULT
    render = verb(kind, "prove_render")
    if layout is None:
        proof = verb(kind, "prove")(Path(target), processes, announce)
    else:
        proof = prove_layout(target, Layout.parse(layout), processes, announce)
    if as_json:
        print_json(render.plain(proof))
    else:
        screen.print(render.verdict(proof))
    if not proof.passed:
        raise click.exceptions.Exit(1)
