"""Windows side by side: parts are cut at pauses, and every word is heard once, whole, in its place."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from torchwright.core.errors import WorkloadError
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.pauses import LONGEST, is_silent, parts, pauses
from torchwright.models.speech.sound import RATE, of_samples
from torchwright.models.speech.whisper.attempt import Attempt, Limits
from torchwright.models.speech.whisper.model import Whisper
from whispers import SECONDS, noise

WINDOW = SECONDS * RATE
BROKEN = 199


def opened(folder: Path, kind: type[Whisper] = Whisper) -> Whisper:
    model = kind(folder, load_speech(folder).model)
    model.limits = Limits(temperatures=(0.0,), no_speech=2.0)
    return model


def spoken(words: int) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """A sound of words, each a height that is its number, and their times; pauses are short, or long, or missing."""
    sound, times, place = [], [], 0
    for i in range(words):
        hurry = (i // 20) % 2  # for twenty words there is no pause that can be found
        gap = random.uniform(0.06, 0.2) if hurry else random.choice([0.06, 0.4, 1.0, 7.0])
        length = random.uniform(0.15, 0.6)
        silent = round(gap * RATE)
        silent += (
            place + silent
        ) % 160 == 0  # no window begins where a word does, which `listen` takes for a cut one
        sound += [np.zeros(silent), np.full(round(length * RATE), 0.3 + 0.003 * i)]
        times.append((place + len(sound[-2]), place + len(sound[-2]) + len(sound[-1])))
        place = times[-1][1]
    sound.append(np.zeros(RATE))
    return np.concatenate(sound).astype(np.float32), [(a / RATE, b / RATE) for a, b in times]


class Listener(Whisper):
    """A decoder that writes the number of every word that is whole in its window, and begins one that is cut off."""

    def encode(self, samples):
        return samples

    def decode(self, samples, before, prompt, limits, *, seed):
        return listen(self, samples)
        yield


class Deaf(Whisper):
    """A model that may be given nothing."""

    def encode(self, samples):
        raise AssertionError(f"{len(samples)} samples are encoded")


def listen(self, samples):
    tick, blank = self.vocabulary.first_tick, self.tokenizer.encode(" ").ids[0]
    edges = np.flatnonzero(np.diff((samples != 0).astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()
    tokens: list[int] = []
    if edges and edges[0][1] == WINDOW:  # nothing is whole: it goes on where the first one begins
        tokens += [tick, blank, tick + edges[0][0] // 320]
    for begin, end in edges:
        word = round((float(samples[begin]) - 0.3) / 0.003) if begin else BROKEN
        tokens += [tick + begin // 320, 65, word] + [tick - (-end // 320)] * (end < WINDOW)
    return Attempt(tokens=tuple(tokens), mean_logprob=-0.1, no_speech=0.0, temperature=0.0)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_no_word_is_lost_doubled_or_broken(folder, batch):
    samples, times = spoken(120)
    windows = list(opened(folder, Listener).windows(samples, language="en", batch=batch))
    found = [segment for window in windows for segment in window.segments]
    assert [segment.tokens[2] for segment in found] == list(range(120))
    for segment, (begin, end) in zip(found, times, strict=True):
        assert abs(segment.start - begin) <= 0.03
        assert abs(segment.end - end) <= 0.03
    places = [window.until for window in windows]
    assert places == sorted(places)
    assert places[-1] == pytest.approx(len(samples) / RATE, abs=0.01)


def test_a_part_has_the_tokens_that_it_has_alone(folder):
    model = opened(folder)
    samples = np.concatenate(
        [np.concatenate([noise(random.uniform(0.5, 3)), np.zeros(RATE // 2, np.float32)]) for _ in range(5)]
    )
    cut = list(parts(of_samples(samples), WINDOW))
    assert np.array_equal(np.concatenate([part for _, part in cut]), samples)
    alone = [
        segment.tokens
        for _, part in cut
        if not is_silent(part)
        for segment in model.transcribe(part, language="en").segments
    ]
    for batch in (2, 3):
        found = model.transcribe(samples, language="en", batch=batch)
        assert [segment.tokens for segment in found.segments] == alone


def test_parts_follow_each_other():
    for _ in range(5):
        samples, times = spoken(60)
        begin = 0
        for first, part in parts(of_samples(samples), WINDOW):
            assert first == begin
            begin += len(part)
            assert not any(a < begin / RATE < b for a, b in times)
        assert begin == len(samples)


def test_what_has_no_pause_is_cut_at_its_quietest_place():
    samples = np.random.uniform(-0.5, 0.5, (LONGEST + 2) * WINDOW).astype(np.float32)
    place = (LONGEST - 1) * WINDOW + 20_800
    samples[place : place + 640] *= 0.1
    (_, first), *_ = parts(of_samples(samples), WINDOW)
    assert len(first) == place - place % 320 or abs(len(first) - place) <= 640


def test_pauses_are_found_beside_noise():
    samples = np.random.randn(3 * RATE) * np.repeat([1.0, 0.005, 1.0], RATE)
    assert pauses(samples.astype(np.float32)) == pytest.approx([1.5 * RATE], abs=400)
    hum = np.random.randn(3 * RATE) * np.repeat([1.0, 0.2, 1.0], RATE)  # too loud to be sure
    assert not len(pauses(hum.astype(np.float32)))


def test_silence_is_not_decoded(folder):
    found = opened(folder, Deaf).transcribe(np.zeros(9 * RATE, np.float32), batch=4)
    assert (found.segments, found.seconds) == ((), 9.0)


def test_a_batch_has_its_limits(folder):
    for batch in (0, 1000):
        with pytest.raises(WorkloadError, match="a batch of"):
            next(opened(folder).windows(noise(1), batch=batch))


def test_the_first_window_is_given_out_before_the_last_is_read(folder):
    """Text appears as it is found: a sound is not read to its end first."""
    model, samples = opened(folder), np.tile(noise(1) * np.repeat([1, 0], RATE // 2), 60)
    windows = model.windows(samples, language="en", batch=2)
    assert [window.until < 9 for window in itertools.islice(windows, 2)] == [True, True]
