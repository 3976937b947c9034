"""`torchwright train`: a run from its file, or from a model and its data; alone or under torchrun."""

from __future__ import annotations

import dataclasses
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from torchwright.cli.options import json_option, parse_settings, quiet_option, set_option
from torchwright.cli.printing import console, print_result, say
from torchwright.core.process.interrupts import importing

SIGNALLED = 128


@click.command("train")
@click.argument("run", metavar="[RUN.toml]", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", metavar="DIR", help="In place of a run file: a Hugging Face folder or hub id.")
@click.option(
    "--data", multiple=True, metavar="FILE|FOLDER", help="With --model: what is trained on. Repeatable."
)
@click.option(
    "--lora",
    is_flag=False,
    flag_value="",
    metavar="r=16,alpha=32,…",
    help="With --model: train adapters; the fields of [lora], several targets as q_proj+v_proj.",
)
@click.option(
    "--dpo",
    is_flag=False,
    flag_value="",
    metavar="beta=0.1,loss=…",
    help="With --model: learn which answer is preferred, from pairs; the fields of [preference].",
)
@click.option(
    "--draft",
    metavar="eagle3|mtp",
    help="With --model: train a head that proposes tokens to it, or its MTP layer; `serve MODEL --draft OUT/model`.",
)
@click.option("--quantize", metavar="SCHEME", help="With --draft: the scheme that the model is served in.")
@click.option(
    "--regenerate",
    is_flag=False,
    flag_value="",
    metavar="temperature=0.8,…",
    help="With --draft: the model writes the data's answers anew; the fields of [regenerate].",
)
@click.option(
    "--from", "start", metavar="DIR", help="With --draft: go on from the head in a folder, of any origin."
)
@click.option("--chat", is_flag=True, help="With --model: rows are conversations; the answers are learnt.")
@click.option(
    "--epochs",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="With --model: how often the data are read; 3 times under ten million tokens, else once.",
)
@click.option(
    "--no-validation",
    is_flag=True,
    help="With --model: train on all of the data; else 5% of it, 512 rows or files at the most, are held out.",
)
@set_option
@click.option("--merge", is_flag=True, help="Write the model with its adapters, or MTP layer, in it as well.")
@click.option(
    "-o", "--out", metavar="DIR", type=click.Path(file_okay=False, path_type=Path), help="With --model."
)
@click.option("--fresh", is_flag=True, help="Move an earlier run in the same folder aside and begin anew.")
@click.option("--resume", is_flag=True, help="Insist on a checkpoint to continue from.")
@click.option(
    "--watch",
    metavar="OUT",
    type=click.Path(file_okay=False, path_type=Path),
    help="In place of a run file: follow the run that is at work in this folder.",
)
@click.option(
    "--profile", metavar="A:B", help="Record steps A to B: OUT/profile/ has a trace, idle time, every wait."
)
@click.option(
    "--trust", is_flag=True, help="Take the compiled code in the run's folder, even if another user made it."
)
@quiet_option
@json_option
def command(
    run: Path | None,
    model: str | None,
    data: tuple[str, ...],
    lora: str | None,
    dpo: str | None,
    draft: str | None,
    quantize: str | None,
    regenerate: str | None,
    start: str | None,
    chat: bool,
    epochs: float | None,
    no_validation: bool,
    settings: tuple[str, ...],
    merge: bool,
    out: Path | None,
    fresh: bool,
    resume: bool,
    watch: Path | None,
    profile: str | None,
    trust: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Train a language model, a draft head for one, an image classifier, a speech recognizer or a recommender.

    The run file says what is trained, and how; docs/train.md and docs/recommenders.md have some to begin with.
    `--model DIR --data FILE -o OUT` needs none: the one that it makes is printed, and stays in OUT.

    The same command goes on from the last checkpoint of a run that ended before its time, bit for bit; SIGTERM and
    Ctrl-C save one and leave. Under torchrun every process runs this command, and a process that dies has all of them
    start again: `torchrun --nproc-per-node 4 --max-restarts 20 --no-python torchwright train RUN.toml`.
    """
    if fresh and resume:
        raise click.UsageError("--fresh begins anew and --resume goes on: give one of them")
    if watch is not None:
        if run is not None or model is not None:
            raise click.UsageError("--watch follows a run that was started elsewhere: give its folder alone")
        from torchwright.train.run.observe.watch import watch as follow

        follow(watch, console())
        return 0
    if (run is None) == (model is None):
        raise click.UsageError("give either a run file or --model")
    if draft is None and any(value is not None for value in (quantize, regenerate, start)):
        raise click.UsageError("--quantize, --regenerate and --from go with --draft")
    first = int(os.environ.get("RANK", "0")) == 0
    how: dict[str, Any] = {"fresh": fresh, "resume": resume, "live": not quiet, "trust": trust}
    if profile is not None:
        with importing():
            from torchwright.train.run.observe.profiling import parse_steps
        how["profile"] = parse_steps(profile)
    if run is not None:
        if data or lora is not None or dpo is not None or draft or chat or out or epochs or no_validation:
            raise click.UsageError(
                "--data, --lora, --dpo, --draft, --chat, --epochs, --no-validation and --out go with --model: a run "
                "file says them itself"
            )
        outcome = _from_file(run, merge, parse_settings(settings), how)
    else:
        assert model is not None
        if not data or out is None:
            raise click.UsageError("--model needs --data and --out")
        if dpo is not None and chat:
            raise click.UsageError("--chat learns from conversations and --dpo from pairs: give one of them")
        options = {"lora": lora, "dpo": dpo, "chat": chat, "merge": merge, "epochs": epochs}
        options |= {"no_validation": no_validation, "settings": parse_settings(settings)}
        if draft is not None:
            options |= {"draft": draft, "quantize": quantize, "regenerate": regenerate, "start": start}
        outcome = _from_words(model, data, out, options, how, show=first and not quiet)
    if first:
        title = "Trained" if outcome.signal is None else "Saved, and left as asked; the same command goes on"
        print_result(title, dataclasses.asdict(outcome), as_json)
        if not as_json:
            _print_next(outcome.out)
    return 0 if outcome.signal is None else SIGNALLED + outcome.signal


def _print_next(out: Path) -> None:
    """Print the page of a run and the command that uses what it has left."""
    from torchwright.train.run.observe.history import read_history
    from torchwright.train.run.observe.next_commands import next_commands
    from torchwright.train.run.observe.page import PAGE

    screen = console()
    screen.print(f"page: {out / PAGE}", markup=False, soft_wrap=True)
    for following in next_commands(out, read_history(out))[:1]:
        screen.print(f"next: {following.command}", markup=False, soft_wrap=True)


def _from_file(path: Path, merge: bool, settings: dict[str, Any], how: dict[str, Any]) -> Any:
    with importing():
        from torchwright.train.kinds import DEFAULT, kind_of, verb

        kind = kind_of(path)
        train = verb(kind, "train")
    if settings and kind not in (DEFAULT, "draft"):
        raise click.UsageError(f"--set changes run files of language models and drafts: change {path} itself")
    if kind == "draft":
        how |= _measures()
    return train(path, merge=merge, **({"settings": settings} if settings else {}), **how)


def _measures() -> dict[str, Any]:
    """Return what measures a draft's served gain: the server's engine, where the server is installed."""
    if find_spec("msgspec") is None:
        say("the served gain is left out: pip install 'torchwright[serve]'", err=True)
        return {}
    from torchwright.serve.engine.served_gain import served_gain

    return {"measure": served_gain}


def _from_words(
    model: str, data: tuple[str, ...], out: Path, options: dict[str, Any], how: dict[str, Any], *, show: bool
) -> Any:
    with importing():
        from torchwright.hub.folder import Wanted, resolve
        from torchwright.train.kinds import kind_of_model, verb
        from torchwright.train.run.runtime import torchrun

        wanted = Wanted("the Hugging Face folder or hub id of a model that is to be trained")
        kind = "draft" if "draft" in options else kind_of_model(resolve(model, wanted))
        words = verb(kind, "words")
        if kind == "draft":
            how |= _measures()
    fresh = how.pop("fresh")
    with words(model, data, world=torchrun.started() or 1, out=out, fresh=fresh, **options) as (text, train):
        if show:
            say(text, err=True)
        return train(**how)
