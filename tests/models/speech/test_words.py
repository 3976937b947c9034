"""Words in time: the alignment against transformers' own parts and against a plain search over all paths."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from folders import change_json
from torchwright.core.errors import ModelError
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.steps import TransformersSpeech
from torchwright.models.speech.whisper.align import median, read_heads, smooth, starts
from torchwright.models.speech.whisper.model import Whisper
from torchwright.models.speech.whisper.words import Span, split
from whispers import SECONDS, noise, tiny


def opened(folder) -> Whisper:
    model = load_speech(folder)
    assert isinstance(model, Whisper)
    return model


def test_the_path_is_the_best_of_all():
    """Every path through a small matrix is tried, in float64."""

    def paths(i: int, j: int):
        if (i, j) == (0, 0):
            yield ((0, 0),)
        for a, b in ((i - 1, j - 1), (i - 1, j), (i, j - 1)):
            if a >= 0 and b >= 0:
                for path in paths(a, b):
                    yield (*path, (i, j))

    for T, S in itertools.product((1, 2, 4), (1, 3, 5)):
        gain_TS = np.random.randn(T, S)
        best = max(paths(T - 1, S - 1), key=lambda path: sum(gain_TS[cell] for cell in path))
        assert starts(gain_TS).tolist() == [min(j for i, j in best if i == row) for row in range(T)]


def test_the_path_is_that_of_transformers():
    """Whole numbers are exact in the float32 of theirs, and are as good as each other often."""
    for _ in range(20):
        gain_TS = np.random.randint(-4, 5, (random.randint(1, 30), random.randint(1, 60))).astype(np.float64)
        rows, times = _dynamic_time_warping(-gain_TS)
        jumps = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
        assert starts(gain_TS).tolist() == times[jumps].tolist()


def test_the_median_is_that_of_transformers():
    for size in (1, 3, 4, 50):
        values = torch.randn(2, 5, size)
        assert torch.equal(median(values), _median_filter(values, 7))


@pytest.mark.parametrize(
    "speech",
    [lambda model, reference: model.model, lambda model, reference: TransformersSpeech(reference)],
    ids=["as it is opened", "transformers"],
)
def test_token_times_are_those_of_transformers(tmp_path, speech):
    """Attention by hooks, and all behind it, against `_extract_token_timestamps` on eager attention's own weights."""
    model = opened(tiny(tmp_path))
    reference = WhisperForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        features = model.features(noise(SECONDS))
        states = reference.get_encoder()(features).last_hidden_state
        ids = [*model.vocabulary.prompt("en", "transcribe"), *random.choices(range(256), k=25)]
        ran = speech(model, reference)
        looks_HTS = ran.cross_attention(model.heads, ids, ran.encode(features))
        out = reference.get_decoder()(
            input_ids=torch.tensor([ids]), encoder_hidden_states=states, output_attentions=True
        )
        assert model.heads == [(0, 1), (1, 0)]
        for looks_TS, (layer, head) in zip(looks_HTS, model.heads, strict=True):
            torch.testing.assert_close(
                looks_TS.softmax(-1), out.cross_attentions[layer][0, head], atol=1e-5, rtol=1e-3
            )
        generated = SimpleNamespace(
            cross_attentions=[out.cross_attentions], sequences=torch.tensor([[*ids, 0]])
        )
        generated = type("Out", (dict,), {"__getattr__": dict.__getitem__})(vars(generated))
        theirs = reference._extract_token_timestamps(
            generated, [list(head) for head in model.heads], num_input_ids=0
        )
    mine = 0.02 * starts(smooth(looks_HTS))
    assert np.abs(theirs[0, : len(ids)].numpy() - mine).mean() < 0.05


def test_words_are_those_of_transformers(tmp_path):
    model = opened(tiny(tmp_path))
    tokenizer = model.tokenizer
    texts = [
        ' He said, "Wait (here)!" — and left... ¿Qué? ',
        " one  two-three 'tis it's",
        "naïve 東京です。 🙂 ok",
        " ",
    ]
    stub = SimpleNamespace(decode=lambda ids, **_: tokenizer.decode(ids), eos_token_id=model.vocabulary.end)
    for text, language in itertools.product(texts, ("en", "zh")):
        ids = tokenizer.encode(text).ids
        found = split(ids, tokenizer.decode, language)
        wanted, tokens, _ = _combine_tokens_into_words(
            stub, ids, {"en": "english", "zh": "chinese"}[language]
        )
        kept = [(word, len(own)) for word, own in zip(wanted, tokens, strict=True) if own]
        assert [(span.text, span.tokens) for span in found] == kept
        assert sum(span.tokens for span in found) == len(ids)
    half = tokenizer.encode("東").ids[:2]
    assert sum(span.tokens for span in split([65, *half], tokenizer.decode, "en")) == 3
    assert split([], tokenizer.decode, "en") == []
    assert split(tokenizer.encode(" Hi, Ada!").ids, tokenizer.decode, "en") == [
        Span(" Hi,", 4),
        Span(" Ada!", 5),
    ]


@pytest.mark.parametrize("peaks", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_words_follow_each_other_and_change_no_text(tmp_path, peaks):
    model = opened(tiny(tmp_path, peaks=peaks))
    samples = noise(2.1 * SECONDS)
    plain = model.transcribe(samples, language="en")
    found = model.transcribe(samples, language="en", timestamps="word")
    assert [segment.tokens for segment in found.segments] == [segment.tokens for segment in plain.segments]
    assert found.text == plain.text
    words = [word for segment in found.segments for word in segment.words]
    for segment in found.segments:
        if "\ufffd" not in segment.text:  # bytes that are no text are as many characters as there are pieces
            assert "".join(word.text for word in segment.words).split() == segment.text.split()
        assert (segment.start, segment.end) == (segment.words[0].start, segment.words[-1].end)
    times = [time for word in words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= 2.1 * SECONDS + 1e-9


def test_a_word_is_where_the_decoder_looks():
    """Attention that walks over the sound puts each token where it looks."""
    places = np.sort(np.random.choice(np.arange(20, 180), 12, replace=False))
    distance = torch.arange(200)[None] - torch.from_numpy(places)[:, None]
    looks_HTS = (-(distance**2) / 18.0)[None] + 0.1 * torch.randn(3, 12, 200)
    found = starts(smooth(looks_HTS))
    assert (np.abs(found[1:] - (places[1:] + places[:-1]) / 2) <= 8).all()


def test_heads(tmp_path):
    folder = tiny(tmp_path)
    assert read_heads(folder, 2, 2) == [(0, 1), (1, 0)]
    change_json(folder / "generation_config.json", alignment_heads=None)
    assert read_heads(folder, 4, 2) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    for wrong in ([[0, 2]], [[0]], [0], "all", [], [[0, [1]]]):
        change_json(folder / "generation_config.json", alignment_heads=wrong)
        with pytest.raises(ModelError, match="alignment_heads"):
            read_heads(folder, 2, 2)
