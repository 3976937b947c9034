"""The larger model that `benchmarks.llm.grown` makes of a trained one computes the same until it is trained on."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny import build, save

from benchmarks.harness import run
from benchmarks.llm.grown import grow
from benchmarks.llm.modules import PIECE, pieces
from torchwright.models.decoder import load_decoder


def test_a_model_grows_without_a_change_of_its_logits(tmp_path: Path) -> None:
    """In float32, to the rounding of sums of twice as many terms; no two copies of a feature stay equal."""
    folder = save(build("llama"), tmp_path / "small")
    grow(folder, tmp_path / "large", layers=7)
    small, large = (load_decoder(path, torch.float32) for path in (folder, tmp_path / "large"))
    assert large.config.layers == 7
    assert (large.config.model, large.config.heads) == (2 * small.config.model, 2 * small.config.heads)
    ids_BT = torch.randint(small.config.vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = small.logits(ids_BT)
    assert (large.logits(ids_BT) - expected).abs().max() < 1e-5 * expected.abs().max()
    weight = load_file(tmp_path / "large" / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    left, right = weight.chunk(2, 1)
    assert (left != right).float().mean() > 0.9


def test_held_out_text_is_not_trained_on(tmp_path: Path) -> None:
    held_out = (run.BUNDLED / "eval.txt").read_text("utf-8")
    (tmp_path / "known.py").write_text(held_out[: 2 * PIECE + 300], "utf-8")
    (tmp_path / "other.py").write_text("x = 1\n" * PIECE, "utf-8")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "more.py").write_text("y = 2\n" * PIECE, "utf-8")
    assert "".join(pieces([tmp_path], 1_000_000)) == "x = 1\n" * PIECE
