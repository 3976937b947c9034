"""The scenes that give segmentation its true masks, and the small model that is trained and judged on them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchwright as tw

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(scope="module")
def scenes() -> Any:
    return _script("scenes")


@pytest.fixture(scope="module")
def training() -> Any:
    return _script("train_scenes")


def _script(name: str) -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("seed", [0, 7, 1_000_003])
def test_masks_are_of_what_is_seen(scenes: Any, seed: int) -> None:
    one, again = scenes.scene(seed), scenes.scene(seed)
    assert np.array_equal(one.picture_HW3, again.picture_HW3)
    assert np.array_equal(one.masks_NHW, again.masks_NHW)
    assert one.picture_HW3.shape == (scenes.SIDE, scenes.SIDE, 3)
    assert one.masks_NHW.sum(0).max() == 1, "a pixel belongs to the topmost object alone"
    assert (one.masks_NHW.sum((1, 2)) >= scenes.FEWEST_PIXELS).all()
    random = np.random.default_rng(seed)
    for mask in one.masks_NHW:
        x, y = scenes.point_on(mask, random)
        assert mask[int(y), int(x)]
        left, top, right, bottom = map(int, scenes.box_of(mask))
        outside = mask.copy()
        outside[top:bottom, left:right] = False
        assert not outside.any()


def test_the_loss_falls_with_the_masks(training: Any) -> None:
    wanted = (torch.rand(4, 1, 8, 8) > 0.5).float()
    right, wrong = (wanted * 2 - 1) * 10, (1 - wanted * 2) * 10
    for loss in (training.focal, training.dice):
        good, bad = loss(right, wanted), loss(wrong, wanted)
        assert good.shape == (4, 1)
        assert (good < 0.01).all()
        assert (bad > 0.5).all()


def test_a_fresh_model_sees_pictures_and_places(training: Any) -> None:
    """As transformers begins one, all pictures are alike to 1e-20, and places a pixel apart are strangers."""
    model = training.new_model().eval()
    pixels = torch.from_numpy(np.stack([training.scene(seed).picture_HW3 for seed in range(4)]))
    with torch.no_grad():
        seen = model.get_image_embeddings(training.normalized(pixels.permute(0, 3, 1, 2).float()))
        places = model.get_image_wide_positional_embeddings()[0]
    assert seen.std(0).mean() > 1e-2
    beside = torch.nn.functional.cosine_similarity(places[:, :, 1:], places[:, :, :-1], dim=0)
    apart = torch.nn.functional.cosine_similarity(places[:, :, 6:], places[:, :, :-6], dim=0)
    assert beside.mean() > 0.2 > apart.mean().abs()


def test_one_scene_is_learned_and_judged(
    training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss on one scene falls in a few steps, and what is saved is judged through the door that users have."""
    model, scene = training.new_model(), training.scene(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = list[float]()
    for _ in range(12):
        loss = training.loss_of(model, [scene], np.random.default_rng(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < 0.95 * losses[0]
    model.eval().save_pretrained(tmp_path)
    training.judge([str(tmp_path)], 2)
    row = capsys.readouterr().out.splitlines()[-1]
    point, box, best = (float(cell) for cell in row.split("|")[3:6])
    assert 0 <= point <= best <= 1
    assert 0 <= box <= 1
    found = training.of_scene(tw.load_segmenter(tmp_path), scene, np.random.default_rng(0))
    assert len(found) == len(scene.masks_NHW)
