"""Charts over the steps of a run: which points are drawn, smoothed, marked and labelled."""

from __future__ import annotations

import random

import pytest

from torchwright.report.curves import MOST, MOST_MARKS, SMOOTHED_FROM, chart, smoothed, thinned, ticks


def test_a_long_line_is_drawn_by_means() -> None:
    points = [(step, random.random()) for step in range(1, random.randint(MOST + 1, 9 * MOST))]
    drawn = thinned(points)
    assert len(drawn) == MOST
    assert drawn[-1][0] == points[-1][0]
    cut = [0, *(step for step, _ in drawn)]
    for begin, (end, mean) in zip(cut, drawn, strict=False):
        part = [value for step, value in points if begin < step <= end]
        assert mean == pytest.approx(sum(part) / len(part))
    assert thinned(points[:9]) == points[:9]


def test_values_that_are_not_finite_are_left_out() -> None:
    assert chart("title", {"none": [(1, float("nan"))]}, str) is None
    some = chart("title", {"loss": [(1, 1.0), (2, float("inf")), (3, 3.0)]}, str)
    assert some is not None
    assert some.about == "loss: 3.0 at step 3"


def test_a_smoothed_line_lies_over_its_points_and_is_not_delayed() -> None:
    line = [(step, 2.0 * step) for step in range(100)]
    # The mean of neighbours on both sides of a straight line is the line.
    assert [step for step, _ in smoothed(line)] == [step for step, _ in line]
    assert [mean for _, mean in smoothed(line)[10:90]] == pytest.approx([value for _, value in line[10:90]])
    drawn = chart("title", {"loss": line}, str, smooth=True)
    assert drawn is not None
    assert [trace.style for trace in drawn.traces] == ["raw", "first"]
    few = chart("title", {"loss": line[: SMOOTHED_FROM - 1]}, str, smooth=True)
    assert few is not None
    assert [trace.style for trace in few.traces] == ["first"]


@pytest.mark.parametrize("seed", range(20))
def test_labels_are_round_few_and_inside(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.uniform(-10, 10) * 10 ** rng.randint(-8, 8)
    high = low + 10 ** rng.uniform(-8, 8)
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 5
    assert low - 1e-9 * abs(low) <= found[0] < found[-1] <= high + 1e-9 * abs(high)


def test_epochs_and_the_best_validation_are_marked() -> None:
    losses = [(step, 1 / step) for step in range(1, 101)]
    held_out = [(20, 0.5), (60, 0.3), (100, 0.4)]
    marks = [(step, step / 2) for step in range(2, 101, 2)]
    drawn = chart(
        "Loss", {"training": losses, "validation": held_out}, "{:.2f}".format, marks=marks, best=(60, 0.3)
    )
    assert drawn is not None
    assert [key.text for key in drawn.keys] == ["training 0.01", "validation 0.40", "best 0.30 at step 60"]
    assert drawn.ring is not None
    assert drawn.ring[0] == pytest.approx(100 * 59 / 99, abs=0.01)
    assert [mark.text for mark in drawn.marks] == ["10", "20", "30", "40", "50"]
    assert len(drawn.marks) <= MOST_MARKS
    # Without validation there is nothing to ring.
    alone = chart("Loss", {"training": losses, "validation": []}, str, best=(60, 0.3))
    assert alone is not None
    assert alone.ring is None
