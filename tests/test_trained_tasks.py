"""The metrics of benchmarks/models/trained beside loops that compute them one row at a time."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.models.trained.crystals import EnergiesAndForces
from benchmarks.models.trained.file_types import TypeAccuracy
from benchmarks.models.trained.own import Perplexity, WordsHeard
from benchmarks.models.trained.pictures import PredictionPerplexity
from benchmarks.models.trained.pitch import PitchAccuracy, cents
from benchmarks.models.trained.pronunciation import PHONEMES, PhonemesRight
from benchmarks.models.trained.sentences import ReciprocalRank
from benchmarks.models.trained.speech_or_not import SpeechF1
from benchmarks.models.trained.voices import SameSpeaker


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Told(nn.Module):
    """Answers a call of row numbers with those rows of a table."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.rows[places]


def in_calls(count: int, size: int) -> list[tuple[torch.Tensor, ...]]:
    return [(places,) for places in torch.arange(count).split(size)]


def test_perplexity_is_that_of_the_mean_divergence() -> None:
    before, after = torch.randn(6, 5).double(), torch.randn(6, 5).double()
    metric = PredictionPerplexity(in_calls(6, 2), before.log_softmax(-1))
    divergences = []
    for one, other in zip(before.softmax(-1), after.softmax(-1), strict=True):
        divergences.append(sum(float(p * (p / q).log()) for p, q in zip(one, other, strict=True)))
    assert metric(Told(after)) == pytest.approx(math.exp(sum(divergences) / 6), rel=1e-5)
    assert metric(Told(before)) == pytest.approx(1.0, abs=1e-5)


def test_the_rank_counts_documents_that_score_as_high() -> None:
    vectors = torch.randn(14, 4)
    vectors[9] = vectors[8]  # two documents that no query tells apart
    queries = in_calls(7, 3)
    documents = [(places + 7,) for (places,) in queries]
    ranks = []
    for query in range(7):
        scores = [float(vectors[query] @ vectors[7 + document]) for document in range(7)]
        ranks.append(sum(score >= scores[query] - 1e-6 for score in scores))
    found = ReciprocalRank(queries, documents)(Told(vectors))
    assert found == pytest.approx(sum(1 / rank for rank in ranks) / 7)


def test_a_pitch_is_the_mean_of_the_bins_near_the_highest() -> None:
    bins = torch.rand(5, 360)
    bins[0, 2] = bins[1, 358] = 2.0  # near both ends
    for row, found in zip(bins, cents(bins), strict=True):
        top = int(row.argmax())
        near = range(max(0, top - 4), min(360, top + 5))
        total = sum(float(row[place]) for place in near)
        expected = 20 * sum(place * float(row[place]) for place in near) / total
        assert float(found) == pytest.approx(expected, rel=1e-5)


def test_frames_without_a_pitch_do_not_count() -> None:
    expected = torch.full((4, 360), 0.01)
    expected[0, 100] = expected[1, 200] = expected[2, 300] = 0.9
    found = expected.clone()
    found[1] = found[1].roll(1)  # 20 cents higher
    found[3, 10] = 0.9  # where the original heard nothing
    assert PitchAccuracy(in_calls(4, 2), expected)(Told(found)) == pytest.approx(2 / 3)
    assert PitchAccuracy(in_calls(4, 2), expected)(Told(expected)) == 1.0


def test_pairs_of_one_speaker_are_counted_above_pairs_of_two() -> None:
    vectors, speaker = torch.randn(9, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1])
    same, other = [], []
    for a in range(9):
        for b in range(a + 1, 9):
            (same if speaker[a] == speaker[b] else other).append(float(vectors[a] @ vectors[b]))
    expected = sum(x > y for x in same for y in other) / (len(same) * len(other))
    assert SameSpeaker(in_calls(9, 4), speaker)(Told(vectors)) == pytest.approx(expected)


def test_f1_counts_windows_that_are_speech() -> None:
    found, speech = torch.rand(4, 9), torch.rand(4, 9) < 0.5
    counts = {(a, b): 0 for a in (False, True) for b in (False, True)}
    for probability, said in zip(found.flatten().tolist(), speech.flatten().tolist(), strict=True):
        counts[probability >= 0.5, said] += 1
    precision = counts[True, True] / (counts[True, True] + counts[True, False])
    recall = counts[True, True] / (counts[True, True] + counts[False, True])
    expected = 2 * precision * recall / (precision + recall)
    assert SpeechF1(in_calls(4, 2), speech)(Told(found)) == pytest.approx(expected)


def test_perplexity_leaves_the_first_token_of_a_piece_out() -> None:
    logits = torch.randn(3, 5, 7)
    ids = torch.randint(7, (3, 5))
    losses = [
        -float(logits[row, place - 1].log_softmax(-1)[ids[row, place]])
        for row in range(3)
        for place in range(1, 5)
    ]
    found = Perplexity([(ids,)])(lambda _: logits)  # pyright: ignore[reportArgumentType]
    assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_a_transcript_ends_at_its_end_and_leaves_timestamps_out() -> None:
    end, said = 10, torch.tensor([[11, 1, 2, 12, 10, 3], [11, 4, 10, 5, 5, 5]])

    def told(mels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.one_hot(said[mels.long()], 13).float()

    class Names:
        def decode(self, ids: torch.Tensor) -> str:
            return " ".join("zabcdefg"[place] for place in ids.tolist())

    start = torch.full((2, 6), end)
    metric = WordsHeard([(torch.arange(2), start)], ["a b", "d e"], end, Names())
    assert metric.transcripts(told) == ["a b", "d"]  # pyright: ignore[reportArgumentType]
    assert metric(told) == pytest.approx(1 - 1 / 4)  # pyright: ignore[reportArgumentType]


def test_phonemes_that_are_wrong_left_out_or_too_many_count() -> None:
    end = PHONEMES.index("</s>")
    ids = [[PHONEMES.index(name) for name in ("K", "AE1", "T")] + [end], [PHONEMES.index("B"), end, end, end]]
    logits = F.one_hot(torch.tensor(ids), len(PHONEMES)).float()
    metric = PhonemesRight(in_calls(2, 1), [["K", "AE1", "T"], ["B", "IY1"]])
    assert metric(Told(logits)) == pytest.approx(1 - 1 / 5)


def test_a_type_is_right_if_it_is_one_of_the_names() -> None:
    right = torch.tensor([[True, True, False], [False, False, True], [True, False, False]])
    found = F.one_hot(torch.tensor([1, 2, 2]), 3).float()
    assert TypeAccuracy(in_calls(3, 2), right)(Told(found)) == pytest.approx(2 / 3)


def test_the_larger_of_two_relative_errors_counts() -> None:
    energies, forces = torch.randn(4).double(), torch.randn(8, 3).double()

    def told(by_energy: float, by_force: float) -> Any:
        def call(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            place = int(places)
            return energies[place : place + 1] + by_energy, forces[2 * place : 2 * place + 2] * (1 + by_force)

        return call

    metric = EnergiesAndForces(in_calls(4, 1), energies, forces)
    spread = sum(abs(float(each - energies.mean())) for each in energies) / 4
    assert metric(told(0, 0)) == 1.0
    assert metric(told(0.1, 0.001)) == pytest.approx(1 - 0.1 / spread)
    assert metric(told(0, 0.25)) == pytest.approx(0.75)
