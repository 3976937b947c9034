"""`torchwright prove` of a recommender: it holds, and faults in what processes tell each other are caught."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from recommender_runs import DLRM, TWO_TOWER

from torchwright.train.recommender import learner
from torchwright.train.recommender.config import RecommenderRun
from torchwright.train.recommender.embeddings import ShardedEmbeddings
from torchwright.train.recommender.prove import Around, prove
from torchwright.train.run.config.run_file import parse_file


def run(**changes: Any) -> RecommenderRun:
    told = {"kind": "recommender", "out": "out", "samples": 1, "batch": 1, "data": {"train": ["x"]}}
    return parse_file(RecommenderRun, told | changes, "the test")


@pytest.mark.parametrize(
    "given",
    [
        {"dlrm": DLRM, "embeddings": {"groups": 2, "sync_every": 8}},
        pytest.param(
            {"two_tower": TWO_TOWER, "embeddings": {"groups": 2, "flipped": True, "optimizer": "adam"}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dlrm", "two towers"],
)
def test_processes_compute_what_one_computes(given: dict[str, Any]) -> None:
    """To 1e-9 in float64, tables cut in every way."""
    proof = prove("run.toml", run(**given), 4)
    assert proof.passed, proof
    assert [part.processes for part in proof.parts] == [4, 4]


@contextlib.contextmanager
def no_meeting() -> Iterator[None]:
    with mock.patch.object(ShardedEmbeddings, "sync", return_value=None):
        yield


@contextlib.contextmanager
def own_gradients() -> Iterator[None]:
    with mock.patch.object(learner, "mean_gradients", return_value=None):
        yield


@pytest.mark.parametrize(
    ("fault", "first", "likely"),
    [
        (no_meeting, "step 2: table", "copies' mean"),
        pytest.param(own_gradients, "step 1: dense", "dense gradients", marks=pytest.mark.slow),
    ],
)
def test_a_fault_is_caught(fault: Around, first: str, likely: str) -> None:
    proof = prove("run.toml", run(dlrm=DLRM, embeddings={"groups": 2, "sync_every": 2}), 2, fault)
    told = proof.parts[0].first
    assert told is not None
    assert told.startswith(first), told
    assert proof.likely is not None
    assert likely in proof.likely
