"""The group of all verbs. A new verb is a file here with a `command`, and one entry in `VERBS`.

A verb imports its room when it runs, within `importing`: an interrupt that is raised in the middle of torch's start, by
way of its C++, ends the process with a core dump.
"""

from __future__ import annotations

import select
import sys

import click

from torchwright.cli import (
    bench,
    cache,
    chat,
    data,
    doctor,
    export,
    generate,
    imagine,
    list_models,
    map_files,
    optimize,
    plan_layout,
    profile,
    prove,
    pull,
    query,
    report,
    rm,
    segment,
    serve,
    techniques,
    time_report,
    train,
    transcribe,
    verify,
    why_stuck,
    workloads,
)
from torchwright.cli.printing import say

VERBS = (
    optimize,
    verify,
    bench,
    profile,
    export,
    cache,
    generate,
    chat,
    transcribe,
    segment,
    imagine,
    map_files,
    serve,
    pull,
    list_models,
    rm,
    plan_layout,
    prove,
    data,
    train,
    time_report,
    why_stuck,
    query,
    report,
    doctor,
    techniques,
    workloads,
)
"""In the order of the work, in which `--help` lists them."""


ELSEWHERE = {
    "run": "`torchwright chat MODEL` talks with a model, `torchwright generate` continues one text",
    "help": "`torchwright --help`, or `torchwright VERB --help`",
    "version": "`torchwright --version`",
    "quantize": "`torchwright optimize MODEL -o DIR` quantizes within an accuracy budget; generate, chat and serve "
    "have --quantize",
}
"""Verbs of other tools → what to type here."""


RENAMED = {"ett": "time-report"}
"""Earlier names of verbs, which keep working → their names now."""


class InOrder(click.Group):
    """Lists its verbs in the order of the work, not of the alphabet."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in RENAMED:
            args = [RENAMED[args[0]], *args[1:]]
        if args and args[0] in ELSEWHERE:
            raise click.UsageError(f"No such command '{args[0]}': {ELSEWHERE[args[0]]}.", ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    import platform
    from importlib.metadata import version

    say(
        f"torchwright {version('torchwright')} (torch {version('torch')}, Python {platform.python_version()})"
    )
    context.exit()


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show versions and exit.",
)
def cli() -> None:
    """Give any PyTorch model back faster, within an accuracy budget, and prove it.

    MODEL is a Hugging Face folder or hub id, a GGUF file, an artifact folder, or `package.module:factory`. The factory
    returns a module and its example inputs. Without MODEL the bundled language model is taken.

    NO_COLOR=1 in the environment turns colors off.
    """


for verb in VERBS:
    cli.add_command(verb.command)


def run(words: list[str]) -> int:
    """Run click's own `main` and return its exit code; its translations of Ctrl-C and of a closed pipe are undone."""
    try:
        result = cli.main(words, prog_name="torchwright", standalone_mode=False)
    except click.Abort as abort:
        raise (abort.__cause__ or KeyboardInterrupt()) from None
    except SystemExit as end:  # with 1: of rich, which knows the cause, or of click, which does not
        if isinstance(end.__context__, BrokenPipeError) or _reader_left():
            raise BrokenPipeError from None
        raise
    return result if isinstance(result, int) else 0


def _reader_left() -> bool:
    """Check whether standard output is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # Windows has no such call; a test's output is no file
        return False
