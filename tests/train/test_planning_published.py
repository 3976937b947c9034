"""The planner against published runs: time and memory within bounds or a reason, and chosen layouts on top."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.train.published import Published
from benchmarks.train.published_rows import PUBLISHED
from torchwright.train.layout import Layout
from torchwright.train.planning.models import read_model
from torchwright.train.planning.rank import rank

PAGE = Path(__file__).parents[2] / "docs" / "plan-published.md"

named = pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)


@named
def test_time_and_memory_are_near_the_published_or_the_reason_is_given(published: Published) -> None:
    """25% and 15%; a row that agrees needs no reason, and the page says what the planner says now."""
    predicted = published.predict()
    assert published.agrees(predicted) == (not published.why)
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {published.name} |")]
    assert f" {predicted.memory.total / 2**30:.1f} |" in line
    assert published.mfu or f"| {predicted.tokens_per_second:,.0f} |" in line


@pytest.mark.parametrize(
    "published",
    [row for row in PUBLISHED if "torchtitan" in row.source],
    ids=lambda published: published.name,
)
def test_no_layout_that_torchtitan_ran_is_refused(published: Published) -> None:
    """405B in four dimensions at 65,536 tokens among them, whose ring kept its scores: 258 GiB."""
    layout = published.layout
    degrees = {axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp")}
    (candidate,) = rank(
        read_model(published.model), published.job, published.cluster, fixed=degrees
    ).candidates
    assert candidate.plan.layout == layout


@pytest.mark.plain("Llama 2 7B, TPU v4 (16, 1)", "8B, 32 H200, float8")
@pytest.mark.parametrize(
    "published",
    [row for row in PUBLISHED if row.chosen and row.nodes <= 128],
    ids=lambda published: published.name,
)
def test_a_layout_that_was_chosen_for_speed_is_in_the_top_three(published: Published) -> None:
    place = published.ranking().place(published.layout)
    assert place is not None
    assert place <= 3


def test_float8_gains_what_was_published() -> None:
    """torchtitan: 1.28x on 8 GPUs; Meta and Crusoe: 1.34x to 1.43x for 70B on about two thousand H200."""
    rows = {row.name: row for row in PUBLISHED}
    small = [rows[name].predict().tokens_per_second for name in ("8B, 8 H100, float8", "8B, 8 H100")]
    assert small[0] / small[1] == pytest.approx(8532 / 6667, rel=0.05)
    names = ("70B, 1,920 H200, float8_rowwise", "70B, 1,920 H200, bf16")
    large = [rows[name].predict().tokens_per_second for name in names]
    assert 1.25 < large[0] / large[1] < 1.5


def test_the_example_layouts_of_the_sources_are_theirs() -> None:
    layouts = {row.name: row.layout for row in PUBLISHED}
    assert layouts["405B, 512 H100, 1F1B"] == Layout(dp_shard=8, pp=8, tp=8)
    for row in PUBLISHED:
        assert row.layout.processes == row.nodes * row.devices_per_node
        assert row.micro_batch * row.micro_batches * row.layout.batch_ways == row.job.sequences
