"""Ranking and rejection: every layout is accounted for, and what bounds a layout moves as it must."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math

import pytest
import torch
from rich.console import Console

from torchwright.core.errors import UnknownName
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.planning import render
from torchwright.train.planning.accepted import refusal
from torchwright.train.planning.activations import copies
from torchwright.train.planning.cluster import Cluster, ClusterError, Link, read_device
from torchwright.train.planning.enumerate import divisors, layouts
from torchwright.train.planning.job import Job, JobError, LayoutPlan, make_job
from torchwright.train.planning.models import read_model
from torchwright.train.planning.rank import Ranking, evaluate, rank, read_degrees
from torchwright.train.planning.time import Clock
from torchwright.train.shape import Shape

LLAMA = read_model("llama-3.1-8b")
JOB = Job(tokens_per_step=64 * 8192, context=8192)


def h100(nodes: int = 2, **links: float) -> Cluster:
    device = read_device("h100")
    changed = tuple(dataclasses.replace(link, **links) for link in device.links)
    return Cluster(device=dataclasses.replace(device, links=changed), nodes=nodes, devices_per_node=8)


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return rank(LLAMA, JOB, h100())


def test_divisors() -> None:
    for number in (1, 2, 12, 36, 97, 1920):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_every_layout_is_enumerated_once() -> None:
    found = list(layouts(24, 6))
    assert len(found) == len(set(found))
    assert all(layout.processes == 24 for layout in found)
    wanted = sum(
        1
        for a in range(1, 25)
        for b in range(1, 25)
        for c in range(1, 25)
        for d in range(1, 25)
        if 24 % (a * b * c * d) == 0
        for ep in (1, 2, 3, 6)
        if (b * d) % ep == 0
    )
    assert len(found) == wanted


def test_every_layout_is_either_ranked_or_rejected(ranking: Ranking) -> None:
    rejected = sum(rejection.count for rejection in ranking.rejections)
    assert len(ranking.candidates) + rejected == sum(1 for _ in layouts(16, 0))
    room = h100().device.room
    for candidate in ranking.candidates:
        layout, plan = candidate.plan.layout, candidate.plan
        assert candidate.memory.total <= room
        assert LLAMA.kv_heads % layout.tp == 0
        assert plan.micro_batch * plan.micro_batches * layout.batch_ways == JOB.sequences
        assert math.isclose(sum(candidate.time.parts.values()), candidate.time.total)
        assert all(seconds >= 0 for seconds in candidate.time.parts.values())
        assert 0 < candidate.mfu < 1


def test_the_order_is_by_time_but_for_near_ties(ranking: Ranking) -> None:
    for refused in {bool(one.refused) for one in ranking.candidates}:
        chosen = [one for one in ranking.candidates if bool(one.refused) == refused]
        times = [candidate.time.total for candidate in chosen]
        assert all(later >= earlier * 0.99 for earlier, later in itertools.pairwise(times))
        assert times[0] <= min(times) * 1.01
    assert str(ranking.candidates[0].plan.layout) == "dp_shard=16"


def test_what_the_trainer_refuses_is_marked_and_comes_last() -> None:
    """Whatever comes first, `train` takes: every layout is held against its own checks of a run file."""
    config = read_model("llama-3.2-1b")
    found = rank(config, JOB, h100())
    refused = [candidate.refused for candidate in found.candidates]
    assert refused == sorted(refused, key=bool)
    assert not refused[0]
    assert refused[-1]
    for candidate in found.candidates:
        assert refusal(config, JOB, candidate.plan) == candidate.refused
    staged = [one for one in found.candidates if one.plan.layout.pp > 1]
    assert staged
    assert all("output layer is its embedding" in one.refused for one in staged)
    printed = io.StringIO()
    Console(file=printed, width=160).print(render.table(found, top=len(found.families)))
    assert "* `torchwright train` refuses it" in printed.getvalue()
    last = render.plain(found, top=len(found.families))["layouts"][-1]
    assert last["refused_by_train"] == found.families[-1][0].refused


@pytest.mark.slow
def test_reasons_carry_the_numbers() -> None:
    reasons = {
        rejection.rule: rejection for rejection in rank(LLAMA, JOB, h100(8), tp_across_nodes=True).rejections
    }
    assert "8 key-value heads over tp=16" in reasons["tp does not divide the key-value heads"].reason
    leaves = {rejection.rule: rejection for rejection in rank(LLAMA, JOB, h100(8)).rejections}
    assert "tp=16 over nodes of 8" in leaves["tensor parallelism leaves the node"].reason
    batch = rank(LLAMA, Job(tokens_per_step=3 * 8192, context=8192), h100()).rejections
    assert any("3 sequences over dp_replicate · dp_shard = " in rejection.reason for rejection in batch)
    large = rank(read_model("llama-3.1-405b"), JOB, h100(1))
    assert not large.candidates
    (memory,) = [rejection for rejection in large.rejections if "does not fit" in rejection.rule]
    assert "73.6 GiB" in memory.rule
    assert "GiB (" in memory.reason


def test_experts_are_spread_where_they_divide() -> None:
    mixtral = read_model("mixtral-8x7b")
    found = rank(mixtral, Job(tokens_per_step=64 * 8192, context=8192), h100(), fixed={"pp": 1})
    degrees = {candidate.plan.layout.ep for candidate in found.candidates}
    assert degrees == {1, 2, 4, 8}
    shape, plan = Shape(mixtral), found.candidates[0].plan
    spread = dataclasses.replace(plan, layout=Layout(dp_shard=16, ep=8))
    whole = dataclasses.replace(plan, layout=Layout(dp_shard=16))
    cluster, job = h100(), found.job
    with_ep, without = (evaluate(shape, job, cluster, either) for either in (spread, whole))
    assert with_ep.time.parts["ep"] > 0 == without.time.parts["ep"]
    assert with_ep.memory.gathered < without.memory.gathered
    assert with_ep.memory.parameters == without.memory.parameters


def test_a_token_travels_once_to_each_process_of_its_experts() -> None:
    """Against 20,000 random choices of 2 of 8 experts, to 2%."""
    shape = Shape(read_model("mixtral-8x7b"))
    choices_TC = torch.rand(20_000, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices
    for ep in (1, 2, 4, 8):
        process_TC = choices_TC // (8 // ep)
        counted = (1 + (process_TC[:, 0] != process_TC[:, 1]).double()).mean()
        assert copies(shape, Layout(dp_shard=8, ep=ep)) == pytest.approx(float(counted), rel=0.02)


def test_fixed_degrees_hold() -> None:
    fixed = rank(LLAMA, JOB, h100(), fixed=read_degrees("tp=4, cp=1"))
    assert fixed.candidates
    assert all(
        (candidate.plan.layout.tp, candidate.plan.layout.cp) == (4, 1) for candidate in fixed.candidates
    )
    with pytest.raises(UnknownName, match="layout axis"):
        read_degrees("tensor=4")
    with pytest.raises(LayoutError):
        read_degrees("tp=many")


def plan(layout: str, micro_batch: int = 1, **values: object) -> LayoutPlan:
    parsed = Layout.parse(layout)
    count = JOB.sequences // parsed.batch_ways // micro_batch
    return LayoutPlan(
        layout=parsed, micro_batch=micro_batch, micro_batches=count, **({"recompute": "none"} | values)
    )  # type: ignore[arg-type]


def parts(layout: str, cluster: Cluster, job: Job = JOB, **values: object) -> dict[str, float]:
    return evaluate(Shape(LLAMA), job, cluster, plan(layout, **values)).time.parts  # type: ignore[arg-type]


def test_slower_links_are_waited_for() -> None:
    fast, slow = h100(), h100(bandwidth=2e9)
    # The embedding's gather and the gradients of both ends: 4 bytes each, 7/8 of them from other devices in turn.
    hidden_by_nothing = 4 * 3 * Shape(LLAMA).embedding * 15 / 16 / (450e9 * 0.8)
    micro_batches = JOB.sequences // 16
    assert parts("dp_shard=16", fast)["fsdp"] == pytest.approx(micro_batches * hidden_by_nothing, rel=0.2)
    assert parts("dp_shard=16", slow)["fsdp"] > 50 * parts("dp_shard=16", fast)["fsdp"]
    assert parts("dp_replicate=16", slow)["replicas"] > 0
    assert parts("dp_shard=2,tp=8", slow)["tp"] > 50 * parts("dp_shard=2,tp=8", fast)["tp"] > 0
    same = "matrix products", "attention", "memory", "optimizer"
    for name in same:
        assert parts("dp_shard=16", fast)[name] == parts("dp_shard=16", slow)[name]


def test_computing_follows_the_operations() -> None:
    cluster = h100()
    once, again = parts("dp_shard=16", cluster), parts("dp_shard=16", cluster, recompute="full")
    layers = once["matrix products"] * (1 - 6 * LLAMA.model * LLAMA.vocabulary / _matrix_flops())
    assert again["matrix products"] - once["matrix products"] == pytest.approx(layers / 3, rel=1e-6)
    assert again["attention"] == pytest.approx(once["attention"] * 4.5 / 3.5)
    kept = parts("dp_shard=16", cluster, recompute="selective")
    assert kept["matrix products"] == once["matrix products"]
    assert kept["memory"] > once["memory"]
    # By hand: six operations for each parameter of a matrix and token, at 60% of the peak.
    tokens = JOB.tokens_per_step / 16
    assert once["matrix products"] == pytest.approx(_matrix_flops() * tokens / (989.4e12 * 0.60), rel=1e-6)


def _matrix_flops() -> float:
    """Operations per token in products with weights, forward and backward."""
    shape = Shape(LLAMA)
    layer = shape.layer(shape.kinds[0])
    return 6 * (32 * (layer.attention + layer.feed_forward) + shape.head)


def test_float8_leaves_the_output_layer_alone() -> None:
    cluster = h100()
    job = dataclasses.replace(JOB, precision="float8_rowwise")
    full, half = parts("dp_shard=16", cluster), parts("dp_shard=16", cluster, job)
    head = 6 * LLAMA.model * LLAMA.vocabulary / _matrix_flops() * full["matrix products"]
    speed = 1978.9e12 * 0.50 / (989.4e12 * 0.60)
    assert half["matrix products"] - head == pytest.approx((full["matrix products"] - head) / speed, rel=1e-6)
    assert half["attention"] == full["attention"]


def test_float8_leaves_experts_alone() -> None:
    mixtral, cluster = Shape(read_model("mixtral-8x7b")), h100()
    times = [
        evaluate(mixtral, dataclasses.replace(JOB, precision=precision), cluster, plan("dp_shard=16"))  # type: ignore[arg-type]
        for precision in ("bf16", "float8_rowwise")
    ]
    saved = times[0].time.parts["matrix products"] - times[1].time.parts["matrix products"]
    layer = mixtral.layer(mixtral.kinds[0])
    tokens = JOB.tokens_per_step / 16
    bf16 = 6 * 32 * layer.attention * tokens / (989.4e12 * 0.60)
    assert saved == pytest.approx(bf16 * (1 - 989.4 * 0.60 / (1978.9 * 0.50)), rel=1e-6)


def test_the_pipeline_bubble_shrinks_with_micro_batches_and_pieces() -> None:
    cluster = h100(nodes=2)
    few, many = (parts("dp_shard=8,pp=2", cluster, micro_batch=size) for size in (8, 1))
    apart = parts("dp_shard=8,pp=2", cluster, interleave=4)
    assert few["pipeline"] > many["pipeline"] > apart["pipeline"] > 0


def test_heads_are_exchanged_while_they_last_and_then_a_ring_goes_round() -> None:
    job = Job(tokens_per_step=8 * 65536, context=65536)

    def context(layout: str) -> dict[str, float]:
        parsed = Layout.parse(layout)
        one = LayoutPlan(layout=parsed, micro_batch=1, micro_batches=8 // parsed.batch_ways, recompute="full")
        return evaluate(Shape(LLAMA), job, h100(), one).time.parts

    heads, ring = context("dp_shard=2,cp=8"), context("cp=16")
    assert heads["cp"] > 0
    # A fused ring, whose processes see equally many keys, computes attention as long as anybody.
    assert ring["attention"] == pytest.approx(heads["attention"])
    gemma = dataclasses.replace(LLAMA, attention_soft_cap=50.0)
    capped = LayoutPlan(layout=Layout(cp=16), micro_batch=1, micro_batches=8, recompute="full")
    assert evaluate(Shape(gemma), job, h100(), capped).time.parts["attention"] > 2 * ring["attention"]


def test_emulated_formats_cost_what_they_are() -> None:
    """MX is rounded operator by operator and multiplied in bfloat16."""
    cluster = h100()
    plain, mx = (
        parts("dp_shard=16", cluster, dataclasses.replace(JOB, precision=precision))  # type: ignore[arg-type]
        for precision in ("bf16", "mxfp8")
    )
    assert mx["matrix products"] == plain["matrix products"]
    assert mx["memory"] > 2 * plain["memory"]


def test_experts_are_rounded_as_often_as_tokens_pass_through_them() -> None:
    """By hand, for one layer of one process: values of each product's operands and of all experts' matrices, twice."""
    config = read_model("mixtral-8x7b")
    assert config.experts is not None
    shape = Shape(dataclasses.replace(config, layers=1, sparse=(True,), ropes=config.ropes[:1], windows=(0,)))
    job, (kind, _) = dataclasses.replace(JOB, precision="mxfp8"), shape.stages(1)[0].layers[0]
    one = LayoutPlan(layout=Layout(), micro_batch=1, micro_batches=1, recompute="none")
    clock = Clock(shape, job, h100())
    E, F, C = config.model, config.experts.feed_forward, config.experts.chosen
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    of_attention = 2 * (3 * E + q) + 2 * (q + 2 * kv + E)
    of_experts = C * (2 * (2 * E + F) + 2 * (2 * F + E))
    assert clock._rounded(kind, 1) == of_attention + of_experts
    plain = Clock(shape, dataclasses.replace(job, precision="bf16"), h100())
    more = clock._computing(one, kind).parts["memory"] - plain._computing(one, kind).parts["memory"]
    tokens, matrices = one.tokens(job), 2 * E * (q + kv) + 3 * config.experts.count * E * F
    rounded = tokens * (of_attention + of_experts) + 2 * matrices
    assert more == pytest.approx(8 * rounded / (3.35e12 * 0.80))


def test_the_optimizer_moves_embedding_and_output_layer_too() -> None:
    """By hand: clipping 12 bytes a parameter, AdamW 28, at 80% of the memory's bandwidth."""
    for name in ("llama-3.1-8b", "llama-3.2-1b"):
        shape = Shape(read_model(name))
        seconds = evaluate(shape, JOB, h100(), plan("dp_shard=16")).time.parts["optimizer"]
        assert seconds == pytest.approx(40 * shape.parameters / 16 / (3.35e12 * 0.80))


def test_jobs_that_cannot_be_are_refused() -> None:
    with pytest.raises(JobError, match=r"whole number of sequences.*use 8192 tokens"):
        Job(tokens_per_step=10000, context=8192)
    with pytest.raises(UnknownName, match="did you mean 'bf16'"):
        make_job(8192, 8192, "bf15", "adamw", compile=True)
    with pytest.raises(UnknownName, match="optimizer"):
        make_job(8192, 8192, "bf16", "adamw4", compile=True)
    a100 = Cluster(device=read_device("a100"), nodes=1, devices_per_node=8)
    with pytest.raises(JobError, match="no rate for float8_rowwise"):
        rank(LLAMA, dataclasses.replace(JOB, precision="float8_rowwise"), a100)
    with pytest.raises(ClusterError, match="at least one node"):
        Cluster(device=read_device("a100"), nodes=0, devices_per_node=8)
    alone = dataclasses.replace(
        read_device("a100"), links=(Link(name="inner", bandwidth=1.0, latency=1.0, devices=8),)
    )
    with pytest.raises(ClusterError, match="join 8 devices"):
        Cluster(device=alone, nodes=2, devices_per_node=8)


def test_plain_data_is_json_and_says_the_same(ranking: Ranking) -> None:
    data = json.loads(json.dumps(render.plain(ranking, top=3), allow_nan=False))
    assert len(data["layouts"]) == 3
    first = data["layouts"][0]
    assert first["layout"]["dp_shard"] == 16
    assert first["tokens_per_second"] == pytest.approx(ranking.candidates[0].tokens_per_second)
    assert first["memory"]["total"] == pytest.approx(
        sum(size for name, size in first["memory"].items() if name not in ("total", "moment"))
    )
    assert data["model"]["parameters"] == Shape(LLAMA).parameters
    assert data["not_modelled"]
