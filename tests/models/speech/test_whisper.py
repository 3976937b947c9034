"""Whisper against transformers' own: features, which token may follow, whole transcripts; seams, retries, silence."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import WhisperForConditionalGeneration, WhisperTimeStampLogitsProcessor

from folders import change_json
from torchwright.core.errors import ModelError, UnknownName, WorkloadError
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.together import together
from torchwright.models.speech.transcript import compression_ratio
from torchwright.models.speech.whisper.attempt import Attempt, Limits
from torchwright.models.speech.whisper.model import Whisper
from torchwright.models.speech.whisper.pieces import cut
from torchwright.models.speech.whisper.vocabulary import allow
from whispers import SECONDS, WholeFeatures, noise, tiny

GREEDY = Limits(temperatures=(0.0,), no_speech=math.inf)


def opened(folder: Path, limits: Limits = GREEDY) -> Whisper:
    model = load_speech(folder)
    assert isinstance(model, Whisper)
    model.limits = limits
    return model


def at_once(answer: Callable[..., Attempt]) -> Callable[..., Any]:
    """A decoding that has its result without reading anything."""

    def reading(*arguments: Any, **rest: Any) -> Any:
        return answer(*arguments, **rest)
        yield

    return reading


def theirs(folder: Path, features: torch.Tensor, first_tick: int, **asked: str) -> list[list[int]]:
    """The segments' tokens by transformers, without the timestamp that begins the next one."""
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            features, return_timestamps=True, condition_on_prev_tokens=True, return_segments=True, **asked
        )
    found = [segment["tokens"].tolist() for segment in out["segments"][0]]
    return [ids[:-1] if len(ids) > 2 and ids[-2] >= first_tick else ids for ids in found]


def test_features_are_bit_equal_to_transformers(folder):
    model, extractor = opened(folder), transformers.WhisperFeatureExtractor.from_pretrained(folder)
    for seconds in (SECONDS, random.uniform(0.05, SECONDS)):
        samples = noise(seconds)
        wanted = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
        assert torch.equal(model.features(samples), wanted)


@pytest.mark.plain("True-4")
@pytest.mark.parametrize("peaks", [4, 20])
@pytest.mark.parametrize("languages", [True, False])
def test_a_long_sound_has_the_tokens_of_transformers(tmp_path, peaks, languages):
    """Seams, prompts of earlier text and timestamps, over three windows and more."""
    model = opened(tiny(tmp_path, peaks=peaks, languages=languages))
    samples = noise(3.2 * SECONDS)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path)
    whole = extractor(
        samples, sampling_rate=16_000, truncation=False, padding=False, return_tensors="pt"
    ).input_features
    model.features = WholeFeatures(samples, whole, model.features.frames)
    found = model.transcribe(samples)
    asked = {"task": "transcribe"} if languages else {}
    assert [list(s.tokens) for s in found.segments] == theirs(
        tmp_path, whole, model.vocabulary.first_tick, **asked
    )
    assert found.seconds == pytest.approx(3.2 * SECONDS)
    assert all(0 <= s.start <= s.end <= found.seconds for s in found.segments)


def test_what_may_follow_is_what_transformers_allows(folder):
    """Tokens drawn step by step among what is allowed, from fresh logits: both mask the same ones."""
    model = opened(folder)
    words = model.vocabulary
    config = WhisperForConditionalGeneration.from_pretrained(folder).generation_config
    reference = WhisperTimeStampLogitsProcessor(config, begin_index=1)
    for _ in range(20):
        tokens: list[int] = []
        while len(tokens) < 12:
            logits = torch.randn(words.size) * random.choice([1, 3, 10])
            logits[words.first_tick :] += random.uniform(-8, 2)
            masked = logits.clone()
            masked[list(words.suppressed)] = -math.inf
            if not tokens:
                masked[list(words.suppressed_first)] = -math.inf
            ids = torch.tensor([[words.start, *tokens]])
            wanted = reference(ids, masked[None])[0]
            found = allow(logits, tokens, words)
            assert torch.equal(found, wanted)
            token = int(torch.multinomial(found.softmax(-1), 1))
            if token == words.end:
                break
            tokens.append(token)


def test_tokens_are_cut_at_pairs_of_timestamps(folder):
    words = opened(folder).vocabulary
    at, text = (lambda tick: words.first_tick + tick), [1, 2]
    pieces, ahead = cut([at(0), *text, at(40), at(50), *text, at(90), at(90), *text], words, 400)
    assert [(p.begin, p.end) for p in pieces] == [(0, 40), (50, 90)]
    assert ahead == 180  # the text behind the last pair is heard again, in the next window
    pieces, ahead = cut([at(0), *text, at(40), at(50), *text, at(90)], words, 400)
    assert [(p.begin, p.end) for p in pieces] == [(0, 40), (50, 90)]
    assert ahead == 400
    pieces, ahead = cut([at(5), *text], words, 300)
    assert [(p.begin, p.end, p.tokens) for p in pieces] == [(5, 150, (at(5), 1, 2))]
    assert ahead == 300
    assert cut([], words, 400) == ([], 400)


def test_the_language_is_the_one_that_transformers_detects(folder):
    model = opened(folder)
    reference = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    samples = noise(SECONDS)
    found = reference.detect_language(model.features(samples))
    codes = {token: code for code, token in model.vocabulary.languages.items()}
    assert model.transcribe(samples).language == codes[int(found[0])]
    assert model.transcribe(samples, language="de").language == "de"


def test_an_improbable_window_is_tried_again_until_it_is_good(folder):
    model = opened(folder, Limits())
    asked, good = [], 0.4

    def answer(steps, prompt, vocabulary, *, room, temperature, random):
        asked.append(temperature)
        logprob = -0.5 if temperature == good else -1.5
        return Attempt(
            tokens=(vocabulary.first_tick, 70), mean_logprob=logprob, no_speech=0.1, temperature=temperature
        )

    model.attempt = at_once(answer)
    assert model.transcribe(noise(SECONDS)).segments[0].temperature == good
    assert asked == [0.0, 0.2, good]
    good = None
    assert model.transcribe(noise(SECONDS)).segments[0].temperature == 1.0


def test_a_text_that_repeats_itself_is_tried_again(folder):
    model = opened(folder, Limits(temperatures=(0.0, 0.2)))
    assert compression_ratio("") < 1 < 2.4 < compression_ratio("so " * 60)

    def answer(steps, prompt, vocabulary, *, temperature, **rest):
        tokens = (vocabulary.first_tick, *([70] * 200 if not temperature else range(60, 80)))
        return Attempt(tokens=tokens, mean_logprob=-0.1, no_speech=0.9, temperature=temperature)

    model.attempt = at_once(answer)
    assert model.transcribe(noise(SECONDS)).segments[0].temperature == 0.2


def test_silence_has_no_text_and_takes_no_retries(folder):
    model, asked = opened(folder, Limits()), []

    def answer(steps, prompt, vocabulary, *, temperature, **rest):
        asked.append(temperature)
        return Attempt(tokens=(70,), mean_logprob=-2.0, no_speech=0.7, temperature=temperature)

    model.attempt = at_once(answer)
    found = model.transcribe(noise(SECONDS))
    assert (found.segments, found.seconds, asked) == ((), SECONDS, [0.0])


def test_text_that_took_a_high_temperature_prompts_nothing(folder):
    model, prompts = opened(folder, Limits(temperatures=(1.0,))), []

    def answer(steps, prompt, vocabulary, **rest):
        prompts.append(list(prompt))
        return Attempt(tokens=(vocabulary.first_tick, 70), mean_logprob=-0.1, no_speech=0, temperature=1.0)

    model.attempt = at_once(answer)
    model.transcribe(noise(2 * SECONDS), language="en")
    assert prompts[0] == prompts[1]


def test_the_mean_logprob_and_the_draws_are_those_of_the_steps(folder):
    """Against one pass of the decoder over all tokens; equal seeds draw equal tokens."""
    model = opened(folder)
    encoded = model.encode(noise(SECONDS))
    prompt, words = model.vocabulary.prompt("fr", "transcribe"), model.vocabulary

    def draw(seed: int) -> Attempt:
        reading = model.attempt(
            model.model.steps(encoded), prompt, words, room=20, temperature=0.7,
            random=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        return together([reading])[0]

    found = draw(1)
    assert draw(1) == found
    steps = model.model.steps(encoded)
    hidden = steps.read([*prompt, *found.tokens])
    ids = [*found.tokens, words.end][:20]
    logprobs = [
        float(allow(steps.logits(hidden[len(prompt) - 1 + i]), ids[:i], words).log_softmax(-1)[token])
        for i, token in enumerate(ids)
    ]
    assert found.mean_logprob == pytest.approx(sum(logprobs) / len(ids), abs=1e-3)
    chance = steps.logits(hidden[0]).softmax(-1)[words.no_speech]
    assert found.no_speech == pytest.approx(float(chance), abs=1e-4)


def test_what_a_model_cannot_do_is_refused(folder, tmp_path):
    model = opened(folder)
    with pytest.raises(UnknownName, match="language 'xx'"):
        model.transcribe(noise(1), language="xx")
    with pytest.raises(UnknownName, match="timestamps"):
        model.transcribe(noise(1), timestamps="letter")
    english = opened(tiny(tmp_path, languages=False))
    with pytest.raises(WorkloadError, match="English alone"):
        english.transcribe(noise(1), language="de")
    with pytest.raises(WorkloadError, match="English alone"):
        english.transcribe(noise(1), translate=True)
    assert english.transcribe(noise(1), language="en").language == "en"


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("preprocessor_config.json", {"hop_length": 161}, "hop_length"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither"),
        ("generation_config.json", {"suppress_tokens": [10**6]}, "suppress_tokens"),
        ("generation_config.json", {"eos_token_id": 460}, "do not belong together"),
        ("config.json", {"model_type": "wav2vec2"}, "family of speech models 'wav2vec2'"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, file, fields, said):
    tiny(tmp_path)
    change_json(tmp_path / file, **fields)
    with pytest.raises((ModelError, UnknownName), match=said):
        load_speech(tmp_path)
