"""Figures of held-out rows and the in-batch loss against counts by hand."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from recommender_runs import make_recommender
from runs import run_processes
from safetensors.torch import load_file

from torchwright.train.recommender.columns import Columns
from torchwright.train.recommender.config import read_recommender
from torchwright.train.recommender.losses import InBatchLoss, log_frequency
from torchwright.train.recommender.quality import auc, click_figures
from torchwright.train.recommender.store import ClickBatch, RowStream
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.processes import processes


@pytest.mark.parametrize("values", [5, 10**9], ids=["many equal", "all different"])
def test_auc_counts_every_pair(values: int) -> None:
    scores, clicked = torch.randint(values, (400,)).double(), torch.randint(2, (400,)).double()
    clicked[:2] = torch.tensor([0.0, 1.0])
    ones, zeros = scores[clicked > 0], scores[clicked == 0]
    wanted = ((ones[:, None] > zeros).double() + (ones[:, None] == zeros).double() / 2).mean()
    assert auc(scores, clicked) == pytest.approx(float(wanted), abs=1e-12)


def test_normalized_entropy_of_the_mean_is_one() -> None:
    clicked = torch.tensor([1.0, 0, 0, 0]).double()
    figures = click_figures(torch.full((4,), math.log(1 / 3)).double(), clicked)
    assert figures["normalized_entropy"] == pytest.approx(1)
    assert figures["auc"] == 0.5
    assert set(click_figures(torch.zeros(4).double(), torch.zeros(4).double())) == {"validation_loss"}


def test_in_batch_loss_row_by_row() -> None:
    """Frequent items are held back, and the row's own item is no wrong answer where it stands again."""
    users, items = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    ids = torch.tensor([[9, 1], [9, 2], [9, 1], [9, 3], [9, 1]])
    log_q = torch.randn(4).double()
    batch = ClickBatch(numbers_BD=torch.empty(5, 0), categories_BC=ids, clicked_B=torch.ones(5))
    with processes(60):
        found = InBatchLoss(0.3, log_q, 1)((users, items), batch)
    total = 0.0
    for row in range(5):
        scores = [float(users[row] @ items[i]) / 0.3 - float(log_q[ids[i, 1]]) for i in range(5)]
        others = [i for i in range(5) if i == row or ids[i, 1] != ids[row, 1]]
        total -= scores[row] - math.log(sum(math.exp(scores[i]) for i in others))
    assert float(found) == pytest.approx(total / 5, rel=1e-12)


def test_frequencies_are_counted() -> None:
    columns = Columns(labelled=False, numbers=(), tables=(("a", 5), ("b", 5)), hexadecimal=False)
    whole = np.array([[0, 1, 4], [0, 1, 4], [0, 2, 4], [0, 1, 0]], np.int32)
    found = log_frequency(RowStream([whole], columns), 1, 5).exp()
    torch.testing.assert_close(found, torch.tensor([0.25, 0.25, 0.25, 0.25, 0.75]))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_recall_rises_and_is_a_count_by_hand(tmp_path: Path, world: int) -> None:
    """Every held-out row against every item, from what the run wrote; one near tie may fall otherwise."""
    path = make_recommender(
        tmp_path,
        towers=True,
        samples=60 * 64,
        embeddings={"lr": 0.02},
        evaluation={"every_steps": 2, "recall_at": [1, 10, 40]},
        checkpoint={},
    )
    for code, told in run_processes(path, world=world):
        assert code == 0, told
    figures = read_figures(tmp_path / "out")
    run = read_recommender(path)
    columns, folder = Columns.of(run), tmp_path / "out" / "model"
    tables = [load_file(file)["weight"].double() for file in sorted((folder / "tables").iterdir())]
    dense = {name: value.double() for name, value in load_file(folder / "dense.safetensors").items()}

    def vector(tower: str, ids: list[int]) -> torch.Tensor:
        first = 0 if tower == "user" else 2
        x = torch.cat([tables[first + place][id] for place, id in enumerate(ids)])
        hidden = (dense[f"towers.{tower}.0.weight"] @ x + dense[f"towers.{tower}.0.bias"]).relu()
        out = dense[f"towers.{tower}.2.weight"] @ hidden + dense[f"towers.{tower}.2.bias"]
        return out / out.norm()

    def rows(text: str) -> list[list[int]]:
        return columns.convert([line.split("\t") for line in text.splitlines()[1:]])[:, 1:].tolist()

    held = rows((tmp_path / "held.tsv").read_text())
    kinds: dict[int, int] = {}
    for _, _, item, kind in rows(gzip.decompress((tmp_path / "train.tsv.gz").read_bytes()).decode()) + held:
        kinds.setdefault(item, kind)
    items = {item: vector("item", [item, kind]) for item, kind in kinds.items()}
    assert len(items) > 64, "more than one batch of them"
    places = []
    for user, country, taken, _ in held:
        scores = {item: float(vector("user", [user, country]) @ found) for item, found in items.items()}
        places.append(sum(score > scores[taken] for score in scores.values()))
    for k in (1, 10, 40):
        wanted = sum(place < k for place in places) / len(places)
        assert figures[60][f"recall@{k}"] == pytest.approx(wanted, abs=1.5 / len(places))
    assert all(figures[60][name] > figures[2][name] + 0.05 for name in ("recall@1", "recall@10"))
