"""The command line: a verb for each room. It parses, calls and prints.

Only click, `torchwright.facts` and the engine's options are imported here; every verb imports its room when it runs, so
that `--help` never waits for torch.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

import click

from torchwright.errors import TorchwrightError
from torchwright.facts import Budget, Objective
from torchwright.serve.options import Options

if TYPE_CHECKING:
    from rich.console import Console

BUDGET, ENGINE = Budget(), Options()
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 is success, 1 a regression that `verify` found or an internal fault (with its traceback), 2 something that
    the user can mend (one paragraph, no traceback), 130 Ctrl-C. With `--json` an error is printed as JSON on
    standard output too.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except (
        BrokenPipeError
    ):  # the reader left, as `| head` does; click returns 1 where it is the one to notice
        _discard_stdout()
        return 1
    except click.ClickException as error:
        error.show()
        return _failed(words, type(error).__name__, error.format_message(), error.exit_code)
    except TorchwrightError as error:
        click.echo(f"torchwright: {error}", err=True)
        return _failed(words, type(error).__name__, str(error), error.exit_code, error)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return _failed(words, "Interrupted", "interrupted", INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _internal_fault(words, error)
        full = _disk_full(error)
        click.echo(f"torchwright: {full}", err=True)
        return _failed(words, "DiskFull", str(full), full.exit_code, full)
    except Exception as error:
        return _internal_fault(words, error)


def _run(words: list[str]) -> int:
    """Click's own `main`, with its exit code returned and its translation of Ctrl-C undone."""
    try:
        result = cli.main(words, prog_name="torchwright", standalone_mode=False)
    except click.Abort as abort:
        raise (abort.__cause__ or KeyboardInterrupt()) from None
    return result if isinstance(result, int) else 0


def _failed(
    words: list[str], kind: str, message: str, code: int, error: TorchwrightError | None = None
) -> int:
    """Say the failure on standard output too if JSON was asked for; returns the exit code."""
    if "--json" in words:
        facts: dict[str, Any] = {"type": kind, "message": message, "exit_code": code}
        if error is not None:
            facts |= {"found": error.found, "allowed": error.allowed, "next": error.next}
        try:
            _print_json({"error": facts})
            sys.stdout.flush()
        except OSError:  # standard output is what failed: standard error has said it
            _discard_stdout()
    return code


def _internal_fault(words: list[str], error: Exception) -> int:
    import traceback

    traceback.print_exception(error)
    click.echo(
        "torchwright: this is a fault in Torchwright, not in what you asked. Please report it with the lines "
        "above and the output of `torchwright doctor`.",
        err=True,
    )
    return _failed(words, type(error).__name__, f"internal fault: {error}", 1)


def _disk_full(error: OSError) -> TorchwrightError:
    where = f" while writing {error.filename}" if error.filename else ""
    return TorchwrightError(
        f"the disk is full{where}",
        found=os.strerror(error.errno or 0),
        next="free some space, or choose another folder with `-o DIR`; nothing half-written was left behind",
    )


def _discard_stdout() -> None:
    """Keep Python from complaining about the buffer it flushes at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # standard output is no file, as in a test
        return


# ---------------------------------------------------------------------------------------------------- options


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, parameter)
    return value


def _known_device(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        from torchwright.devices import check_name

        check_name(value)
    return value


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return _serve_command().parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


def _serve_command() -> ModuleType:
    """The room of `serve`, whose packages are an extra."""
    try:
        from torchwright.serve import command
    except ModuleNotFoundError as error:
        raise TorchwrightError(
            "the server's packages are not installed",
            found=str(error),
            next="`pip install 'torchwright[serve]'`",
        ) from error
    return command


def _version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    import platform
    from importlib.metadata import version

    click.echo(
        f"torchwright {version('torchwright')} (torch {version('torch')}, Python {platform.python_version()})"
    )
    context.exit()


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
quiet_option = click.option("--quiet", is_flag=True, help="No live progress; the result alone.")
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Load native code that an artifact carries even though this user did not build it here.",
)


def _shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How much is run in one call. Where nothing is given, the workload decides."""
    positive = click.IntRange(min=1)
    for name, help in reversed(
        (
            ("--batch", "Sequences or images in one call."),
            ("--prompt-tokens", "Language models: tokens of the prompt."),
            ("--new-tokens", "Language models: tokens to generate."),
        )
    ):
        command = click.option(name, type=positive, metavar="N", show_default="the workload's", help=help)(
            command
        )
    return command


def _decoder_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a language model runs on the native decoder where no search has decided it. The decoder knows the values."""
    for name, metavar, default, help in reversed(
        (
            (
                "--quantize",
                "none|w8a8|w4a8|w4a16[:group_size=N]",
                "none",
                "Weights: as they are, 8 bits, or 4 bits in groups of 32, 64 or 128, rounded to nearest.",
            ),
            ("--kv", "bf16|int8|fp32", "the dtype's", "Cached keys and values."),
            ("--dtype", "bf16|fp32", "bf16 where the compiled kernels are", "Everything else."),
        )
    ):
        command = click.option(name, metavar=metavar, show_default=default, help=help)(command)
    return command


# ------------------------------------------------------------------------------------------------------ verbs


class InOrder(click.Group):
    """Lists its verbs in the order of the work, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


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

    MODEL is a Hugging Face folder or hub id, `package.module:factory` (returns a module and its example inputs),
    or an artifact folder. Without MODEL the bundled language model is taken.
    """


@cli.command()
@click.argument("model", required=False)
@click.option(
    "--max-drop",
    type=click.FloatRange(min=0),
    metavar="DROP",
    default=BUDGET.max_drop,
    show_default=True,
    callback=_finite,
    help="Most that the metric may lose; 0.01 is one per cent.",
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
    type=click.FloatRange(min=0, min_open=True),
    default=BUDGET.time_seconds,
    show_default=True,
    metavar="SECONDS",
    callback=_finite,
    help="How long the search may take.",
)
@_shape_options
@click.option(
    "--eval-text",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="FILE",
    show_default="the workload's",
    help="Language models: the text the metric is measured on.",
)
@click.option(
    "--with",
    "with_steps",
    multiple=True,
    metavar="TECH[:opt=value,…]",
    help="Apply this technique; an error if it cannot run here. Repeatable.",
)
@click.option("--without", multiple=True, metavar="TECH", help="Never try this technique. Repeatable.")
@click.option(
    "--device",
    metavar="cpu|cuda",
    callback=_known_device,
    show_default="cuda where there is one, else cpu",
    help="Where to run.",
)
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
@quiet_option
@json_option
def optimize(
    model: str | None,
    with_steps: tuple[str, ...],
    without: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the fastest recipe within the budget.

    Every technique is tried in a fresh process against the original; the waterfall at the end says for each one
    what it gained, what it cost, and why it was kept or dropped. The result is written as an artifact.
    """
    from torchwright import api
    from torchwright.report.terminal import LiveProgress, waterfall

    with LiveProgress(quiet=quiet) as progress:
        result = api.optimize_cli(
            model,
            with_steps=list(with_steps),
            without=list(without),
            on_event=progress,
            command=shlex.join(["torchwright", *sys.argv[1:]]),
            **options,
        )
    path = None if result.path is None else str(result.path)
    if as_json:
        _print_json({"path": path, "recipe": dataclasses.asdict(result.recipe)})
    else:
        _console().print(waterfall(result.recipe, artifact=path))


@cli.command()
@click.argument("directory", metavar="DIR")
@trust_option
@json_option
def verify(directory: str, trust: bool, as_json: bool) -> None:
    """Measure an artifact again; exit 1 on a regression.

    Speed and metric are held against the recipe, so that CI can run it.
    """
    from torchwright import api

    _print_result(f"verify {directory}", api.verify(directory, trust=trust), as_json)


@cli.command()
@click.argument("model", metavar="DIR|MODEL")
@_shape_options
@_decoder_options
@trust_option
@json_option
def bench(model: str, trust: bool, as_json: bool, **options: Any) -> None:
    """Time an artifact or a model as it is.

    With --quantize, --kv or --dtype a language model runs on the native decoder instead, without a search.
    """
    from torchwright import api

    _print_result(f"bench {model}", api.bench(model, trust=trust, **options), as_json)


@cli.command()
@click.argument("model", metavar="[DIR|MODEL]", required=False)
@click.option(
    "--prompt", required=True, metavar="TEXT", help="The text to continue; - reads it from standard input."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="64, or as many as fit",
    help="Most tokens to generate.",
)
@click.option(
    "--temperature",
    type=float,
    metavar="X",
    show_default="0, the most likely token",
    help="How freely tokens are drawn.",
)
@click.option("--top-k", type=int, metavar="N", help="Draw among the N most likely tokens.")
@click.option(
    "--top-p", type=float, metavar="X", help="Draw among the fewest tokens that reach probability X."
)
@click.option(
    "--min-p", type=float, metavar="X", help="Never draw a token less likely than X times the most likely."
)
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="Seed of the draws."
)
@_decoder_options
@trust_option
@json_option
def generate(
    model: str | None,
    prompt: str,
    max_new_tokens: int | None,
    seed: int,
    quantize: str | None,
    kv: str | None,
    dtype: str | None,
    trust: bool,
    as_json: bool,
    **sampling: float | None,
) -> None:
    """Continue a text, printed as it appears.

    An artifact answers as it was optimized; any other language model on the native decoder, without a search.
    """
    from torchwright import answer

    found = answer.generate(
        model,
        _standard_input() if prompt == "-" else prompt,
        max_new_tokens=max_new_tokens,
        seed=seed,
        sampling={name: value for name, value in sampling.items() if value is not None},
        quantize=quantize,
        kv=kv,
        dtype=dtype,
        trust=trust,
        on_text=_nothing if as_json else _write,
        on_notice=lambda text: click.echo(f"torchwright: {text}", err=True),
    )
    if as_json:
        _print_json(found)
    elif sys.stdout.isatty():
        click.echo()


@cli.command()
@click.argument("model", metavar="[DIR|MODEL]", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Where to listen.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    metavar="N",
    help="0 takes a free one.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="Answer only requests with this key. Repeatable.",
)
@click.option(
    "--max-running",
    type=click.IntRange(min=1),
    default=ENGINE.max_running,
    show_default=True,
    metavar="N",
    help="Answers in progress at the same time.",
)
@click.option(
    "--kv-memory",
    callback=_bytes,
    metavar="SIZE",
    show_default="half of the available memory",
    help="Memory for keys and values, such as 4GiB.",
)
@click.option(
    "--max-context",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="the model's",
    help="Tokens of prompt and answer together.",
)
@click.option(
    "--speculate",
    type=click.Choice(["ngram", "none"]),
    default=ENGINE.speculate,
    show_default=True,
    help="Propose tokens from what stands in the text already; the answer is the same.",
)
@click.option("--log-requests", is_flag=True, help="Log a line for every request, not only for faults.")
@click.option(
    "--deterministic/--no-deterministic",
    default=ENGINE.deterministic,
    show_default=True,
    help="The same request gives the same answer, alone or in any company.",
)
@_decoder_options
@trust_option
def serve(model: str | None, **options: Any) -> int:
    """Serve a language model or a sentence encoder by OpenAI's API.

    An artifact answers as it was optimized; any other language model runs on the native decoder. Ctrl-C lets
    running requests finish, a second one stops at once.
    """
    command = _serve_command()
    return command.serve(model, command.Options(**options), click.echo)


@cli.command()
@click.argument("directory", metavar="DIR")
def report(directory: str) -> None:
    """Print the path of report.html; open it on a screen."""
    from torchwright import api

    path = Path(api.report_path(directory)).resolve()
    click.echo(path)
    if sys.stdout.isatty() and (
        sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    ):
        click.launch(path.as_uri())


@cli.command()
@click.option(
    "--refresh", is_flag=True, help="Measure the ceilings again instead of reading the cached ones."
)
@json_option
def doctor(refresh: bool, as_json: bool) -> None:
    """What this machine can run, how fast, and why not."""
    from torchwright import doctor

    diagnosis = doctor.diagnose(refresh=refresh)
    if as_json:
        _print_json(dataclasses.asdict(diagnosis))
    else:
        _console().print(doctor.render(diagnosis))


@cli.command()
@json_option
def techniques(as_json: bool) -> None:
    """List the techniques with their options."""
    from torchwright.techniques import techniques as registry

    _print_registry(describe_registry(registry), as_json)


@cli.command()
@json_option
def workloads(as_json: bool) -> None:
    """List the kinds of workload with their options."""
    from torchwright.workloads import workloads as registry

    _print_registry(describe_registry(registry), as_json)


# --------------------------------------------------------------------------------------------------- printing


def _standard_input() -> str:
    """All of it, but for a last line break, which `echo` adds."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"standard input is no UTF-8 text ({error}).", param_hint="--prompt"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def _write(text: str) -> None:
    """Text on standard output at once and as it is; `click.echo` would take escape sequences out of it."""
    encoding = sys.stdout.encoding or "utf-8"  # of which a model knows nothing
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _nothing(text: str) -> None:
    """For text that is wanted whole, later."""


def describe_registry(registry: Any) -> list[dict[str, Any]]:
    """A registry as plain rows: name, first line and rest of the docstring, phase, properties, options."""
    import inspect

    rows: list[dict[str, Any]] = []
    for name, cls in registry:
        summary, _, detail = inspect.cleandoc(cls.__doc__ or "").partition("\n")
        row: dict[str, Any] = {"name": name, "summary": summary, "detail": detail.strip()}
        if hasattr(cls, "phase"):
            row["phase"] = cls.phase.name.lower()
            row |= {key: sorted(getattr(cls, key)) for key in ("needs", "gives", "removes")}
        rows.append(row | {"options": _options(cls)})
    return rows


def _options(cls: type) -> list[dict[str, Any]]:
    """A dataclass's fields with the docstrings under them; of another class the keyword arguments."""
    if dataclasses.is_dataclass(cls):
        from torchwright.techniques.base import describe

        rows = describe(cls)  # pyright: ignore[reportArgumentType]
        return [dataclasses.asdict(row) | {"required": False} for row in rows]
    import inspect

    return [
        {
            "name": parameter.name,
            "type": _annotation(parameter.annotation),
            "default": None if parameter.default is parameter.empty else parameter.default,
            "doc": "",
            "required": parameter.default is parameter.empty,
        }
        for parameter in inspect.signature(cls).parameters.values()
    ]


def _annotation(annotation: Any) -> str:
    import inspect

    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def plain(value: Any) -> str:
    """An option's value as the command line and the documentation write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return str(value) or "none"


def _console() -> Console:
    from rich.console import Console

    # Into a pipe or a file the text is as wide as the documentation, not the 80 columns of an unknown terminal.
    return Console(width=None if sys.stdout.isatty() else 110, highlight=False)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False, default=_to_plain))


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is no plain data: {value!r}")


def _print_registry(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json(rows)
        return
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    blocks: list[Any] = []
    for row in rows:
        title = Text.assemble((row["name"], "bold"), (f"  {row['phase']}" if "phase" in row else "", "dim"))
        blocks += [title, Padding(Text(row["summary"]), (0, 0, 0, 2))]
        if row["options"]:
            table = Table.grid(padding=(0, 2))
            for option in row["options"]:
                table.add_row(
                    Text(option["name"], "cyan"),
                    Text(option["type"], "dim"),
                    Text("required" if option["required"] else f"= {plain(option['default'])}"),
                    Text(option["doc"]),
                )
            blocks.append(Padding(table, (0, 0, 0, 4)))
    _console().print(Group(*blocks))


def _print_result(title: str, facts: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(facts)
        return
    console = _console()
    console.print(title, style="bold")
    console.print(_facts_table(facts))


def _facts_table(facts: Mapping[str, Any]) -> Any:
    """Plain data as a two-column table; nested data is indented, lists of rows become tables."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for key, value in facts.items():
        label = Text(key.replace("_", " "), "cyan")
        if isinstance(value, Mapping):
            grid.add_row(label, _facts_table(value))
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            columns = list(dict.fromkeys(key for item in value for key in item))
            table = Table(*(column.replace("_", " ") for column in columns), box=None, padding=(0, 1))
            for item in value:
                table.add_row(*(_number(item.get(column)) for column in columns))
            grid.add_row(label, table)
        elif isinstance(value, list | tuple):
            grid.add_row(label, Text("\n".join(map(_number, value)) or "none"))
        else:
            grid.add_row(label, Text(_number(value)))
    return grid


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return plain(value)
