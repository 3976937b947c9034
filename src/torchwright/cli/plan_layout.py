"""`torchwright plan-layout`: how a model would be laid out over a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import console, print_json
from torchwright.core.process.interrupts import importing

if TYPE_CHECKING:
    from torchwright.train.planning.cluster import Cluster

OF_TOKENS = (
    "tokens_per_step",
    "context",
    "precision",
    "gather",
    "optimizer",
    "eager",
    "fix",
    "tp_across_nodes",
)
"""Parameters that are for language models."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def _tokens(context: click.Context, parameter: click.Parameter, value: str) -> int:
    text = value.strip().upper()
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdecimal() or not int(number):
        raise click.BadParameter(f"'{value}' is no number of tokens such as 4M.", context, parameter)
    return int(number) * unit


@click.command("plan-layout")
@click.argument("model")
@click.option("--nodes", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Machines.")
@click.option(
    "--devices-per-node",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Devices of one machine, which share its fast links.",
)
@click.option(
    "--device",
    metavar="h100|h200|b200|a100|cpu|FILE",
    default="h100",
    show_default=True,
    help="A well-known device, this machine's CPU, or a TOML file that describes one.",
)
@click.option(
    "--tokens-per-step",
    callback=_tokens,
    default="4M",
    show_default=True,
    metavar="N",
    help="Over all devices; K, M and G are powers of 1024.",
)
@click.option("--context", callback=_tokens, default="8K", show_default=True, help="Tokens of a sequence.")
@click.option(
    "--precision",
    default="bf16",
    show_default=True,
    metavar="fp32|bf16|float8_rowwise|…",
    help="As in a run file.",
)
@click.option(
    "--gather",
    type=click.Choice(["float8"]),
    help="As in a run file: what float8 layers' matrices are gathered in.",
)
@click.option(
    "--optimizer",
    metavar="adamw|adamw8bit",
    default="adamw",
    show_default=True,
    help="How many bytes of state each parameter has.",
)
@click.option("--eager", is_flag=True, help="Without torch.compile: more of each step goes through memory.")
@click.option(
    "--fix", default="", metavar="AXIS=N,…", help="Only layouts with these degrees, such as tp=8,pp=1."
)
@click.option("--tp-across-nodes", is_flag=True, help="Let tensor parallelism leave the node.")
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="How many to show.")
@json_option
def command(
    model: str,
    nodes: int,
    devices_per_node: int,
    device: str,
    tokens_per_step: int,
    context: int,
    precision: str,
    gather: Literal["float8"] | None,
    optimizer: str,
    eager: bool,
    fix: str,
    tp_across_nodes: bool,
    top: int,
    as_json: bool,
) -> None:
    """Rank the layouts in which a model could train on a cluster.

    MODEL is a Hugging Face folder, a config.json, a well-known name such as llama-3.1-8b, or a recommender's RUN.toml,
    which says batch and tables itself. Nothing is run: memory and
    time are estimated from the model's shape and a few published numbers of the device and its links.
    """
    with importing():
        from torchwright.train.planning import render
        from torchwright.train.planning.cluster import Cluster, read_device, this_machine
        from torchwright.train.planning.job import make_job
        from torchwright.train.planning.models import read_model
        from torchwright.train.planning.rank import rank, read_degrees

    described = this_machine(devices_per_node) if device == "cpu" else read_device(device)
    cluster = Cluster(device=described, nodes=nodes, devices_per_node=devices_per_node)
    if model.endswith(".toml"):
        _recommender(Path(model), cluster, top, as_json)
        return
    ranking = rank(
        read_model(model),
        make_job(tokens_per_step, context, precision, optimizer, compile=not eager, gather=gather),
        cluster,
        fixed=read_degrees(fix),
        tp_across_nodes=tp_across_nodes,
    )
    if as_json:
        print_json(render.plain(ranking, top=top))
    else:
        console().print(render.table(ranking, top=top))


def _recommender(path: Path, cluster: Cluster, top: int, as_json: bool) -> None:
    """Rank the groups and intervals of a recommender's tables."""
    context = click.get_current_context()
    for name in OF_TOKENS:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{name.replace('_', '-')} is for language models: {path} says what is trained"
            )
    with importing():
        from torchwright.train.kinds import kind_of, verb
        from torchwright.train.recommender import plan_render

    found = verb(kind_of(path), "plan-layout")(path, cluster)
    if as_json:
        print_json(plan_render.plain(found[:top], len(found)))
    else:
        console().print(plan_render.table(found[:top], len(found)))
