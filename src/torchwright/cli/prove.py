"""`torchwright prove`: a layout checked on this machine, against one process."""

from __future__ import annotations

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import console, print_json
from torchwright.process.interrupts import importing


@click.command("prove")
@click.argument("model")
@click.option(
    "--layout", required=True, metavar="AXIS=N,…", help="Such as dp_replicate=2,dp_shard=4,tp=2,cp=2."
)
@click.option(
    "--processes",
    type=click.IntRange(2, 64),
    default=4,
    show_default=True,
    help="The most that run at a time: 8 proves three axes together, 16 four.",
)
@json_option
def command(model: str, layout: str, processes: int, as_json: bool) -> None:
    """Prove a parallel layout on this machine.

    MODEL is a Hugging Face folder or hub id, of which only config.json is read: a small model of the same kind trains
    three steps in each combination of the layout's axes, in float64 and float32, and every value is compared with the
    same steps on one process. Ends with exit code 1 where one differs, and names the first that does, the axis and the
    likely cause.
    """
    with importing():
        from torchwright.train.layout import Layout
        from torchwright.train.prove import render
        from torchwright.train.prove.proof import prove

    screen = console()
    proof = prove(
        model,
        Layout.parse(layout),
        processes,
        announce=lambda run: None if as_json else screen.print(render.line(run)),
    )
    if as_json:
        print_json(render.plain(proof))
    else:
        screen.print(render.verdict(proof))
    if not proof.passed:
        raise click.exceptions.Exit(1)
