"""The recommender on paper: balance, memory, traffic and time, each against a count by hand."""

from __future__ import annotations

import dataclasses

import pytest

from torchwright.train.planning.cluster import Accelerator, Cluster, Link, read_device
from torchwright.train.planning.recommender import (
    RecommenderJob,
    Sharding,
    ShardingError,
    Tables,
    estimate,
    estimates,
    place,
)

MODEL = RecommenderJob(
    tables=(
        Tables(count=2, rows=1_000_000, dim=64, pooling=10),
        Tables(count=8, rows=1_000, dim=64, pooling=5),
    ),
    dense_parameters=1_000_000,
    samples=100,
)


def cluster(nodes: int = 4, per_node: int = 4, **link: float) -> Cluster:
    outer = {"name": "outer", "bandwidth": 1e9, "latency": 0.0, "efficiency": 1.0} | link
    device = Accelerator(
        name="d",
        memory=1e9,
        memory_bandwidth=1e11,
        memory_efficiency=1.0,
        flops={"bfloat16": 1e12},
        matmul_efficiency=1.0,
        links=(
            Link(name="inner", bandwidth=1e10, latency=0.0, efficiency=1.0),
            Link(**outer),  # type: ignore[arg-type]
        ),
    )
    return Cluster(device=device, nodes=nodes, devices_per_node=per_node)


def test_counts_of_the_model() -> None:
    assert MODEL.table_bytes == 2 * 1_000_000 * (64 * 2 + 4) + 8 * 1_000 * (64 * 2 + 4)
    assert MODEL.vectors == 10 * 64
    assert MODEL.lookups == 2 * 10 + 8 * 5


@pytest.mark.parametrize("contiguous", [True, False])
def test_memory_and_traffic_by_hand(contiguous: bool) -> None:
    one = estimate(MODEL, cluster(), Sharding(group=8, sync_every=10, contiguous_replicas=contiguous))
    assert one.replicas == 2
    # The two large tables are cut into four column pieces each; these and the eight small ones go one to each device.
    shard = MODEL.table_bytes / 8
    assert one.placement.cost == pytest.approx(1.0)
    assert one.placement.vectors == 640
    assert one.memory["tables"] == pytest.approx(shard)
    vectors = 100 * 640 * 2
    assert one.traffic["vectors"] == pytest.approx(2 * vectors * 7 / 8)
    assert one.traffic["ids"] == pytest.approx(100 * (2 * 4 * 10 + 8 * 5) * 8 * 7 / 8)
    assert one.traffic["one sync"] == pytest.approx(2 * shard / 2)
    rows = 100 * (2 * 10 + 8 * 5) * 64 * 2
    assert one.seconds["lookups"] == pytest.approx((3 * rows + 2 * 4 * 100 * 60) / 1e11)
    assert one.seconds["dense"] == pytest.approx(6 * 1e6 * 100 / 1e12)
    if contiguous:
        # Pairs of neighbours: the average stays in the node. A group has two members in each node.
        assert one.seconds["sync"] == pytest.approx(2 * shard / 2 / 1e10 / 10)
        assert one.seconds["exchange"] == pytest.approx(2 * vectors * 6 / 8 / 1e9)
    else:
        assert one.seconds["sync"] == pytest.approx(2 * shard / 2 / 1e9 / 10)
        assert one.seconds["exchange"] == pytest.approx(2 * vectors * 4 / 8 / 1e9)


def test_balance_worsens_as_a_group_outgrows_its_tables() -> None:
    even = RecommenderJob(
        tables=(Tables(count=64, rows=1000, dim=64, pooling=4),), dense_parameters=1, samples=1
    )
    assert (place(even, 64).cost, place(even, 64).bytes) == (1.0, 1.0)
    assert place(even, 48).cost == place(even, 48).bytes == pytest.approx(2 * 48 / 64)
    # With more devices than tables each is cut: by columns as far as these go, then by rows, which sends partial sums.
    assert (place(even, 256).cost, place(even, 256).vectors, place(even, 256).ids) == (
        1.0,
        64 * 64,
        64 * 4 * 4,
    )
    assert (place(even, 512).cost, place(even, 512).vectors) == (1.0, 2 * 64 * 64)
    assert all(place(MODEL, group).cost >= 1 - 1e-12 for group in (1, 2, 4, 8, 16))


def test_averaging_less_often_costs_less_and_alone_nothing() -> None:
    often, seldom = (estimate(MODEL, cluster(), Sharding(group=4, sync_every=every)) for every in (1, 64))
    assert often.seconds["sync"] == pytest.approx(64 * seldom.seconds["sync"])
    alone = estimate(MODEL, cluster(), Sharding(group=16, sync_every=1))
    assert alone.seconds["sync"] == 0
    assert seldom.step == pytest.approx(sum(seldom.seconds.values()))
    assert 0 < seldom.efficiency < 1


def test_a_group_that_fits_a_node_exchanges_inside_it() -> None:
    inside = estimate(MODEL, cluster(), Sharding(group=4, sync_every=1, contiguous_replicas=False))
    spread = estimate(MODEL, cluster(), Sharding(group=4, sync_every=1, contiguous_replicas=True))
    assert inside.seconds["exchange"] < spread.seconds["exchange"]
    assert inside.seconds["sync"] > spread.seconds["sync"]


def test_every_sharding_is_estimated_once() -> None:
    found = [one.sharding for one in estimates(MODEL, cluster(), (1, 8))]
    assert len(found) == len(set(found))
    assert {sharding.group for sharding in found} == {1, 2, 4, 8, 16}
    with pytest.raises(ShardingError, match="groups of 3"):
        estimate(MODEL, cluster(), Sharding(group=3, sync_every=1))


def test_two_thousand_devices_gain_from_replicas() -> None:
    """The finding of 2D sparse parallelism: one group over everything waits for latency and imbalance."""
    tables = (
        Tables(count=4, rows=1_000_000_000, dim=128, pooling=20),
        Tables(count=300, rows=1_000_000, dim=128, pooling=20),
    )
    model = RecommenderJob(tables=tables, dense_parameters=1_000_000_000, samples=1024)
    large = Cluster(device=read_device("h100"), nodes=256, devices_per_node=8)
    whole = estimate(model, large, Sharding(group=2048, sync_every=1))
    grouped = estimate(model, large, Sharding(group=256, sync_every=100))
    assert grouped.step < whole.step
    assert grouped.seconds["exchange"] < whole.seconds["exchange"]
    slower = dataclasses.replace(large.device, memory=1.0)
    assert estimate(model, dataclasses.replace(large, device=slower), grouped.sharding) == grouped
