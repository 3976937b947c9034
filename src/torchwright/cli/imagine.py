"""`torchwright imagine`: a picture of what is said."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchwright.cli.options import json_option, quiet_option, trust_option
from torchwright.cli.printing import print_json, say
from torchwright.process.files import check_writable, replacing
from torchwright.process.interrupts import importing

if TYPE_CHECKING:
    import numpy as np


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
@click.option("--steps", type=int, default=20, show_default=True, metavar="N", help="Of the denoiser.")
@click.option(
    "--size", type=_Size(), metavar="HxW", show_default="the model's", help="Height and width in pixels."
)
@click.option(
    "--frames",
    type=click.IntRange(min=1),
    metavar="N",
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
    steps: int,
    size: tuple[int, int] | None,
    frames: int | None,
    preview: bool,
    out: Path,
    trust: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Make a picture of PROMPT.

    The same prompt, seed, size and number of steps give the same picture to the bit, on one machine and number of
    threads.
    """
    if out.suffix.lower() != ".png":
        raise click.UsageError(f"-o {out}: pictures are written as .png.")
    if not out.parent.is_dir():
        raise click.UsageError(f"-o {out}: there is no folder {out.parent}.")
    check_writable(out.parent)
    with importing():
        from torchwright.answer import open_diffuser
        from torchwright.diffusion.picture import check_pictures

    check_pictures()
    diffuser = open_diffuser(model, trust=trust)
    if not quiet:
        for notice in diffuser.folder.notices:
            say(f"{model}: {notice}", err=True)
    begun = time.monotonic()
    try:
        drawn = diffuser.draw(
            prompt,
            seed=seed,
            steps=steps,
            size=size,
            frames=frames,
            on_step=None if quiet or not sys.stderr.isatty() else _tell,
            preview=(lambda step, pixels_HW3: _write(out, pixels_HW3[None])) if preview else None,
        )
    finally:
        if not quiet and sys.stderr.isatty():
            say(err=True)
    seconds = time.monotonic() - begun
    for notice in drawn.notices if not quiet else ():
        say(f"{model}: {notice}", err=True)
    _write(out, drawn.frames_FHW3)
    height, width, _ = drawn.pixels_HW3.shape
    if as_json:
        print_json(
            {
                "file": out,
                "height": height,
                "width": width,
                "frames": len(drawn.frames_FHW3),
                "seed": seed,
                "steps": steps,
                "seconds": seconds,
                "notices": drawn.notices,
            }
        )
    elif not quiet:
        film = f"{len(drawn.frames_FHW3)} frames of " if len(drawn.frames_FHW3) > 1 else ""
        say(f"{out}: {film}{height}x{width} pixels, {steps} steps in {seconds:.1f} s")


def _tell(done: int, total: int) -> None:
    click.echo(f"\r\x1b[Kstep {done} of {total}", nl=False, err=True)


def _write(path: Path, frames_FHW3: np.ndarray) -> None:
    from torchwright.diffusion.picture import encoded_film

    with replacing(path) as beside:
        beside.write_bytes(encoded_film(frames_FHW3))
