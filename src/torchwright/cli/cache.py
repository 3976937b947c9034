"""`torchwright cache`: what was compiled for a model, packed here, unpacked elsewhere, and why it was not found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchwright.cli.options import json_option, quiet_option, settings_option, trust_option
from torchwright.cli.printing import print_result
from torchwright.core.errors import RegressionFound
from torchwright.core.process.interrupts import importing

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Of weights and inputs.",
)


@click.group("cache")
def command() -> None:
    """Carry compiled code from one machine to another, so that a first call there compiles nothing."""


@command.command("pack")
@click.argument("model", metavar="[MODEL]", required=False)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The bundle."
)
@dtype_option
@settings_option
@quiet_option
@json_option
def pack(
    model: str | None, out: Path, dtype: str, settings: tuple[str, ...], quiet: bool, as_json: bool
) -> None:
    """Compile MODEL's calls with torch.compile, and write what that made to a folder.

    Graphs and machine code of torch.compile, and Torchwright's own kernels where they are compiled. A program that
    compiles the same model finds them where the bundle was unpacked; `torchwright.optimization.caches.pack` packs what
    it has compiled itself.
    """
    with importing():
        from torchwright.optimization.caches import bundle, why
        from torchwright.workloads.detect import from_target, settings_of
    from torchwright.report.terminal import LiveProgress

    with LiveProgress(quiet=quiet):
        calls = why.compile_calls(from_target(model, **settings_of(settings)), _torch(dtype))
        made = bundle.pack(out, made_by=model or "bundled", calls=calls)
    sizes = {name: (out / name).stat().st_size for name in made.files}
    print_result(f"cache pack {out}", {"path": str(out), "calls": list(calls), "bytes": sizes}, as_json)


@command.command("unpack")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@trust_option
@json_option
def unpack(directory: Path, trust: bool, as_json: bool) -> None:
    """Put a bundle where torch.compile and Torchwright look for what is compiled already.

    What torch keeps are pickles, which run what their writer wants: another's bundle is unpacked with --trust alone.
    What is otherwise here than where it was packed is said.
    """
    with importing():
        from torchwright.optimization.caches import bundle, why

    made = bundle.unpack(directory, trust=trust)
    facts = {"made_by": made.made_by, "calls": list(made.calls), "otherwise here": why.differing(directory)}
    print_result(f"cache unpack {directory}", facts, as_json)


@command.command("why")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("model", metavar="[MODEL]", required=False)
@dtype_option
@settings_option
@trust_option
@json_option
def why(
    directory: Path,
    model: str | None,
    dtype: str,
    settings: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> None:
    """Say what a bundle's code depends on that is otherwise here; with MODEL, which of its calls are compiled anew.

    They are called on a clean cache with the bundle in it. Exit 1 where one is compiled, with the reasons: versions,
    instructions, flags, shapes.
    """
    with importing():
        from torchwright.optimization.caches import why as reasons
        from torchwright.workloads.detect import from_target, settings_of

    facts: dict[str, Any] = {"otherwise here": reasons.differing(directory)}
    if model is None:
        print_result(f"cache why {directory}", facts, as_json)
        return
    workload = from_target(model, **settings_of(settings))
    missed = reasons.explain(directory, workload, _torch(dtype), trust=trust)
    facts["compiled anew"] = {one.call: list(one.reasons) for one in missed}
    if missed:
        raise RegressionFound(
            f"{len(missed)} calls of {model} are compiled anew with {directory}",
            found="; ".join(f"{one.call}: {', '.join(one.reasons)}" for one in missed)[:1000],
            facts=facts,
        )
    print_result(f"cache why {directory}", facts, as_json)


def _torch(dtype: str) -> Any:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
