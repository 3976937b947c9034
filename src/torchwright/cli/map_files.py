"""`torchwright map`: batch inference over files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchwright.cli.failures import packages_of
from torchwright.cli.options import (
    adapter_option,
    byte_count,
    count_option,
    decoder_options,
    json_option,
    quiet_option,
    trust_option,
)
from torchwright.cli.printing import print_json, say
from torchwright.core.errors import WorkloadError
from torchwright.map.options import TASKS, MapOptions, ModelOptions, TaskOptions

if TYPE_CHECKING:
    from torchwright.map.run import Summary

BUNDLED = "bundled"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


class Shard(click.ParamType[tuple[int, int]]):
    """A turn among several runs, as 0/4."""

    name = "shard"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        place, slash, count = str(value).partition("/")
        if not (slash and place.isdigit() and count.isdigit() and int(place) < int(count)):
            self.fail(
                f"{value} is not I/N with I from 0 to N - 1; an array of Slurm with 4 tasks is --array=0-3.",
                param,
                ctx,
            )
        return int(place), int(count)


@click.command("map")
@click.argument("model", metavar="DIR|MODEL")
@click.argument("inputs", metavar="IN...", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE|FOLDER",
    help="A .jsonl or .parquet file, or a folder of parts.",
)
@click.option(
    "--task",
    "task_name",
    type=click.Choice(TASKS),
    show_default="what the model is for",
    help="What is done with each row.",
)
@click.option(
    "--openai", is_flag=True, help="The rows are requests of an OpenAI batch file; as --task openai."
)
@click.option(
    "--text-column",
    metavar="NAME",
    show_default="text, prompt and other usual names",
    help="What is read of a row: its text, its messages, or the name of its file.",
)
@click.option(
    "--pair-column", metavar="NAME", show_default="usual names", help="The second text, for scores of pairs."
)
@click.option(
    "--keep",
    multiple=True,
    metavar="NAME",
    show_default="id, where there is one",
    help="A column that the output repeats. Repeatable.",
)
@click.option(
    "--input-format", type=click.Choice(["jsonl", "text"]), help="Of files whose names do not tell."
)
@click.option(
    "--format", "output_format", type=click.Choice(["jsonl", "parquet"]), help="Of a folder's parts."
)
@count_option("--limit", help="Take the first N rows.")
@click.option(
    "--dry-run", is_flag=True, help="Plan: count rows and parts, and what is missing. Writes nothing."
)
@click.option("--truncate", is_flag=True, help="Cut texts that are longer than the model takes.")
@click.option("--all-labels", is_flag=True, help="Classifiers: the score of each label.")
@click.option("--chat", is_flag=True, help="Language models: a text is a user's message, not a beginning.")
@count_option(
    "--max-new-tokens",
    show_default="64, or as many as fit with messages",
    help="Language models: most tokens of an answer.",
)
@click.option("--temperature", type=float, metavar="X", show_default="0", help="How freely tokens are drawn.")
@click.option("--top-k", type=int, metavar="N", help="Draw among the N most likely tokens.")
@click.option("--top-p", type=float, metavar="X", help="Draw among the fewest that reach probability X.")
@click.option(
    "--min-p", type=float, metavar="X", help="Never draw one less likely than X times the likeliest."
)
@click.option("--seed", type=int, metavar="N", help="Seed of the draws, the same for each row.")
@click.option(
    "--request",
    metavar="JSON",
    help='More fields of each request in OpenAI\'s form, such as \'{"stop": ["\\n"]}\'; of a transcript, its options.',
)
@count_option(
    "--workers",
    show_default="as many as the artifact's threads leave room for",
    help="Processes, each pinned to cores of its own.",
)
@count_option("--threads", help="Threads of each.")
@count_option("--part-rows", show_default="the task's", help="Rows of a part.")
@click.option(
    "--part-timeout",
    "part_seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="A part that takes longer is computed again in halves, until the row is found, which is rejected. Without it "
    "nothing ends a worker that is stuck.",
)
@click.option(
    "--shard",
    type=Shard(),
    default="0/1",
    metavar="I/N",
    help="Compute every N-th part, from the I-th on: one run of a Slurm array.",
)
@click.option(
    "--ray", metavar="ADDRESS", help="Compute on a Ray cluster: auto on one of its nodes, or HOST:PORT."
)
@click.option("--strict", is_flag=True, help="End at the first rejected row, with exit code 2.")
@click.option("--overwrite", is_flag=True, help="Remove what another run left there.")
@decoder_options
@adapter_option
@click.option(
    "--kv-memory", callback=byte_count, metavar="BYTES", help="Language models: memory for keys and values."
)
@count_option(
    "--max-running",
    default=ModelOptions.max_running,
    show_default=True,
    help="Language models: rows that are computed side by side.",
)
@click.option(
    "--deterministic/--no-deterministic",
    default=None,
    show_default="wherever the model can",
    help="Language models: a row's answer is the same, bit for bit, beside any others.",
)
@click.option(
    "--served-model-name",
    "served_name",
    metavar="NAME",
    show_default="the folder's",
    help="OpenAI batch files: the model's name in the requests.",
)
@trust_option
@quiet_option
@json_option
def command(
    model: str,
    inputs: tuple[str, ...],
    dry_run: bool,
    openai: bool,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Answer every row of files, in parts that a restart keeps.

    IN is JSONL, JSON, CSV, Parquet, Arrow or text (a row a line), or - for standard input. It may be a folder of these,
    of pictures or of sounds. Text formats may end in .gz. MODEL may be `bundled`. Rows that cannot be answered go to
    rejected.jsonl with the reason; all others are written in the order of the input.

    The same command again computes only what is missing. Exit code 2 if no row was answered.
    """
    options = _options(model, inputs, openai, given)
    with packages_of("map", "the packages of `torchwright map`"):
        from torchwright.map import run as room
    with _progress(quiet or as_json) as progress:
        try:
            found = room.run(
                options,
                progress,
                lambda text: None if quiet else progress.say(f"torchwright: {text}"),
                dry=dry_run,
            )
        except KeyboardInterrupt:
            progress.say("torchwright: finished parts are kept; the same command goes on from there")
            raise
    if as_json:
        print_json(found)
    else:
        for line in _lines(found, options, dry_run):
            say(line)
    return 2 if found.rows and found.rejected == found.rows else 0


def _options(model: str, inputs: tuple[str, ...], openai: bool, given: dict[str, Any]) -> MapOptions:
    task = given.pop("task_name")
    if openai and task not in (None, "openai"):
        raise click.UsageError(f"--openai does not go with --task {task}.")
    names = (
        "trust",
        "quantize",
        "kv",
        "dtype",
        "adapter",
        "kv_memory",
        "max_running",
        "served_name",
        "deterministic",
    )
    opened = {name: given.pop(name) for name in names}
    request = _request(given)
    columns = {
        name: given.pop(name) for name in ("text_column", "pair_column", "truncate", "all_labels", "chat")
    }
    return MapOptions(
        model=ModelOptions(model=None if model == BUNDLED else model, **opened),
        task_name="openai" if openai else task,
        task=TaskOptions(keep=given.pop("keep"), request=request, **columns),
        inputs=inputs,
        **given,
    )


def _request(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that the options name."""
    text, most = given.pop("request"), given.pop("max_new_tokens")
    sampling = {name: value for name in SAMPLING if (value := given.pop(name)) is not None}
    try:
        request = json.loads(text) if text else {}
    except ValueError as error:
        raise click.BadParameter(f"it is not JSON ({error}).", param_hint="--request") from error
    if not isinstance(request, dict):
        raise click.BadParameter("it is not an object.", param_hint="--request")
    named = sampling | ({} if most is None else {"max_tokens": most})
    if twice := sorted(request.keys() & named.keys()):
        raise WorkloadError(f"{', '.join(twice)}: given by an option and in --request")
    return request | named


def _lines(found: Summary, options: MapOptions, dry: bool) -> Iterator[str]:
    from torchwright.report import wording

    place, count = options.shard
    whose = f" of shard {place}/{count}" if count > 1 else ""
    if dry:
        yield (
            f"{_count(found.rows, 'row')} in {_count(found.parts, 'part')}{whose}; {found.parts_there:,} are there, "
            f"{found.missing_parts:,} with {_count(found.missing_rows, 'row')} are missing"
        )
        if found.estimated_seconds is not None:
            rate = f"{found.rows_per_s:,.1f} rows/s"
            yield f"about {wording.seconds(found.estimated_seconds)} at the {rate} that were measured before"
        return
    there = f", {found.parts_there:,} of {found.parts:,} parts were there" if found.parts_there else ""
    rate = f" ({found.rows_per_s:,.1f} rows/s)" if found.rows_per_s else ""
    yield f"{_count(found.rows, 'row')}{whose} in {wording.seconds(found.seconds)}{rate}{there}: {found.out}"
    if found.rejected:
        where = found.rejected_file or "the parts' .rejected files"
        reason = f"; the first: {found.first_reason}" if found.first_reason else ""
        were = "was" if found.rejected == 1 else "were"
        yield f"{_count(found.rejected, 'row')} {were} rejected: {where}{reason}"
    if not found.joined:
        yield f"{found.missing_parts:,} parts are other shards' and are not there yet; the last one to end joins them"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    from torchwright.report.progress import RowProgress

    with RowProgress(quiet=quiet) as progress:
        yield progress
