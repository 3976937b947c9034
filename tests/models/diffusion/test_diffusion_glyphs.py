"""Glyphs' prompts and their reader, and the rows of pictures that a report shows."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[3] / "examples" / "glyphs"))
from glyphs import READER, digit_of, load_reader, make_reader, prompts, read
from torchwright.core.errors import ModelError
from torchwright.models.diffusion.beside import pictures_beside
from torchwright.models.diffusion.diffuser import pixels
from torchwright.models.diffusion.score import losses_of
from torchwright.report.pictures import MOST_ROWS


def test_a_reader_comes_back_from_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no classifier of glyphs"):
        load_reader(tmp_path)
    reader, pictures = make_reader(), torch.rand(6, 3, 32, 32)
    (tmp_path / READER).parent.mkdir()
    save_file(reader.state_dict(), tmp_path / READER)
    assert read(load_reader(tmp_path), pictures) == read(reader, pictures)


def test_each_digit_is_asked_for_in_each_font() -> None:
    assert len(set(prompts())) == 30
    assert sorted(digit_of(prompt) for prompt in prompts()) == sorted(3 * list(range(10)))
    assert digit_of("a serif seven") == 7


def test_pictures_that_changed_most_come_first() -> None:
    before = torch.rand(8, 3, 20, 20)
    strength = torch.randperm(8) / 20
    after = (before + strength.view(-1, 1, 1, 1) * torch.randn(before.shape)).clamp(0, 1)
    rows = pictures_beside([f"picture {i}" for i in range(8)], before, after)
    _, losses = losses_of(before, after)
    wanted = sorted(range(8), key=lambda place: losses[place], reverse=True)[:MOST_ROWS]
    assert int(strength.argmin()) not in wanted
    assert [row.title for row in rows] == [f"picture {i}" for i in wanted]
    assert [picture.caption for picture in rows[0].pictures] == [
        "original",
        "optimized",
        "difference, 4 times as strong",
    ]
    assert "multi-scale SSIM" in rows[0].said


def test_of_a_film_the_frame_that_changed_most_is_shown() -> None:
    before = torch.rand(1, 3, 5 * 16, 24)
    after = (before + 0.01 * torch.randn(before.shape)).clamp(0, 1)
    worst = int(torch.randint(5, ()))
    after[:, :, 16 * worst : 16 * (worst + 1)] = 1 - before[:, :, 16 * worst : 16 * (worst + 1)]
    (row,) = pictures_beside(["a dog, seed 0"], before, after, frames=5)
    assert row.title == f"a dog, seed 0, frame {worst + 1} of 5"
    for picture, wanted in zip(row.pictures, (before, after), strict=False):
        assert (picture.height, picture.width) == (16, 24)
        assert (_read(picture.png) == pixels(wanted[0, :, 16 * worst : 16 * (worst + 1)])).all()


def _read(png: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)))
