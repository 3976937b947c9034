"""`torchwright imagine`: a picture of what is said."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchwright.cli.options import count_option, json_option, quiet_option, trust_option
from torchwright.cli.printing import print_json, say
from torchwright.core.ansi import CLEAR_LINE, takes_movement
from torchwright.core.process.files import check_writable, replacing
from torchwright.core.process.interrupts import importing
from torchwright.models.diffusion.limits import STEPS, Style
from torchwright.models.diffusion.schedulers import NAMES

if TYPE_CHECKING:
    import numpy as np

    from torchwright.models.diffusion.diffuser import Diffuser, Drawn

MOST_COUNT = 1000


class _Size(click.ParamType):
    """HxW, in pixels."""

    name = "HxW"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        height, x, width = value.lower().partition("x")
        if not (x and height.isdecimal() and width.isdecimal() and len(value) < 16):
            self.fail(f"'{value}' is no size; write 512x512, the height first", param, ctx)
        return int(height), int(width)


@click.command("imagine")
@click.argument("prompt")
@click.option(
    "--model", required=True, metavar="DIR|MODEL", help="A pipeline of diffusers, or an artifact of one."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Equal seeds give equal pictures."
)
@click.option(
    "--steps",
    type=int,
    metavar="N",
    show_default=f"{STEPS}, or as few as a distilled model was trained for",
    help="Of the denoiser.",
)
@click.option(
    "--guidance",
    type=float,
    metavar="X",
    show_default="the pipeline's, 0 for a turbo model",
    help="How strongly the prompt is followed; 0 and 1 are none.",
)
@click.option("--negative", metavar="PROMPT", help="What the picture is guided away from.")
@click.option(
    "--scheduler",
    metavar="NAME",
    show_default="the model's own",
    help=f"In place of the model's own: {', '.join(NAMES)}.",
)
@click.option(
    "--count",
    type=click.IntRange(1, MOST_COUNT),
    default=1,
    show_default=True,
    metavar="N",
    help="Pictures, of N seeds that follow each other; several are FILE-1.png, FILE-2.png, …",
)
@click.option(
    "--size", type=_Size(), metavar="HxW", show_default="the model's", help="Height and width in pixels."
)
@count_option(
    "--frames",
    show_default="the fewest after 1",
    help="Of a film, where the model makes films; the file is an animated PNG.",
)
@click.option(
    "--preview", is_flag=True, help="After each step, write the picture so far; a pass of the VAE each time."
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Where the picture goes.",
)
@trust_option
@quiet_option
@json_option
def command(
    prompt: str,
    model: str,
    seed: int,
    steps: int | None,
    guidance: float | None,
    negative: str | None,
    scheduler: str | None,
    count: int,
    size: tuple[int, int] | None,
    frames: int | None,
    preview: bool,
    out: Path,
    trust: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Make a picture of PROMPT.

    The same prompt, seed, size and number of steps give a bitwise equal picture on one machine with one number of
    threads.
    """
    if out.suffix.lower() != ".png":
        raise click.UsageError(f"-o {out}: pictures are written as .png.")
    if not out.parent.is_dir():
        raise click.UsageError(f"-o {out}: there is no folder {out.parent}.")
    check_writable(out.parent)
    with importing():
        from torchwright.models.diffusion.picture import check_pictures
        from torchwright.optimization.open_model import open_diffuser

    check_pictures()
    diffuser = open_diffuser(model, trust=trust)
    if not quiet:
        for notice in diffuser.folder.notices:
            say(f"{model}: {notice}", err=True)
    if not quiet and steps is None and diffuser.habits.why:
        say(f"{model}: a distilled model ({diffuser.habits.why}): {diffuser.habits.steps} steps", err=True)
    style = Style(guidance=guidance, negative=negative, scheduler=scheduler)
    asked: dict[str, Any] = {"steps": steps, "size": size, "frames": frames, "style": style}
    rows = list[dict[str, Any]]()
    for number in range(count):
        target = out if count == 1 else out.with_stem(f"{out.stem}-{number + 1}")
        drawn, seconds = _draw(diffuser, prompt, target, seed + number, asked, preview=preview, quiet=quiet)
        if not quiet and number == 0:
            for notice in drawn.notices:
                say(f"{model}: {notice}", err=True)
        rows.append(_row(drawn, target, seed + number, seconds))
        if not quiet and not as_json:
            say(_sentence(rows[-1]))
    if as_json:
        print_json({**rows[0], "pictures": rows})


def _draw(
    diffuser: Diffuser,
    prompt: str,
    target: Path,
    seed: int,
    asked: dict[str, Any],
    *,
    preview: bool,
    quiet: bool,
) -> tuple[Drawn, float]:
    """Draw one picture into its file; return it, and the seconds that it took."""
    live, begun = not quiet and takes_movement(sys.stderr), time.monotonic()
    try:
        drawn = diffuser.draw(
            prompt,
            seed=seed,
            **asked,
            on_step=_tell if live else None,
            preview=(lambda step, pixels_HW3: _write(target, pixels_HW3[None])) if preview else None,
        )
    finally:
        if live:
            say(err=True)
    _write(target, drawn.frames_FHW3)
    return drawn, time.monotonic() - begun


def _row(drawn: Drawn, target: Path, seed: int, seconds: float) -> dict[str, Any]:
    height, width, _ = drawn.pixels_HW3.shape
    return {
        "file": target,
        "height": height,
        "width": width,
        "frames": len(drawn.frames_FHW3),
        "seed": seed,
        "steps": drawn.steps,
        "seconds": seconds,
        "notices": drawn.notices,
    }


def _sentence(row: dict[str, Any]) -> str:
    film = f"{row['frames']} frames of " if row["frames"] > 1 else ""
    pixels = f"{row['height']}x{row['width']} pixels"
    return (
        f"{row['file']}: {film}{pixels}, seed {row['seed']}, {row['steps']} steps in {row['seconds']:.1f} s"
    )


def _tell(done: int, total: int) -> None:
    click.echo(f"{CLEAR_LINE}step {done} of {total}", nl=False, err=True)


def _write(path: Path, frames_FHW3: np.ndarray) -> None:
    from torchwright.models.diffusion.picture import encoded_film

    with replacing(path) as beside:
        beside.write_bytes(encoded_film(frames_FHW3))
