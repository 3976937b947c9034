"""`torchwright data`: training data looked at, and made into shards, before a run."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchwright.cli.options import count_option, json_option, parse_settings
from torchwright.cli.printing import console, print_json
from torchwright.core.errors import WorkloadError
from torchwright.core.process.interrupts import importing

if TYPE_CHECKING:
    from torchwright.train.run.config.run import Run
    from torchwright.train.run.observe.survey import FileSurvey

BROKEN_SHOWN = 5


def _what(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the run that is looked at, and its folder: a run file's, or that of files for a model."""

    @functools.wraps(command)
    def resolved(
        what: tuple[str, ...],
        model: Path | None,
        context: int | None,
        dpo: bool,
        settings: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        run, folder = _run(what, model, context, dpo, settings)
        with importing():
            from torchwright.train.kinds import DEFAULT, verb

            work = verb(run.kind or DEFAULT, f"data {command.__name__}")
        return command(run, folder, work, **rest)

    for option in (
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="NAME=VALUE",
            help="A field of the run file's [data], as in text_column=body; the value is JSON or text. Repeatable.",
        ),
        click.option("--dpo", is_flag=True, help="FILES: rows are pairs of answers, one preferred."),
        count_option("--context", help="FILES: tokens of a window."),
        click.option(
            "--model",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            metavar="FOLDER",
            show_default="the bundled one",
            help="FILES: whose tokenizer and chat template they are read with.",
        ),
        click.argument("what", metavar="RUN.toml|FILES...", nargs=-1, required=True),
    ):
        resolved = option(resolved)
    return resolved


@click.group("data")
def command() -> None:
    """Inspect training data, and convert it to shards, or to rows for a recommender.

    The data of RUN.toml, or FILES (globs and folders too) for a training run. docs/train.md lists the formats.
    """


@command.command("check")
@_what
@click.option(
    "--strict", is_flag=True, help="Exit code 2 for rows that are broken or left out, as for a file."
)
@json_option
def check(run: Any, folder: Path, survey: Any, strict: bool, as_json: bool) -> int:
    """Say what is read, skipped and refused, with the line of each broken row. Writes nothing."""
    found, context = survey(run, folder), getattr(run, "context", None)
    if as_json:
        print_json({"context": context, "files": found})
    else:
        _print_survey(found, context)
    lost = strict and any(seen.report.broken or seen.lost for seen in found)
    return 2 if lost or any(seen.refused for seen in found) else 0


@command.command("show")
@_what
@click.option(
    "--window",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="I",
    help="Which one, in the order of training.",
)
@json_option
def show(run: Any, folder: Path, sample: Any, window: int, as_json: bool) -> None:
    """Show a window as the model sees it: documents, positions, and the tokens that are trained on.

    For pictures and sounds, show one sample: its file, the model's input, its class or tokens.

    Tokens are kept where the run keeps them; those of FILES go again.
    """
    from torchwright.train.run.observe.sample import Sample

    with tempfile.TemporaryDirectory() as temporary:
        if not run.out:
            run = run.model_copy(update={"out": temporary})
        found = sample(run, folder, window)
    if as_json:
        print_json(found)
        return
    from rich.text import Text

    screen = console()
    if not isinstance(found, Sample):
        screen.print("\n".join(found.lines), markup=False, soft_wrap=True)
        return
    filled = f"{found.tokens:,} of {run.context:,} places hold tokens, {found.labels:,} labels"
    screen.print(f"{found.where}: {filled}", markup=False)
    for segment in found.segments:
        name = f"document {segment.document}, position {segment.position}, {len(segment.ids)} tokens, "
        screen.print(Text(name + ("trained on" if segment.trained else "not trained on"), "cyan"))
        text = segment.text or " ".join(map(str, segment.ids))
        screen.print(Text(text, "bold green" if segment.trained else "dim"))


@command.command("pack")
@_what
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Where the shards go."
)
@click.option("--strict", is_flag=True, help="Stop at the first broken row.")
@json_option
def pack(run: Run, folder: Path, write: Any, out: Path, strict: bool, as_json: bool) -> None:
    """Write token shards with masks and document starts, which a run reads without a tokenizer."""
    if strict:
        run = run.model_copy(update={"data": run.data.model_copy(update={"strict": True})})
    made = write(run, folder, out)
    if as_json:
        print_json([{"shard": path, "report": report} for path, report in made])
        return
    for path, report in made:
        message = ""
        if report is not None:
            message = f": {report.documents:,} documents, {report.tokens:,} tokens"
            message += f", {report.broken:,} broken rows left out"
        console().print(f"{path}{message}", markup=False, soft_wrap=True)


def _run(
    what: tuple[str, ...], model: Path | None, context: int | None, dpo: bool, settings: tuple[str, ...]
) -> tuple[Any, Path]:
    """The run, of any kind, and the folder that its paths start from. That of files has no `out`."""
    with importing():
        from torchwright.train.kinds import DEFAULT, kind_of, kind_of_model, verb
        from torchwright.train.run.config.read import parse_run
        from torchwright.workloads.texts import BUNDLED

    # The fields of [data] go by their short names as well.
    fields = {name.removeprefix("data."): value for name, value in parse_settings(settings).items()}
    if len(what) == 1 and what[0].endswith(".toml"):
        if model is not None or context is not None or dpo:
            raise WorkloadError(
                "--model, --context and --dpo are for files", found=what[0], next="change the run file"
            )
        path = Path(what[0])
        kind = kind_of(path)
        run = verb(kind, "read")(path)
        if fields and kind != DEFAULT:
            raise WorkloadError("--set is for language models", found=what[0], next="change the run file")
        if fields:
            message = run.model_dump(mode="json", exclude_none=True)
            run = parse_run({**message, "data": {**message["data"], **fields}}, str(path))
        return run, path.parent
    chosen = model or BUNDLED
    if (kind := kind_of_model(chosen)) != DEFAULT:
        if context is not None or dpo:
            raise WorkloadError("--context and --dpo are for language models", found=str(chosen))
        return verb(kind, "files")(str(chosen), what, Path.cwd(), fields), Path.cwd()
    size = context or 1024
    data = {"train": list(what), **fields}
    described = {"out": "", "tokens": size, "batch_tokens": size, "context": size, "precision": "fp32"}
    described |= {"model": {"folder": str(chosen.absolute())}, "data": data}
    if dpo:
        described["preference"] = {}
    return parse_run(described, "the command line"), Path.cwd()


def _print_survey(found: list[FileSurvey], context: int | None) -> None:
    """Print the survey; `context` is given for language models, whose rows count tokens."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    table = Table(box=None, padding=(0, 1))
    names = [
        "file",
        "of",
        "holds",
        "rows",
        "empty",
        "broken",
        "documents",
        "tokens",
        "trained",
        f"over {context}",
    ]
    if context is None:
        names = [*names[:6], "kept"]
    for name in names:
        table.add_column(name, justify="left" if name in ("file", "of", "holds") else "right")
    for seen in found:
        report = seen.report
        counts = [report.rows, report.empty, report.broken, report.documents, report.tokens, report.trained]
        counts.append(seen.longer)
        holds = report.layout or report.form or seen.holds
        message = (f"{count:,}" for count in counts[: len(names) - 3])
        table.add_row(Text(seen.file.name), Text(seen.source), holds, *message)
    screen.print(table)
    for seen in found:
        for number, reason in seen.report.listed[:BROKEN_SHOWN]:
            screen.print(f"{seen.file}:{number}: {reason}", markup=False, style="yellow", soft_wrap=True)
        if (more := seen.report.broken - BROKEN_SHOWN) > 0:
            message = f"{seen.file}: {more:,} broken rows more; --json lists up to 100"
            screen.print(message, markup=False, style="yellow")
        for note, count in seen.report.notes.items():
            message = f"{seen.file}: {note} ({count:,} of {seen.report.documents:,} documents)"
            screen.print(message, markup=False, style="yellow", soft_wrap=True)
        if seen.lost:
            message = (
                f"{seen.file}: {seen.lost:,} documents would be left out: their labels lie behind a window"
            )
            screen.print(message, markup=False, style="yellow", soft_wrap=True)
        if seen.refused:
            screen.print(f"refused: {seen.refused}", markup=False, style="bold red", soft_wrap=True)
    lengths: dict[int, int] = {}
    for seen in found:
        for power, count in seen.lengths.items():
            lengths[power] = lengths.get(power, 0) + count
    for power, count in sorted(lengths.items()):
        bar = "█" * -(-40 * count // max(lengths.values()))
        screen.print(f"up to {power:>9,} tokens {count:>12,} {bar}", markup=False)
