"""One prompt continued by a language model: the whole of `torchwright generate`.

generate("out", "Once upon a time", on_text=…, …)     opens, continues, says how long it took
ask(opened.model, "Once upon a time", max_new_tokens=64, on_text=…)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchwright.core.errors import WorkloadError
from torchwright.hub.folder import resolve
from torchwright.hub.text_stream import TextStream
from torchwright.models.decoder.generation.generate import LoadedDecoder
from torchwright.models.decoder.generation.sampling import Sampling
from torchwright.models.decoder.low_rank import Adapter
from torchwright.models.vision.question import Question, question_about
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.open_model import WANTED, flag, is_artifact, open_model
from torchwright.workloads.generation import Writer
from torchwright.workloads.language import BUNDLED

NEW_TOKENS = 64
"""Tokens to generate where nobody says how many, or as many as fit."""
NARROWING = ("top_k", "top_p", "min_p")
"""Sampling options that mean something only where tokens are drawn."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The continuation of one prompt, and how long it took."""

    text: str
    prompt_tokens: int
    new_tokens: int
    ttft_s: float | None
    """Seconds from the prompt's tokens to the first new one; None for an empty answer."""
    tpot_s: float | None
    """Seconds of each token after the first; None for an answer of fewer than two."""
    stopped_by: Literal["end-of-text", "length"]


def generate(
    target: str | None,
    prompt: str,
    *,
    images: Sequence[Path] = (),
    videos: Sequence[Path] = (),
    max_new_tokens: int | None,
    seed: int,
    sampling: Mapping[str, Any],
    quantize: str | None,
    kv: str | None,
    dtype: str | None,
    quantize_vision: str | None = None,
    device: str | None,
    adapter: str | None,
    language: str | None = None,
    source_language: str | None = None,
    trust: bool,
    on_text: Callable[[str], None],
    on_notice: Callable[[str], None],
) -> Continuation:
    """`torchwright generate`: what can be refused without the model is, before it is opened.

    `sampling` holds fields of `Sampling`, and only those that the user gave. Without `max_new_tokens` there are
    `NEW_TOKENS`, or as many as fit. With `images` or `videos` the prompt is a user's message behind them, which the
    folder's chat template writes. `adapter` is added to the rows, as the server adds that of a request.
    """
    _check_text(prompt)
    temperature = Sampling.of(sampling).temperature
    idle = [flag(name) for name in NARROWING if name in sampling]
    if idle and temperature == 0:
        raise WorkloadError(
            f"{', '.join(idle)} would change nothing: at temperature 0 the most likely token is taken",
            next="add --temperature, such as 0.8",
        )
    question = _question(target, prompt, images, videos) if images or videos else None
    opened = open_model(
        target,
        quantize=quantize,
        kv=kv,
        dtype=dtype,
        quantize_vision=quantize_vision,
        device=device,
        adapter=adapter,
        merge=False,
        language=language,
        source_language=source_language,
        trust=trust,
    )
    for notice in opened.notices:
        on_notice(notice)
    if question is not None and isinstance(opened.model, LoadedDecoder) and opened.model.vision is not None:
        opened.model.vision.load()
        on_notice(f"pictures are encoded by {opened.model.vision.runs_as}")
    return ask(
        opened.model,
        prompt,
        question=question,
        adapter=opened.adapter,
        max_new_tokens=max_new_tokens,
        seed=seed,
        sampling=sampling,
        on_text=on_text,
    )


def _question(target: str | None, prompt: str, images: Sequence[Path], videos: Sequence[Path]) -> Question:
    """Read the pictures before the model is opened."""
    if target is not None and is_artifact(target):
        return question_about(Path(target) / artifact.MODEL, prompt, images, videos)
    return question_about(resolve(str(BUNDLED if target is None else target), WANTED), prompt, images, videos)


def ask(
    model: Writer,
    prompt: str,
    *,
    question: Question | None = None,
    adapter: Adapter | None = None,
    on_text: Callable[[str], None],
    max_new_tokens: int | None = None,
    seed: int = 0,
    sampling: Mapping[str, Any] | None = None,
) -> Continuation:
    """Continue one prompt, or a question about pictures instead; `on_text` is given each piece of text as it appears,
    and never half a character. `adapter` is one that `open_model` returned with the model.

    Raises `WorkloadError` for a prompt that is empty or does not fit, and for options that the model does not take.
    """
    _check_text(prompt)
    sampling = dict(sampling or {})
    more = [flag(name) for name in sampling if name not in model.sampling]
    if more:
        raise WorkloadError(
            f"this artifact does not take {', '.join(more)}",
            found="its engine has fixed calls",
            allowed=", ".join(flag(name) for name in sorted({*model.sampling, "seed"})),
            next="optimize again with `--with native`",
        )
    ids = model.encode(prompt) if question is None else question.ids
    more_input: dict[str, Any] = {} if question is None else {"pictures": question.pictures}
    more_input |= {} if adapter is None else {"adapter": adapter}
    limit = max(1, min(NEW_TOKENS, model.room(len(ids)))) if max_new_tokens is None else max_new_tokens
    stream, pieces, times = TextStream(model), list[str](), list[float]()

    def say(piece: str) -> None:
        if piece:
            pieces.append(piece)
            on_text(piece)

    def take(token: int) -> None:
        times.append(time.perf_counter())
        say(stream.put(token))

    begun = time.perf_counter()
    model.write(ids, limit, seed=seed, on_token=take, **more_input, **sampling)
    say(stream.rest())
    return Continuation(
        text="".join(pieces),
        prompt_tokens=len(ids),
        new_tokens=len(times),
        ttft_s=times[0] - begun if times else None,
        tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        stopped_by="length" if len(times) == limit else "end-of-text",
    )


def _check_text(prompt: str) -> None:
    if not prompt:
        raise WorkloadError("the prompt is empty", allowed="a text of at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that are not text
        raise WorkloadError("the prompt is no UTF-8 text", found=str(error)) from error
