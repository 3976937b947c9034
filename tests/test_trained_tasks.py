"""The metrics of benchmarks/models/trained beside loops that compute them one row at a time."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.models.trained.pictures import PredictionPerplexity
from benchmarks.models.trained.pitch import PitchAccuracy, cents
from benchmarks.models.trained.sentences import ReciprocalRank
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
