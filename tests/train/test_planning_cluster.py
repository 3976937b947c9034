"""Collectives costed by hand on small clusters, and descriptions of devices that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwright.core.errors import UnknownName
from torchwright.train.planning.cluster import (
    Accelerator,
    Cluster,
    ClusterError,
    Link,
    RankGroup,
    axis_groups,
    read_device,
)

INNER = Link(name="inner", bandwidth=100.0, latency=0.0, efficiency=1.0)
OUTER = Link(name="outer", bandwidth=10.0, latency=0.0, efficiency=1.0)


def cluster(nodes: int, per_node: int, *links: Link) -> Cluster:
    device = Accelerator(name="d", memory=1.0, memory_bandwidth=1.0, flops={"bfloat16": 1.0}, links=links)
    return Cluster(device=device, nodes=nodes, devices_per_node=per_node)


def test_groups_follow_the_order_of_the_axes() -> None:
    assert axis_groups([("a", 2), ("b", 3), ("c", 4)]) == {"a": (2, 12), "b": (3, 4), "c": (4, 1)}


@pytest.mark.parametrize(
    ("degree", "distance", "unit", "inside"),
    [(8, 1, 8, 8), (8, 1, 4, 4), (4, 2, 8, 4), (4, 8, 8, 1), (4, 4, 8, 2), (2, 16, 8, 1)],
)
def test_members_inside_a_node(degree: int, distance: int, unit: int, inside: int) -> None:
    ranks = [place * distance for place in range(degree)]
    assert RankGroup(axes=((degree, distance),)).inside(unit) == inside == sum(rank < unit for rank in ranks)


def test_a_gather_inside_a_node_takes_all_but_ones_own_part() -> None:
    four = cluster(2, 4, INNER, OUTER)
    assert four.gather(RankGroup(axes=((4, 1),)), 800.0) == pytest.approx(800 * 3 / 4 / 100)


def test_a_gather_over_nodes_enters_each_node_once_over_all_its_links() -> None:
    two = cluster(2, 4, INNER, OUTER)
    everyone = RankGroup(axes=((8, 1),))
    # Half of 800 bytes enters a node over four links of 10; inside, 7/8 reach each device over 100.
    assert two.gather(everyone, 800.0) == pytest.approx(max(400 / (4 * 10), 700 / 100))
    # One member in each node has one link alone.
    assert two.gather(RankGroup(axes=((2, 4),)), 800.0) == pytest.approx(400 / 10)
    assert two.all_reduce(everyone, 800.0) == 2 * two.gather(everyone, 800.0)


def test_an_all_to_all_sends_what_is_for_others_nodes_over_the_outer_link() -> None:
    two = cluster(2, 4, INNER, OUTER)
    # Of 800 bytes 4/8 leave the node over the device's own outer link.
    assert two.all_to_all(RankGroup(axes=((8, 1),)), 800.0) == pytest.approx(400 / 10)
    assert two.all_to_all(RankGroup(axes=((4, 1),)), 800.0) == pytest.approx(800 * 3 / 4 / 100)


def test_a_ring_enters_each_unit_once() -> None:
    slow = cluster(
        2,
        4,
        Link(name="inner", bandwidth=1e30, latency=1.0),
        Link(name="outer", bandwidth=1e30, latency=100.0),
    )
    # Eight members on two nodes: six steps inside, one between.
    assert slow.gather(RankGroup(axes=((8, 1),)), 1.0) == pytest.approx(6 * 1 + 1 * 100)
    assert slow.gather(RankGroup(axes=((1, 1),)), 1.0) == 0
    # A tree of eight: two levels inside a node of four, one between the two, up and down.
    assert slow.all_reduce(RankGroup(axes=((8, 1),)), 1.0) == pytest.approx(2 * (2 * 1 + 1 * 100))
    # An all-to-all has three peers inside and four outside, whose messages overlap.
    assert slow.all_to_all(RankGroup(axes=((8, 1),)), 1.0) == pytest.approx(
        (1 + 3 / 8) * 1 + (1 + 4 / 8) * 100
    )


def test_three_tiers() -> None:
    rack = Link(name="rack", bandwidth=50.0, latency=0.0, efficiency=1.0, devices=8)
    nested = cluster(4, 4, INNER, rack, OUTER)
    assert [tier.devices for tier in nested.tiers] == [4, 8, 16]
    assert nested.gather(RankGroup(axes=((16, 1),)), 1600.0) == pytest.approx(
        max(1600 * 15 / 16 / 100, 1600 * 12 / 16 / (4 * 50), 1600 * 8 / 16 / (8 * 10))
    )
    assert nested.send(1, 100.0) == 1
    assert nested.send(4, 100.0) == 2
    assert nested.send(8, 100.0) == 10


def test_a_node_alone_has_no_outer_tier() -> None:
    assert [tier.name for tier in cluster(1, 4, INNER, OUTER).tiers] == ["inner"]
    assert [tier.devices for tier in cluster(16, 1, INNER).tiers] == [16]


DESCRIPTION = """
memory = 64e9
memory_bandwidth = 2e12
matmul_efficiency = 0.5
[flops]
bfloat16 = 400e12
[[links]]
name = "inner"
bandwidth = 200e9
latency = 1e-6
[[links]]
name = "outer"
bandwidth = 25e9
latency = 1e-5
"""


def test_a_device_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DESCRIPTION)
    device = read_device(str(file))
    assert (device.name, device.memory, device.matmul_efficiency) == ("mine", 64e9, 0.5)
    assert [link.bandwidth for link in device.links] == [200e9, 25e9]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory = 64e9", "", "no memory"),
        ("memory = 64e9", "memory = -1", "no positive number"),
        ("memory = 64e9", 'memory = "64"', "no positive number"),
        ("memory = 64e9", "memory = 64e9\nfused = 1", "neither true nor false"),
        ("[flops]", "[rates]", "has no rates"),
        ("latency = 1e-6", "", "no latency"),
        ("[[links]]", "[[cables]]", "has no links"),
        ("memory = 64e9", "memory = ", "not TOML"),
    ],
)
def test_descriptions_that_cannot_be_used(tmp_path: Path, old: str, new: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DESCRIPTION.replace(old, new))
    with pytest.raises(ClusterError, match=words):
        read_device(str(file))


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'h100'"):
        read_device("h10")
    file = tmp_path / "mine.toml"
    file.write_text(DESCRIPTION.replace("memory_bandwidth", "memory_bandwith"))
    with pytest.raises(UnknownName, match="did you mean 'memory_bandwidth'"):
        read_device(str(file))
    file.write_text(DESCRIPTION.replace("bfloat16", "int8"))
    with pytest.raises(UnknownName, match="int8"):
        read_device(str(file))
