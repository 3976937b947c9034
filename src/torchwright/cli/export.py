"""`torchwright export`: a model into another runtime's package, and what was lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchwright.cli.completion import targets
from torchwright.cli.options import (
    byte_count,
    count_option,
    finite,
    json_option,
    quiet_option,
    settings_option,
    trust_option,
)
from torchwright.cli.printing import print_result
from torchwright.core.errors import RegressionFound
from torchwright.core.process.interrupts import importing

if TYPE_CHECKING:
    from torchwright.exporter.export import Exported


@click.command("export")
@click.argument("model", metavar="[MODEL|ARTIFACT]", required=False)
@click.option(
    "--to", metavar="TARGET", shell_complete=targets, help="The runtime's format; docs/export.md lists them."
)
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where the package goes.")
@click.option("--check", "checked", metavar="DIR", help="Run a package again against its reference, instead.")
@click.option(
    "--precision",
    "--quantize",
    metavar="NAME",
    show_default="the target's first",
    help="Of weights and arithmetic, such as int8.",
)
@count_option(
    "--max-batch",
    show_default="none; 16, or the example's, where the runtime plans memory ahead",
    help="The largest number of rows.",
)
@click.option(
    "--max-context",
    type=click.IntRange(min=2),
    metavar="N",
    show_default="2048 or what the model takes, for executorch",
    help="Tokens that a language model's cache holds.",
)
@click.option(
    "--march",
    metavar="LEVEL",
    show_default="this processor",
    help="Code for every processor of a level, such as x86-64-v3 (aoti).",
)
@click.option(
    "--delegate",
    metavar="NAME",
    show_default="xnnpack, for executorch",
    help="What operators are handed to: xnnpack, coreml, vulkan, ethos-u55, ethos-u85.",
)
@click.option(
    "--max-error",
    type=click.FloatRange(min=0),
    metavar="X",
    callback=lambda context, parameter, value: None if value is None else finite(context, parameter, value),
    show_default="by precision",
    help="The relative error beside eager float32 that holds.",
)
@click.option(
    "--max-size",
    metavar="BYTES",
    callback=byte_count,
    help="Of the package, such as 20MB: the precision of least error that fits is taken.",
)
@click.option(
    "--max-memory", metavar="BYTES", callback=byte_count, help="Of what it adds to a process, the same way."
)
@settings_option
@trust_option
@quiet_option
@json_option
def command(
    model: str | None,
    to: str | None,
    out: Path | None,
    checked: str | None,
    precision: str | None,
    max_batch: int | None,
    max_context: int | None,
    march: str | None,
    delegate: str | None,
    max_error: float | None,
    max_size: int | None,
    max_memory: int | None,
    settings: tuple[str, ...],
    trust: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write a model as the package of another runtime, and verify it there.

    The package runs in a fresh process and is compared with the original: numerics at both ends of its sizes and one
    past them, load time, latency and memory. If outputs differ, the first layer that differs is named; exit 1. A
    package for a delegate that is missing here is written with the verdict "not run here".
    """
    making = {"MODEL": model, "--to": to, "-o": out, "--precision": precision, "--max-batch": max_batch}
    making |= {
        "--max-context": max_context,
        "--march": march,
        "--delegate": delegate,
        "--max-size": max_size,
        "--max-memory": max_memory,
    }
    if checked is not None and (given := [name for name, value in making.items() if value is not None]):
        raise click.UsageError(f"--check runs a package as it is: {', '.join(given)} would make another")
    if checked is None and to is None:
        raise click.UsageError("--to TARGET says for which runtime; or --check DIR runs a package again")
    with importing():
        from torchwright.exporter import export
    from torchwright.report.terminal import LiveProgress

    with LiveProgress(quiet=quiet) as progress:
        shared: dict[str, Any] = {"trust": trust, "max_error": max_error, "on_event": progress}
        if checked is not None:
            found = export.check(checked, **shared)
        else:
            assert to is not None
            found = export.export(
                model or "bundled",
                to=to,
                out=out,
                precision=precision,
                max_batch=max_batch,
                max_context=max_context,
                march=march,
                delegate=delegate,
                max_size=max_size,
                max_memory=max_memory,
                settings=settings,
                **shared,
            )
    facts = _facts(found)
    if found.report["verdict"] == "differs":
        if not as_json:
            print_result(f"export {found.path}", facts, as_json)
        raise RegressionFound(
            f"{found.path} was written, and differs from the original",
            found="; ".join(found.report["findings"])[:1000],
            facts=facts,
        )
    print_result(f"export {found.path}", facts, as_json)


def _facts(found: Exported) -> dict[str, Any]:
    made = found.export
    facts: dict[str, Any] = {
        "path": str(found.path),
        "target": made.target,
        "precision": made.precision,
        "versions": made.versions,
        "operators": made.operators,
    }
    if made.delegate:
        facts["delegate"] = made.delegate
    told = {"carried": made.carried, "left": made.left, "planned bytes": made.planned}
    facts |= {name: value for name, value in told.items() if value}
    return facts | {"notes": list(made.notes)} | found.report
