"""Moonshine against transformers' own `generate`; long sound is cut where it is quiet, and nothing of it twice."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from moonshines import moonshine
from transformers import MoonshineForConditionalGeneration

from torchwright.core.errors import WorkloadError
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.moonshine.model import Moonshine
from torchwright.models.speech.moonshine.windows import LONGEST, SHORTEST, quietest
from torchwright.models.speech.together import together
from whispers import noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moonshine")
    moonshine(path)
    return path


def test_tokens_are_those_of_transformers(folder):
    model = load_speech(folder)
    assert isinstance(model, Moonshine)
    reference = MoonshineForConditionalGeneration.from_pretrained(folder).eval()
    for seconds in (0.7, 2.9):
        samples = noise(seconds)
        most = math.ceil(6.5 * len(samples) / 16_000)
        with torch.inference_mode():
            ids = reference.generate(torch.from_numpy(samples)[None], max_new_tokens=most, do_sample=False)
            [(found, mean_logprob)] = together([model.decode(samples)])
        wanted = ids[0, 1:].tolist()
        assert found == [token for token in wanted if token != 2]
        assert mean_logprob <= 0


def test_a_long_sound_is_cut_where_it_is_quiet(folder):
    heard = []

    class Numbering(Moonshine):
        def decode(self, samples):
            heard.append(samples.copy())
            return [70 + len(heard)], -0.1
            yield

    model = Numbering(folder, load_speech(folder).model)
    samples = np.random.uniform(-0.5, 0.5, 60 * 16_000).astype(np.float32)
    pause = slice(19 * 16_000, round(19.3 * 16_000))
    samples[pause] *= 0.001
    found = model.transcribe(samples)
    assert np.array_equal(np.concatenate(heard), samples)
    assert pause.start <= len(heard[0]) <= pause.stop
    assert found.segments[0].end == found.segments[1].start == len(heard[0]) / 16_000
    assert found.seconds == found.segments[-1].end == 60
    assert all(len(part) <= LONGEST for part in heard)


def test_windows_side_by_side_say_what_they_say_alone(folder):
    model = load_speech(folder)
    assert isinstance(model, Moonshine)
    with torch.inference_mode():
        windows = [noise(seconds) for seconds in (2.9, 0.7, 1.8)]
        alone = [found for each in windows for found in together([model.decode(each)])]
        beside = together([model.decode(each) for each in windows])
    assert [tokens for tokens, _ in beside] == [tokens for tokens, _ in alone]
    assert [mean for _, mean in beside] == pytest.approx([mean for _, mean in alone], rel=1e-5)
    assert len({tuple(tokens) for tokens, _ in alone}) == 3


def test_a_batch_leaves_silent_windows_out_and_keeps_the_order(folder):
    class Measuring(Moonshine):
        def decode(self, samples):
            return [70 + len(samples) // 16_000], -0.1
            yield

    model, samples = Measuring(folder, load_speech(folder).model), noise(100)
    samples[30 * 16_000 : 75 * 16_000] = 0
    alone = model.transcribe(samples)
    assert len(alone.segments) >= 3
    assert [model.transcribe(samples, batch=batch) for batch in (2, 3, 16)] == [alone] * 3


def test_the_quietest_place_is_found():
    samples = np.ones(LONGEST, np.float32)
    samples[SHORTEST + 8_000 : SHORTEST + 9_600] = 0.1
    assert quietest(samples) == SHORTEST + 8_800


def test_nothing_sounds_and_nothing_is_said(folder):
    found = load_speech(folder).transcribe(np.zeros(30 * 16_000, np.float32))
    assert (found.segments, found.seconds, found.text) == ((), 30, "")


@pytest.mark.parametrize("asked", [{"language": "en"}, {"translate": True}, {"timestamps": "word"}])
def test_what_it_cannot_do_is_refused(folder, asked):
    with pytest.raises(WorkloadError, match="Moonshine"):
        load_speech(folder).transcribe(noise(1), **asked)
