"""`torchwright transcribe`: from sound files to text and subtitles."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchwright.cli.listening import listen
from torchwright.cli.options import LocalFile, json_option, quiet_option
from torchwright.cli.printing import print_json, say
from torchwright.core.ansi import CLEAR_LINE, takes_movement
from torchwright.core.errors import TorchwrightError
from torchwright.core.escapes import escaped
from torchwright.core.process.interrupts import importing
from torchwright.models.speech.bundled import NOTICE
from torchwright.models.speech.transcript import MOST_WINDOWS

if TYPE_CHECKING:
    from torchwright.models.speech.base import Recognizer
    from torchwright.models.speech.transcript import Transcript


@click.command("transcribe")
@click.argument("files", metavar="FILE...", nargs=-1, type=LocalFile())
@click.option(
    "--model",
    metavar="DIR|MODEL",
    show_default="the bundled one, which knows 194 English words",
    help="A Whisper or Moonshine of transformers, or an artifact of one.",
)
@click.option(
    "--language",
    metavar="NAME|CODE",
    show_default="guessed from the first window",
    help="Such as English or en, in any case.",
)
@click.option("--translate", is_flag=True, help="Into English.")
@click.option(
    "--timestamps",
    type=click.Choice(["segment", "word"]),
    default="segment",
    show_default=True,
    help="How finely the text is placed in time.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, MOST_WINDOWS),
    default=1,
    show_default=True,
    metavar="N",
    help="Windows side by side. With more than one, a sound is cut at pauses, and no part knows the text before it.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "srt", "vtt", "json"]),
    default="text",
    show_default=True,
    help="Plain lines, subtitles, or all that is known.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Keep text that is left out otherwise: where no voice is heard, and where the model is sure of no word.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    show_default="bf16 with compiled kernels, else fp32",
    help="What the model computes in.",
)
@click.option(
    "--quantize",
    metavar="SCHEME",
    show_default="none",
    help="w8a8 (or w4a8, w4a16) for encoder and decoder, or for each: encoder=w8a8,decoder=none. Whisper alone.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    show_default="standard output",
    help="A file for each sound, named after it.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Take raw 16-bit samples, mono at 16 kHz, from standard input, and print text as it settles: about two "
    "seconds behind, or two hypotheses, where the machine takes longer for one.",
)
@quiet_option
@json_option
def command(
    files: tuple[Path, ...],
    model: str | None,
    dtype: str | None,
    quantize: str | None,
    form: str,
    out: Path | None,
    live: bool,
    everything: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write down what is said in sound files of any length, rate and number of channels.

    WAV, FLAC, OGG and MP3 are read by soundfile, other containers by PyAV. Text appears as it is found. Ctrl-C keeps
    what was found: with -o in NAME.partial and the format's suffix. A file that cannot be read is reported, and the
    others are still transcribed; the exit code is then 2.
    """
    options["only_speech"] = not everything
    if live:
        _check_live(files, form, out, as_json, options)
    elif not files:
        raise click.UsageError("name a sound file, or say --live for standard input.")
    targets = _targets(files, form, out, as_json)
    with importing():
        import torch

        from torchwright.optimization.open_model import open_speech

    if model is None and not quiet:
        say(f"torchwright: {NOTICE}", err=True)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}
    recognizer = open_speech(model, types[dtype], quantize)
    if live:
        asked = {name: options[name] for name in ("language", "translate", "only_speech")}
        listen(recognizer, quiet=quiet, **asked)
        return
    shown = not as_json and out is None
    rows, failed = [], list[TorchwrightError]()
    for file, target in zip(files, targets, strict=True):
        try:
            if shown and form == "text" and len(files) > 1:
                say(f"==> {file} <==")
            rows.append(_transcribe(recognizer, file, target, form, options, shown=shown, quiet=quiet))
        except TorchwrightError as error:
            if len(files) == 1:
                raise
            failed.append(error)
            rows.append({"file": file, "error": str(error)})
            say(f"torchwright: {error}", err=True)
    if as_json:
        print_json({"model": model or "bundled", "runs_on": recognizer.model.description, "files": rows})
    if failed:
        raise click.exceptions.Exit(2)


def _check_live(
    files: tuple[Path, ...], form: str, out: Path | None, as_json: bool, options: dict[str, Any]
) -> None:
    given = {
        "a file": bool(files),
        f"--format {form}": form != "text",
        "-o": out is not None,
        "--json": as_json,
        "--timestamps word": options["timestamps"] == "word",
        "--batch": options["batch"] > 1,
    }
    if clash := [name for name, there in given.items() if there]:
        raise click.UsageError(f"--live prints text from standard input: it does not go with {clash[0]}.")


def _targets(files: tuple[Path, ...], form: str, out: Path | None, as_json: bool) -> list[Path | None]:
    """Return the output path of each file's text; None is standard output."""
    if out is None:
        if form != "text" and as_json:
            raise click.UsageError(
                "--json prints all that is known already; --format is for files: add -o FOLDER."
            )
        if form != "text" and len(files) > 1:
            raise click.UsageError(f"several files as {form} do not fit in one output: add -o FOLDER.")
        return [None] * len(files)
    suffix = {"text": ".txt"}.get(form, f".{form}")
    targets = [out / f"{file.stem}{suffix}" for file in files]
    twice = next((target for target in targets if targets.count(target) > 1), None)
    if twice is not None:
        raise click.UsageError(f"two of the files would be written to {twice}: give them other names.")
    return list(targets)


def _transcribe(
    recognizer: Recognizer,
    file: Path,
    target: Path | None,
    form: str,
    options: dict[str, Any],
    *,
    shown: bool,
    quiet: bool,
) -> dict[str, Any]:
    """One file, its text shown or written; what was found is kept when it ends early. Returns its facts."""
    from torchwright.models.speech.formats import facts
    from torchwright.models.speech.transcript import Transcript

    live = shown and form == "text"
    whole, begun = Transcript(), time.monotonic()
    finished = False
    try:
        with _progress(file, quiet) as tell:
            for window in recognizer.windows(file, **options):
                whole = whole.and_then(window)
                tell(
                    window.until,
                    window.total,
                    "".join(f"{s.text}\n" for s in window.segments) if live else "",
                )
        finished = True
    finally:
        if not live and (finished or whole.segments):
            _deliver(whole, target, form, shown=shown, finished=finished)
    for remark in whole.remarks() if not quiet else ():
        say(f"torchwright: {file.name}: {remark}", err=True)
    seconds = time.monotonic() - begun
    rate = {"seconds_taken": seconds, "real_time_factor": seconds / whole.seconds}
    return {"file": file, "written": target, **rate, **facts(whole)}


def _deliver(whole: Transcript, target: Path | None, form: str, *, shown: bool, finished: bool) -> None:
    """Write or show a transcript; of one that is not finished the file's name says so."""
    from torchwright.core.process.files import replacing
    from torchwright.models.speech.formats import FORMATS

    text = FORMATS[form](whole)
    if target is not None:
        target = target if finished else target.with_suffix(f".partial{target.suffix}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as beside:
            beside.write_text(text, encoding="utf-8")
        if not finished:
            say(f"torchwright: the first {whole.seconds:.1f} s are in {target}", err=True)
    elif shown:
        say(text, nl=False)


@contextmanager
def _progress(file: Path, quiet: bool) -> Iterator[Any]:
    """A function that shows how many seconds are done, on a terminal, and writes text above that line."""
    line = takes_movement(sys.stderr) and not quiet
    clear = CLEAR_LINE if line else ""

    def tell(done: float, total: float | None, text: str) -> None:
        if text:
            sys.stderr.write(clear)
            sys.stderr.flush()
            say(text, nl=False)
        if line:
            of = f" of {total:.0f}" if total else ""
            sys.stderr.write(f"{clear}{escaped(file.name)}: {done:.0f}{of} s")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        sys.stderr.write(clear)
        sys.stderr.flush()
