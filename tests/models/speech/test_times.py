"""Times for subtitles: every word gets some, inside of its segment and on sound."""

from __future__ import annotations

import itertools

import numpy as np

from torchwright.models.speech.formats import as_srt, as_vtt
from torchwright.models.speech.transcript import Segment, Transcript, Word
from torchwright.models.speech.whisper.times import apart, shared, trimmed
from torchwright.models.speech.whisper.words import timed


def decode(ids) -> str:
    return "".join(" abcdefgh"[id] for id in ids)


def test_words_without_time_share_that_of_the_next_word_by_their_letters():
    loud = np.ones(100, bool)
    assert shared([10, 10, 10, 40], [1, 2, 3], loud) == [(10, 15), (15, 25), (25, 40)]
    assert shared([10, 40, 40, 40], [3, 2, 1], loud) == [(10, 25), (25, 35), (35, 40)]
    assert shared([10, 20, 20, 30], [5, 1, 1], loud) == [(10, 20), (20, 25), (25, 30)]


def test_a_span_ends_with_its_sound():
    loud = np.zeros(100, bool)
    loud[30:40] = True
    assert trimmed((20, 90), loud) == (30, 40)
    assert trimmed((20, 90), loud, pause=15) == (20, 40)
    assert trimmed((50, 60), loud) == (50, 60)  # there is no sound to hold on to


def test_words_of_any_alignment_have_time_follow_each_other_and_stay_in_the_window():
    draw = np.random.default_rng()
    for _ in range(200):
        ticks = int(draw.integers(1, 250))
        loud = draw.random(ticks) < draw.random()
        texts = [
            [0, *draw.integers(1, 9, draw.integers(1, 5)).tolist()] * int(draw.integers(1, 6))
            for _ in range(3)
        ]
        count = sum(map(len, texts))
        begins = np.sort(draw.integers(0, ticks + 1, count + 1)).tolist()
        edges = np.sort(draw.integers(0, ticks + 1, 6)).tolist()
        within = list(zip(edges[::2], edges[1::2], strict=True))
        found = timed(texts, begins, within, loud, decode, "en")
        words = [word for text in found for word in text]
        assert all(word.start < word.end for word in words)
        times = [time for word in words for time in (word.start, word.end)]
        assert all(b - a > -1e-9 for a, b in itertools.pairwise(times))
        assert times[0] >= 0
        assert times[-1] <= ticks + 1e-9
        for text, own, (least, most) in zip(texts, found, within, strict=True):
            if most - least >= len(own) and len(words) < 10:
                roomy = all(b - a >= 12 for a, b in within)
                assert not roomy or all(least <= w.start and w.end <= most for w in own), text


def test_segments_that_the_model_places_behind_the_end_get_the_last_ticks():
    assert apart([(0, 5), (10, 10), (10, 10)], 10) == [(0, 5), (8, 9), (9, 10)]
    crowded = apart([(0, 0)] * 8, 2)
    assert crowded == [(i / 4, (i + 1) / 4) for i in range(8)]


def test_no_cue_of_a_subtitle_is_empty():
    """Even of times that lie less than a millisecond apart."""
    words = tuple(Word(start=1 + i * 1e-4, end=1 + (i + 1) * 1e-4, text=f" w{i}") for i in range(30))
    segment = Segment(start=1, end=1.003, text="w", tokens=(), mean_logprob=0.0, words=words)
    for text in (as_vtt(Transcript(segments=(segment,))), as_srt(Transcript(segments=(segment,)))):
        cues = [line.replace(",", ".").split(" --> ") for line in text.splitlines() if "-->" in line]
        assert len(cues) == 30
        assert all(begin < end for begin, end in cues)
