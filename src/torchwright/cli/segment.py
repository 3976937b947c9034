"""`torchwright segment`: the objects of pictures as masks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchwright.cli.options import LocalFile, count_option, json_option, quiet_option, trust_option
from torchwright.cli.printing import print_json, say
from torchwright.core.ansi import CLEAR_LINE, takes_movement
from torchwright.core.errors import TorchwrightError
from torchwright.core.escapes import escaped
from torchwright.core.process.files import check_writable
from torchwright.core.process.interrupts import importing

if TYPE_CHECKING:
    from torchwright.models.segment.base import Segmenter
    from torchwright.models.segment.semantic import ClassSegmenter


WHICH = "say which object: --point X,Y, --box X0,Y0,X1,Y1, or --everything."


class _Numbers(click.ParamType):
    """So many numbers with commas between them."""

    def __init__(self, names: str) -> None:
        self.name, self.count = names, names.count(",") + 1

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        try:
            numbers = tuple(float(word) for word in value.split(","))
        except ValueError:
            numbers = ()
        if len(numbers) != self.count:
            self.fail(f"'{value}' is not {self.name}", param, ctx)
        return numbers


@click.command("segment")
@click.argument("pictures", metavar="PICTURE...", nargs=-1, required=True, type=LocalFile())
@click.option(
    "--model",
    required=True,
    metavar="DIR|MODEL",
    help="A SAM, a SAM 2, or a model for semantic segmentation (SegFormer), of transformers, or what "
    "`torchwright optimize` made of one.",
)
@click.option(
    "--point",
    "points",
    multiple=True,
    type=_Numbers("X,Y"),
    metavar="X,Y",
    help="A pixel of the object. Repeatable.",
)
@click.option(
    "--outside",
    multiple=True,
    type=_Numbers("X,Y"),
    metavar="X,Y",
    help="A pixel that is none of the object's. Repeatable.",
)
@click.option(
    "--box",
    "boxes",
    multiple=True,
    type=_Numbers("X0,Y0,X1,Y1"),
    metavar="X0,Y0,X1,Y1",
    help="Left, top, right and bottom around an object. Repeatable, an object each.",
)
@click.option("--everything", is_flag=True, help="Every object that a grid of points finds.")
@click.option(
    "--grid",
    type=click.IntRange(1, 128),
    metavar="N",
    show_default="32",
    help="--everything: N x N points.",
)
@count_option("--batch", show_default="64", help="--everything: points that are decoded at once.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    show_default="fp32",
    help="What all but the prompts' coordinates compute in; an artifact knows its own.",
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="A folder for each picture, named after it: masks as PNG and run lengths, and an overlay.",
)
@trust_option
@quiet_option
@json_option
def command(
    pictures: tuple[Path, ...],
    model: str,
    points: tuple[tuple[float, ...], ...],
    outside: tuple[tuple[float, ...], ...],
    boxes: tuple[tuple[float, ...], ...],
    everything: bool,
    grid: int | None,
    batch: int | None,
    dtype: str | None,
    out: Path,
    trust: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Cut objects out of pictures: the one at a point, those in boxes, or everything.

    A model that names classes (SegFormer) takes no prompts: it gives each pixel a class. Pixels count from the
    picture's left and top. A picture that cannot be read is reported, the others are still segmented; exit code 2.
    """
    prompts = {"points": points, "outside": outside, "boxes": boxes}
    asked = _asked(prompts, everything, {"grid": grid, "batch": batch})
    targets = _targets(pictures, out)
    check_writable(out)
    segmenter = _opened(model, dtype, trust=trust)
    _check_fits(segmenter, everything, asked)
    rows, failed = [], False
    for picture, target in zip(pictures, targets, strict=True):
        try:
            row = _segment(segmenter, picture, target, everything, asked, quiet=quiet)
            if not as_json and not quiet:
                count = len(row["masks"])
                masks = f"{count} mask" + ("s" if count != 1 else "")
                say(f"{picture}: {masks} in {row['seconds']:.1f} s, {target}")
        except TorchwrightError as error:
            if len(pictures) == 1:
                raise
            failed, row = True, {"file": picture, "error": str(error)}
            say(f"torchwright: {error}", err=True)
        rows.append(row)
    if as_json:
        print_json({"model": model, "files": rows})
    if failed:
        raise click.exceptions.Exit(2)


def _opened(model: str, dtype: str | None, *, trust: bool) -> Segmenter | ClassSegmenter:
    """The segmenter of a model's folder or of an artifact."""
    with importing():
        import torch

        from torchwright.hub.folder import resolve
        from torchwright.models.segment.base import Segmenter
        from torchwright.models.segment.load import (
            WANTED,
            load_class_segmenter,
            load_segmenter,
            names_classes,
        )
        from torchwright.models.segment.semantic import ClassSegmenter
        from torchwright.optimization.artifact.load import load
        from torchwright.optimization.open_model import is_artifact

    if not is_artifact(model):
        opened = load_class_segmenter if names_classes(resolve(model, WANTED)) else load_segmenter
        return opened(model, torch.bfloat16 if dtype == "bf16" else torch.float32)
    if dtype is not None:
        raise click.UsageError("--dtype is for models that no search has been through.")
    loaded = load(model, trust=trust)
    for notice in loaded.notices:
        say(f"torchwright: {notice}", err=True)
    if not isinstance(loaded.model, Segmenter | ClassSegmenter):
        kind = loaded.recipe.workload.get("kind")
        raise click.UsageError(f"{model} segments no pictures: its model is of the kind '{kind}'.")
    return loaded.model


def _asked(prompts: dict[str, Any], everything: bool, how: dict[str, int | None]) -> dict[str, Any]:
    """The options that count, by name; the others must not be given."""
    given = {name: value for name, value in how.items() if value is not None}
    if everything:
        if any(prompts.values()):
            raise click.UsageError("--everything asks for no --point, --outside or --box.")
        return given
    if given:
        raise click.UsageError(f"--{next(iter(given))} is for --everything.")
    if prompts["outside"] and not prompts["points"] and not prompts["boxes"]:
        raise click.UsageError(WHICH)
    return prompts


def _check_fits(segmenter: Segmenter | ClassSegmenter, everything: bool, asked: dict[str, Any]) -> None:
    """Check that prompts are given exactly if the model's kind needs them."""
    from torchwright.models.segment.semantic import ClassSegmenter

    prompted = everything or any(asked.values())
    if isinstance(segmenter, ClassSegmenter) and prompted:
        raise click.UsageError(
            "the model says of every pixel which class it shows: it takes no --point, --outside, --box or --everything."
        )
    if not isinstance(segmenter, ClassSegmenter) and not prompted:
        raise click.UsageError(WHICH)


def _targets(pictures: tuple[Path, ...], out: Path) -> list[Path]:
    targets = [out / picture.stem for picture in pictures]
    twice = next((target for target in targets if targets.count(target) > 1), None)
    if twice is not None:
        raise click.UsageError(f"two of the pictures would be written to {twice}: give them other names.")
    return targets


def _segment(
    segmenter: Segmenter | ClassSegmenter,
    picture: Path,
    target: Path,
    everything: bool,
    asked: dict[str, Any],
    *,
    quiet: bool,
) -> dict[str, Any]:
    """One picture's masks, written; returns its facts."""
    from torchwright.models.segment.files import check_target, write_classes, write_masks
    from torchwright.models.segment.semantic import ClassSegmenter
    from torchwright.models.vision.picture import read_picture

    check_target(target)
    pixels_HW3, begun = read_picture(picture), time.monotonic()
    if isinstance(segmenter, ClassSegmenter):
        found = segmenter.segment(pixels_HW3)
        seconds = time.monotonic() - begun
        write_classes(target, pixels_HW3, found)
        facts = [found.facts(number) for number in found.present]
        return {"file": picture, "written": target, "seconds": seconds, "masks": _shortened(facts)}
    if everything:
        with _progress(picture, quiet) as tell:
            masks = segmenter.everything(pixels_HW3, **asked, tell=tell)
    else:
        masks = segmenter.segment(pixels_HW3, **asked)
    seconds = time.monotonic() - begun
    write_masks(target, pixels_HW3, masks)
    facts = _shortened([mask.facts() for mask in masks])
    return {"file": picture, "written": target, "seconds": seconds, "masks": facts}


def _shortened(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the run lengths, which are in the file."""
    return [{name: value for name, value in each.items() if name != "segmentation"} for each in facts]


@contextmanager
def _progress(picture: Path, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback that shows the number of finished points on a terminal."""
    if quiet or not takes_movement(sys.stderr):
        yield None
        return

    def tell(done: int, total: int) -> None:
        sys.stderr.write(f"{CLEAR_LINE}{escaped(picture.name)}: {done:,} of {total:,} points")
        sys.stderr.flush()

    try:
        yield tell
    finally:
        sys.stderr.write(CLEAR_LINE)
        sys.stderr.flush()
