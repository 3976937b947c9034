"""`torchwright query`: SQL, and questions with a name, over what runs leave."""

from __future__ import annotations

from pathlib import Path

import click

from torchwright.cli.options import Duration, json_option
from torchwright.cli.printing import console, print_json, say


@click.command("query")
@click.argument("words", metavar="RUN... [QUESTION]", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List the questions with a name.")
@click.option("--schema", is_flag=True, help="List the tables and their columns.")
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on standard output.")
@click.option(
    "--rows",
    "limit",
    type=click.IntRange(1, 500_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="Rows of the answer at most.",
)
@click.option(
    "--seconds",
    type=Duration(),
    default="60s",
    show_default=True,
    metavar="TIME",
    help="Stop a query that takes longer.",
)
@click.option(
    "--page",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the answers to all questions with a name as a page; all words are runs then.",
)
def command(
    words: tuple[str, ...],
    listing: bool,
    schema: bool,
    as_json: bool,
    as_csv: bool,
    limit: int,
    seconds: float,
    page: Path | None,
) -> None:
    """Ask what runs left on the disk, in SQL or by a question's name.

    RUN is a folder of `torchwright train`, a folder with dumps of flight recorders, or the log of a server. QUESTION is
    a name that --list shows, or SQL over the tables that --schema shows: ledger, figures, checkpoints, flight records
    and logs of all ranks and attempts.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv are two formats; give one")
    if listing or schema:
        _describe(listing, as_json, as_csv, words)
        return
    runs, question = _parted(words, page)
    from torchwright.train.query import questions, show
    from torchwright.train.query.collect import collect
    from torchwright.train.query.database import Database

    known = None if question is None else questions.named(question)
    rows = collect([Path(run) for run in runs])
    database = Database(rows)
    notes = show.notes(rows)
    if page is not None:
        from torchwright.train.query.page import write

        write(database, rows, runs, page)
        if as_json:
            print_json({"page": page, "problems": rows.problems})
        else:
            say(page)
    else:
        answer = database.ask(known.sql if known else str(question), rows=limit, seconds=seconds)
        lacking = None if known is None else show.missing(known.tables, rows)
        notes += [lacking] if lacking is not None else []
        if as_json:
            print_json(show.plain(answer, rows))
        elif as_csv:
            say(show.as_csv(answer), nl=False)
            notes += [f"the first {limit:,} rows; --rows takes more"] if answer.cut else []
        else:
            show.print_wide(console(), answer)
    for note in notes:
        say(f"note: {note}", err=True)


def _describe(listing: bool, as_json: bool, as_csv: bool, words: tuple[str, ...]) -> None:
    """Print the questions or the tables, which are those of every run."""
    from torchwright.train.query import show

    if words or as_csv:
        raise click.UsageError("--list and --schema take no run, and --json alone")
    if as_json:
        print_json(show.plain_list() if listing else show.plain_schema())
    else:
        console().print(show.listed() if listing else show.schema())


def _parted(words: tuple[str, ...], page: Path | None) -> tuple[list[str], str | None]:
    """Part the runs from the question, which is the last word."""
    if page is not None:
        if not words:
            raise click.UsageError("--page needs a run")
        return list(words), None
    if len(words) < 2:
        raise click.UsageError(
            'give a run and a question, as `torchwright query RUN "slowest rank"`; --list shows the questions, '
            "--schema the tables for SQL"
        )
    return list(words[:-1]), words[-1]
