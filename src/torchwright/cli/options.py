"""Options that several verbs share, and what is checked of their values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from torchwright.core.duration import seconds
from torchwright.core.errors import WorkloadError
from torchwright.core.regular_file import is_url
from torchwright.core.scheme import ASKED
from torchwright.core.share import share

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def count_option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """Return an option that takes a whole number, 1 or more."""
    return click.option(*names, type=click.IntRange(min=1), metavar="N", **attributes)


set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A field of the run file, as data.text_column=body; the value is JSON or text. Repeatable.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
quiet_option = click.option("--quiet", is_flag=True, help="No live progress; the result alone.")
all_option = click.option(
    "--all", "every", is_flag=True, help="A row and a reason for each technique that was refused, too."
)
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Load the native code of an artifact, even if this user did not build it here.",
)

tokens_option = count_option(
    "--tokens", show_default="the workload's", help="Encoders and other models of text: where texts are cut."
)
eval_text_option = click.option(
    "--eval-text",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="FILE",
    show_default="the workload's",
    help="Models of text: what the metric is measured on.",
)
images_option = click.option(
    "--images",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    show_default="made-up ones",
    help="Models that segment: the pictures that they are judged on.",
)
points_option = click.option(
    "--points",
    metavar="NxN",
    show_default="the workload's",
    help="Models that segment: the grid of points on each picture.",
)
steps_option = count_option(
    "--steps", show_default="the workload's", help="Pipelines that make pictures: steps of the denoiser."
)
size_option = click.option(
    "--size",
    metavar="HxW",
    show_default="the model's",
    help="Pipelines that make pictures: height and width in pixels.",
)
prompts_option = click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="FILE",
    show_default="the workload's",
    help="Pipelines that make pictures: what is drawn to judge them, a prompt a line.",
)
settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other option of the workload, as `torchwright workloads` lists them. Repeatable.",
)


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for the size of one call. By default the workload decides."""
    for name, help in reversed(
        (
            ("--batch", "Sequences or images in one call."),
            ("--prompt-tokens", "Language models: tokens of the prompt."),
            ("--new-tokens", "Language models: tokens to generate."),
        )
    ):
        command = count_option(name, show_default="the workload's", help=help)(command)
    return command


def once(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    """A click callback for a repeatable option of which one is taken: click itself would drop all but the last."""
    if len(values) > 1:
        raise click.BadParameter(
            f"given {len(values)} times ({', '.join(values)}); one is taken", context, parameter
        )
    return values[0] if values else None


adapter_option = click.option(
    "--adapter",
    multiple=True,
    callback=once,
    metavar="DIR",
    help="LoRA or DoRA as peft and `torchwright train` write it, added to the weights.",
)


def served_adapters(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """A click callback: the adapter that is merged, and those that requests choose, by name."""
    merged, named = list[str](), dict[str, str]()
    for value in values:
        found = ADAPTER_NAME.match(value)
        if found is None:
            merged.append(value)
        elif found[1] in named:
            raise click.BadParameter(f"the name '{found[1]}' is given twice", context, parameter)
        else:
            named[found[1]] = value[found.end() :]
    return once(context, parameter, tuple(merged)), tuple(named.items())


ADAPTER_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=")
"""The beginning of NAME=DIR; a folder with such a name is written ./NAME=…"""
served_adapters_option = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    callback=served_adapters,
    metavar="[NAME=]DIR",
    help="LoRA as peft and `torchwright train` write it. With a name, requests choose it as their model; repeatable. "
    "Without one it is added to the weights for all, and may be DoRA.",
)


def decoder_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the native decoder for a language model without a search. The decoder knows the values."""
    for name, metavar, default, help in reversed(
        (
            (
                "--quantize",
                f"none|{'|'.join(ASKED)}[:group_size=N]",
                "what it was trained for, else none",
                "Weights: as they are, 8 bits, or 4 bits in groups of 32, 64 or 128, rounded to nearest.",
            ),
            ("--kv", "bf16|int8|fp32", "the dtype's", "Cached keys and values."),
            ("--dtype", "bf16|fp32", "bf16 where the compiled kernels are", "Everything else."),
        )
    ):
        command = click.option(name, metavar=metavar, show_default=default, help=help)(command)
    return command


vision_option = click.option(
    "--quantize-vision",
    type=click.Choice(["none", "w8a8"]),
    show_default="w8a8 with --quantize, if its embeddings of a picture agree",
    help="Weights of the encoder of pictures.",
)
revision_option = click.option(
    "--revision", metavar="NAME", help="Branch, tag or commit of a hub id; ORG/NAME@NAME says the same."
)


class LocalFile(click.Path):
    """A file of this machine, which may be missing; a URL is refused before its slashes are taken for a path's."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, str) and is_url(value):
            self.fail(f"{value} is a URL, and nothing is downloaded: give the name of a file.", param, ctx)
        return super().convert(value, param, ctx)


class Duration(click.ParamType[float]):
    """A time such as 90s, 2m or 1h, or a number of seconds; `torchwright.core.duration` reads it."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return seconds(value)
        except WorkloadError as error:
            self.fail(str(error), param, ctx)


class Share(click.ParamType[float]):
    """A share such as 0.05 or 5%; `torchwright.core.share` reads it."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return share(value, str(param.human_readable_name) if param else "the share")
        except WorkloadError as error:
            self.fail(str(error), param, ctx)


def finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, parameter)
    return value


class DeviceName(click.ParamType):
    """The name of a registered device."""

    name = "device"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        from torchwright.hardware.devices import devices

        return "|".join(devices.names())

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from torchwright.hardware.devices import check_name

        return check_name(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from torchwright.hardware.devices import devices

        return [CompletionItem(name) for name in devices.names() if name.startswith(incomplete)]


def on_device(default: str) -> Callable[[Any], Any]:
    """Return the option for the device of a run; `default` describes the one that is taken otherwise."""
    return click.option("--device", type=DeviceName(), show_default=default, help="Where to run.")


device_option = on_device("a card where one can be used, else cpu")


def parse_bytes(text: str) -> int:
    """Bytes of a text such as 4GiB, 500MB or 1073741824; raises `ValueError` for any other."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"'{text}' is no size; write 4GiB, 500MB or a number of bytes")
    return round(float(match[1]) * UNITS[match[2] or ""])


def byte_count(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A click callback."""
    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


def parse_settings(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields and values of `--set NAME=VALUE`."""
    return dict(_setting(text) for text in texts)


def _setting(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise WorkloadError(f"--set takes NAME=VALUE, not '{text}'")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
