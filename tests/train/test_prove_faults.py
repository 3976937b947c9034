"""Faults seeded into the trainer: each is caught by a run file's proof, and named by value, axis, layer and cause."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from faults import FAULTS, seeded
from runs import CONFIG, MIXTURE, make_run

from torchwright.train.prove import Proof, prove
from torchwright.train.prove.proof import read_model
from torchwright.train.run.config.read import read_run

UNTIED = {"model": {"config": CONFIG | {"tie_word_embeddings": False}}}
BIASES = {"model": {"config": CONFIG | {"attention_bias": True}}}
EXPERTS = {"model": {"config": CONFIG | MIXTURE}}
ONE_KEY_HEAD = {"model": {"config": CONFIG | {"num_key_value_heads": 1}}}

NAMED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # fault: (what the run file says, first value that differs, axis, cause and layer)
    "replicas apart": (
        {"layout": {"dp_replicate": 2, "dp_shard": 2}},
        "gradient/norm.weight",
        "dp_replicate",
        "a sum missing on dp_replicate",
    ),
    "up not summed": (
        {"layout": {"dp_shard": 2, "tp": 2}},
        "backward/layers.1.mlp.up.input",
        "tp",
        "a sum missing on tp: the processes' parts add up to the right value, in layers.1.mlp.up",
    ),
    "bias before sum": (
        {"layout": {"tp": 2}, **BIASES},
        "forward/layers.0.attention.o",
        "tp",
        "in layers.0.attention.o",
    ),
    "experts doubled": (
        {"layout": {"dp_shard": 2, "ep": 2}, **EXPERTS},
        "gradient/layers.1.mlp.experts.down",
        "ep",
        "2.000x: a mean missing, or a sum too many, on ep, in layers.1.mlp.experts",
    ),
    "averaged": ({"layout": {"dp_shard": 4}}, "gradient/norm.weight", "dp_shard", "0.500x: a mean too many"),
    "average sums": (
        {"layout": {"dp_shard": 2}},
        "gradient/norm.weight",
        "dp_shard",
        "2.000x: a mean missing",
    ),
    "gather without sum": (
        {"layout": {"tp": 2}, **EXPERTS},
        "backward/layers.1.mlp.input",
        "tp",
        "a gradient incomplete on tp, in layers.1.mlp",
    ),
    "norms not summed": (
        {"layout": {"tp": 2}},
        "gradient/norm.weight",
        "tp",
        "a sum missing on tp: the processes' parts add up to the right value, in norm",
    ),
    "norm of own shard": (
        {"layout": {"dp_shard": 2}},
        "norm",
        "dp_shard",
        "a sum of squares missing on dp_shard",
    ),
    "positions begin anew": (
        {"layout": {"cp": 2, "tp": 2}},
        "ids",
        "cp",
        "tokens that are not those of their positions on cp",
    ),
    "labels lost": ({"layout": {"cp": 2}}, "labels", "cp", "labels lost on cp"),
    "documents in parts": (
        {"layout": {"cp": 2}, "data": {"train": ["a.npy"], "packing": "documents"}},
        "forward/layers.0.attention.o.input",
        "cp",
        "in layers.0.attention",
    ),
    "same rows": (
        {"layout": {"dp_shard": 4}},
        "ids",
        "dp_shard",
        "every process along dp_shard reads the same tokens",
    ),
    "mean of means": (
        {"layout": {"dp_replicate": 2}},
        "loss",
        "dp_replicate",
        "a mean of means on dp_replicate",
    ),
    "means of micro-batches": (
        {"layout": {"dp_shard": 2}, "micro_batches": 2},
        "loss",
        "accumulation",
        "a mean of means on accumulation",
    ),
    "own loads": (
        {"layout": {"dp_replicate": 2}, "experts": {"balance": "bias"}, **EXPERTS},
        "load/layers.0.mlp",
        "dp_replicate",
        "a sum missing on dp_replicate: the processes' parts add up to the right value",
    ),
    "balanced apart": (
        {"layout": {"dp_replicate": 2}, "experts": {"balance": 0.1}, **EXPERTS},
        "backward/layers.1.mlp.router",
        "dp_replicate",
        "in layers.1.mlp",
    ),
    "micro-batch dropped": (
        {"layout": {"pp": 2, "dp_shard": 2}, "micro_batches": 2, **UNTIED},
        "backward/layers.0.mlp.down",
        "pp",
        "a gradient incomplete on pp, in what follows layers.0.mlp.down",
    ),
    "own tokens alone": (
        {"layout": {"cp": 2}},
        "forward/layers.0.attention.o.input",
        "cp",
        "in layers.0.attention",
    ),
    "ring forgets": (
        {"layout": {"cp": 4}, **ONE_KEY_HEAD},
        "backward/layers.1.attention.v",
        "cp=4",
        "a gradient incomplete on cp=4, in layers.1.attention",
    ),
    "recomputed otherwise": (
        {"layout": {"dp_shard": 2}, "recompute": "full"},
        "recomputed/layers.1.attention.o.input",
        "recompute",
        "the backward pass computes something else again than the forward pass did",
    ),
    "compiled embedding": (
        {"layout": {"tp": 2}, "compile": True, **UNTIED},
        "gradient/embedding.weight",
        "tp with compile",
        "0.000x: nothing arrives with tp with compile, in embedding",
    ),
    "not rounded": (
        {"layout": {"dp_shard": 2}, "precision": "bf16"},
        "rounding/gradient",
        "any layout",
        "the precision is not applied",
    ),
    "moments rounded": (
        {"layout": {"dp_shard": 2}},
        "loss/3",
        "dp_shard",
        "the optimizer moves otherwise with dp_shard",
    ),
    "steps counted twice": (
        {"layout": {"dp_replicate": 2}},
        "loss/3",
        "dp_replicate",
        "the optimizer moves otherwise with dp_replicate",
    ),
}
QUICK = ("own loads",)
"""`test_parallel_pieces` compares the ring with one process."""


def proof_of(fault: str, folder: Path, **changes: Any) -> Proof:
    """The proof of a run file whose trainer has a fault."""
    path = make_run(folder, **{"micro_batches": 1, **changes})
    run = read_run(path)
    return prove(str(path), [run], read_model(run, folder), around=functools.partial(seeded, fault))


def test_every_fault_is_tried() -> None:
    assert {"none", *NAMED} == set(FAULTS)


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in NAMED]
)
def test_a_seeded_fault_is_named(fault: str, tmp_path: Path) -> None:
    changes, value, axis, cause = NAMED[fault]
    proof = proof_of(fault, tmp_path, **changes)
    assert not proof.passed
    assert proof.divergence is not None
    assert (proof.divergence.tensor, proof.divergence.axis) == (value, axis)
    assert cause in str(proof.divergence)
