"""`torchwright generate`: a text continued."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from torchwright.cli.options import (
    adapter_option,
    count_option,
    decoder_options,
    device_option,
    json_option,
    revision_option,
    trust_option,
    vision_option,
)
from torchwright.cli.printing import print_json, say
from torchwright.core.escapes import escaped
from torchwright.core.process.interrupts import importing


@click.command("generate")
@click.argument("model", metavar="[DIR|MODEL]", required=False)
@click.option(
    "--prompt", required=True, metavar="TEXT", help="The text to continue; - reads it from standard input."
)
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A picture before the prompt, for models that take pictures; the prompt is then a user's message. Repeatable.",
)
@click.option(
    "--video",
    "videos",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A video before the prompt, for models that take videos: MP4, WebM, GIF and others. Repeatable.",
)
@count_option("--max-new-tokens", show_default="64, or as many as fit", help="Most tokens to generate.")
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
@click.option(
    "--language", metavar="NAME", help="Of the answer, as a translator's vocabulary names it: fra_Latn, fr."
)
@click.option(
    "--source-language",
    metavar="NAME",
    show_default="the tokenizer's own",
    help="Of the text to be translated.",
)
@decoder_options
@vision_option
@adapter_option
@revision_option
@device_option
@trust_option
@json_option
def command(
    model: str | None,
    prompt: str,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    max_new_tokens: int | None,
    seed: int,
    quantize: str | None,
    kv: str | None,
    dtype: str | None,
    quantize_vision: str | None,
    adapter: str | None,
    language: str | None,
    source_language: str | None,
    device: str | None,
    revision: str | None,
    trust: bool,
    as_json: bool,
    **sampling: float | None,
) -> None:
    """Continue a text, or translate or summarize it, printed as it appears.

    An artifact answers as it was optimized. Any other language model runs on Torchwright's own decoder, without a
    search. An encoder-decoder model (T5, BART, Marian, NLLB) takes the text as its source.
    """
    with importing():
        from torchwright.hub.folder import at_revision
        from torchwright.optimization import continuation

    found = continuation.generate(
        at_revision(model, revision),
        _standard_input() if prompt == "-" else prompt,
        images=images,
        videos=videos,
        max_new_tokens=max_new_tokens,
        seed=seed,
        sampling={name: value for name, value in sampling.items() if value is not None},
        quantize=quantize,
        kv=kv,
        dtype=dtype,
        quantize_vision=quantize_vision,
        adapter=adapter,
        language=language,
        source_language=source_language,
        device=device,
        trust=trust,
        on_text=_nothing if as_json else _write,
        on_notice=lambda text: say(f"torchwright: {text}", err=True),
    )
    if as_json:
        print_json(found)
    elif not found.text.endswith("\n"):
        _write("\n")


def _standard_input() -> str:
    """Read standard input without a last line break, which `echo` adds."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"standard input is no UTF-8 text ({error}).", param_hint="--prompt"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def _write(text: str) -> None:
    """Print text at once: into a pipe or a file as it is, on a terminal without characters that it acts on."""
    text = escaped(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"  # of which a model knows nothing
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _nothing(text: str) -> None:
    """For text that is wanted whole, later."""
