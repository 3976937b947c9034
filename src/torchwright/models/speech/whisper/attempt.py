"""One window decoded, again and more freely where the text is improbable or repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from torchwright.models.speech.steps import Steps
from torchwright.models.speech.together import Reading
from torchwright.models.speech.whisper.vocabulary import Vocabulary, allow
from torchwright.workloads.generation import sample


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a window is decoded again, and when it is silence (openai/whisper, transcribe.py)."""

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """Tried in turn; what is drawn depends on the window's place alone."""
    compression_ratio: float = 2.4
    """Ratio of UTF-8 to its zlib size; repetitive text is above this limit."""
    mean_logprob: float = -1.0
    no_speech: float = 0.6
    """Above this probability an improbable text is silence."""
    unsure: float = -2.0
    """Mean log-probability below which the last attempt's text is left out: twice as improbable as what is decoded
    again. What Whisper writes of tones and loud noise is below it."""
    forget: float = 0.5
    """Text decoded at a higher temperature is not used as a prompt."""

    def starting_at(self, temperature: float) -> Limits:
        """Without the temperatures below one, which is the first."""
        above = tuple(t for t in self.temperatures if t > temperature)
        return replace(self, temperatures=(temperature, *above))


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The decoded window at one temperature."""

    tokens: tuple[int, ...]
    """Without the end."""
    mean_logprob: float
    """Mean log-probability of the tokens and the end token, at temperature 1."""
    no_speech: float
    temperature: float

    def silent(self, limits: Limits) -> bool:
        """Check whether the window holds no speech, so that its text is dropped."""
        return self.no_speech > limits.no_speech and self.mean_logprob < limits.mean_logprob


def unsure(found: Attempt, ratio: float, limits: Limits) -> str | None:
    """Return why an attempt's text is not believed; its compression ratio is given."""
    if found.silent(limits):
        return f"the model hears no speech (probability {found.no_speech:.2f})"
    if found.mean_logprob < limits.unsure:
        return f"the model is not sure of any word (mean log-probability {found.mean_logprob:.1f})"
    if found.mean_logprob < limits.mean_logprob and ratio > limits.compression_ratio:
        return f"the model repeats itself (compression ratio {ratio:.1f})"
    return None


def decode(
    begin: Callable[[], Steps],
    prompt: Sequence[int],
    vocabulary: Vocabulary,
    *,
    room: int,
    limits: Limits,
    ratio: Callable[[Sequence[int]], float],
    seed: int,
    attempt: Callable[..., Reading[Attempt]],
) -> Reading[Attempt]:
    """The first attempt that is within the limits, else the last one; `begin` gives a decoder with an empty cache.

    `room` is how many tokens fit behind the prompt. `attempt` decodes once at one temperature.
    """
    for temperature in limits.temperatures:
        random = torch.Generator().manual_seed(seed)
        tried = yield from attempt(
            begin(), prompt, vocabulary, room=room, temperature=temperature, random=random
        )
        good = tried.mean_logprob >= limits.mean_logprob and ratio(tried.tokens) <= limits.compression_ratio
        if good or tried.silent(limits):
            break
    return tried


def attempt(
    steps: Steps,
    prompt: Sequence[int],
    vocabulary: Vocabulary,
    *,
    room: int,
    temperature: float,
    random: torch.Generator,
) -> Reading[Attempt]:
    """One window at one temperature."""
    hidden_TE = yield steps, prompt
    at_start_V = steps.logits(hidden_TE[prompt.index(vocabulary.start)])
    tokens, total, ended = list[int](), 0.0, False
    while len(tokens) < room and not ended:
        logits_V = allow(steps.logits(hidden_TE[-1]), tokens, vocabulary)
        token = int(sample(logits_V[None], temperature, [random])[0])
        total += float(logits_V.log_softmax(-1)[token])
        ended = token == vocabulary.end
        if not ended:
            tokens.append(token)
            if len(tokens) < room:
                hidden_TE = yield steps, [token]
    return Attempt(
        tokens=tuple(tokens),
        mean_logprob=total / (len(tokens) + ended),
        no_speech=float(at_start_V.softmax(-1)[vocabulary.no_speech]),
        temperature=temperature,
    )
