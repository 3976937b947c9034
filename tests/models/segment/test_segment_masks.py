"""Run lengths, boxes, likeness and suppression against their definitions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchwright.models.segment.files import edge
from torchwright.models.segment.masks import Mask, distinct, from_run_lengths, iou, run_lengths, stability


@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.7, 1.0])
)
def test_run_lengths_say_the_mask(height: int, width: int, seed: int, share: float) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < share
    told = run_lengths(mask)
    assert sum(told["counts"]) == mask.size
    assert all(count > 0 for count in told["counts"][1:])
    # By COCO's definition: column after column, the first run is of zeros.
    flat, inside = [], False
    for count in told["counts"]:
        flat += [inside] * count
        inside = not inside
    assert (mask == np.array(flat).reshape(width, height).T).all()
    assert (from_run_lengths(told) == mask).all()


def test_boxes_areas_and_likeness() -> None:
    one, other = np.zeros((9, 7), bool), np.zeros((9, 7), bool)
    one[2:5, 1:4] = True
    other[3:6, 1:4] = True
    mask = Mask(pixels_HW=one, score=0.5, stability=1.0)
    assert (mask.box, mask.area) == ((1.0, 2.0, 3.0, 4.0), 9)
    assert iou(one, other) == 6 / 12
    assert iou(one & False, one & False) == 1.0
    assert Mask(pixels_HW=one & False, score=0.5, stability=0.0).box == (0.0, 0.0, 0.0, 0.0)
    assert edge(one).sum() == 8
    assert not edge(one)[3, 2]


def test_stability_is_the_iou_of_two_cuts() -> None:
    logits = torch.randn(20, 11, 13) * 3
    wanted = [iou((one > 1).numpy(), (one > -1).numpy()) for one in logits]
    torch.testing.assert_close(stability(logits), torch.tensor(wanted, dtype=torch.float32))
    assert stability(torch.full((1, 3, 3), -5.0)) == 0


def test_of_boxes_that_overlap_the_best_stays() -> None:
    random = np.random.default_rng()
    corner = random.random((60, 2)) * 20
    boxes = np.concatenate([corner, corner + 1 + random.random((60, 2)) * 20], 1)
    scores = random.random(60)

    def alike(one: np.ndarray, other: np.ndarray) -> float:
        shared = np.clip(np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]), 0, None).prod()
        return shared / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - shared)

    kept: list[int] = []
    for number in sorted(range(60), key=lambda i: -scores[i]):
        if all(alike(boxes[number], boxes[other]) <= 0.5 for other in kept):
            kept.append(number)
    assert distinct([tuple(box) for box in boxes], scores.tolist(), 0.5) == kept
    assert distinct([], [], 0.5) == []
