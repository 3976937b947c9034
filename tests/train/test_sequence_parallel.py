"""The sequence-parallel pass against one process, on models that others wrote, in float64."""

from __future__ import annotations

import pytest
import torch
from sequence_models import compare

from torchwright.train.prove.processes import on_processes
from torchwright.train.sequence.placement import Shard, local_shape, reshaped

TOLERANCE = 1e-10
REWRITTEN = ["llama", "gpt2", "bert", "mistral", "pooled"]
AT_NIGHT = {"gpt2", "mistral", "bert"}
"""Models that attend as `llama` or `pooled` do, with learned positions or a window."""
REFUSED = ["mamba", "convolution"]


@pytest.fixture(scope="module")
def two(request):
    """What two processes found, each model once: those whose tests run."""
    asked = {item.name for item in request.session.items if item.path == request.path}
    rewritten = [name for name in REWRITTEN if any(f"[{name}]" in test for test in asked)]
    return on_processes(2, compare, rewritten + REFUSED)


def check(found):
    assert found["loss"] < TOLERANCE, found
    assert found["gradient"] < TOLERANCE < found["largest"], found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in AT_NIGHT else ()) for name in REWRITTEN]
)
def test_loss_and_every_gradient_are_those_of_one_process(two, name):
    for process in two:
        check(process[name])
        assert process[name]["attentions"] == 1


@pytest.mark.parametrize(
    ("name", "operation", "line"),
    [
        ("convolution", "aten.conv1d", "self.mix(x.transpose(1, 2))"),
        ("mamba", "aten.", "modeling_mamba.py:"),
    ],
)
def test_what_mixes_tokens_elsewhere_is_refused_with_its_line(two, name, operation, line):
    for process in two:
        assert operation in process[name]["refused"]
        assert line in process[name]["refused"]
        assert "not rewritten: 0" not in process[name]["report"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["shift", "mean"])
def test_a_fault_is_seen(fault):
    (found, _) = on_processes(2, compare, ["llama"], fault)
    assert found["llama"]["loss"] > 1e-4


@pytest.mark.slow
def test_other_ways_to_tell_positions():
    for process in on_processes(2, compare, ["t5", "bloom", "roberta"]):
        for found in process.values():
            check(found)


@pytest.mark.slow
def test_four_processes():
    """More than there are key-value heads; `pooled` has neither heads nor rows that four divide."""
    for process in on_processes(4, compare, REWRITTEN):
        for name in ("llama", "gpt2", "bert", "mistral"):
            check(process[name])
        assert "batch, heads: 2 x 3" in process["pooled"]["refused"]


@pytest.mark.parametrize(
    ("old", "shard", "new"),
    [
        ((2, 8, 3), Shard(1), (16, 3)),
        ((16, 3), Shard(0, 2), (2, 8, 3)),
        ((2, 8, 6), Shard(1), (2, 8, 2, 3)),
        ((2, 8, 6), Shard(1), (2, 1, 8, 6)),
        ((2, 8, 6), Shard(1), (2, 4, 2, 6)),
        ((2, 4, 2, 6), Shard(1), (2, 48)),
    ],
)
@pytest.mark.parametrize("ways", [2, 4])
def test_a_division_is_followed_through_a_reshape(old, shard, new, ways):
    whole = torch.randn(old, generator=torch.Generator().manual_seed(0))
    found = reshaped(shard, old, new, ways)
    assert found is not None
    for rank in range(ways):
        ours = part(whole, shard, rank, ways).reshape(local_shape(new, found, ways))
        assert torch.equal(ours, part(whole.reshape(new), found, rank, ways))


@pytest.mark.parametrize(
    ("old", "shard", "new"), [((2, 9, 4), Shard(2), (2, 36)), ((8, 3), Shard(0), (3, 8))]
)
def test_a_reshape_that_cuts_across_is_not_followed(old, shard, new):
    found = reshaped(shard, old, new, 2)
    whole = torch.arange(torch.Size(old).numel()).reshape(old)
    for rank in range(2) if found else ():
        ours = part(whole, shard, rank, 2).reshape(local_shape(new, found, 2))
        assert torch.equal(ours, part(whole.reshape(new), found, rank, 2))


def part(whole: torch.Tensor, shard: Shard, rank: int, ways: int) -> torch.Tensor:
    """By indices, one run of the axis after the other."""
    size = whole.shape[shard.dim] // shard.outer
    own = range(rank * size // ways, (rank + 1) * size // ways)
    places = [run * size + place for run in range(shard.outer) for place in own]
    return whole.index_select(shard.dim, torch.tensor(places))
