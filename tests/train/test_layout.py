"""Layouts: read from text, their products, and what they refuse."""

from __future__ import annotations

import pytest

from torchwright.core.errors import UnknownName
from torchwright.train.layout import Layout, LayoutError


@pytest.mark.parametrize(
    ("text", "layout", "processes"),
    [
        ("", Layout(), 1),
        ("dp_shard=4,tp=2", Layout(dp_shard=4, tp=2), 8),
        (" dp_replicate = 2 , dp_shard=4, pp=3,cp=2,tp=2,ep=8 ", None, 96),
        ("dp_shard=4,", Layout(dp_shard=4), 4),
    ],
)
def test_text_is_read_and_experts_add_no_process(text: str, layout: Layout | None, processes: int) -> None:
    read = Layout.parse(text)
    assert layout is None or read == layout
    assert read.processes == processes
    assert Layout.parse("" if str(read) == "one process" else str(read)) == read


def test_the_batch_is_divided_over_replicas_and_shards_alone() -> None:
    assert Layout(dp_replicate=3, dp_shard=4, cp=2, tp=5, pp=7).batch_ways == 12


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=0", "tp is 0"),
        ("tp=2,tp=4", "tp twice"),
        ("tp", "not AXIS=NUMBER"),
        ("tp=-2", "not AXIS=NUMBER"),
        ("tp=2.5", "not AXIS=NUMBER"),
        ("dp_shard=4,ep=3", "does not divide dp_shard · cp = 4"),
    ],
)
def test_what_is_no_layout_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.parse(text)


def test_an_unknown_axis_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'dp_shard'"):
        Layout.parse("dp_shards=4")


def test_experts_may_lie_on_context_parallel_processes() -> None:
    assert Layout(dp_shard=2, cp=4, ep=8).processes == 8


def test_processes_that_do_not_fit_are_told_what_would() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2)
    layout.check_processes(8)
    with pytest.raises(LayoutError, match=r"takes 8 processes.*Found: 12 processes.*dp_replicate=3"):
        layout.check_processes(12)
    with pytest.raises(LayoutError, match="a multiple of 4 processes"):
        layout.check_processes(6)
