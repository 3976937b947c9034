"""Seeded faults: each is caught, and named by value, axis and cause."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from tiny import COMMON, MODELS

from torchwright.train.layout import Layout
from torchwright.train.prove import prove
from torchwright.train.prove.faults import FAULTS

NAMED = {
    # fault: (model, layout, first divergent value, its dtype, axis, cause)
    "loss halved": ("llama", "cp=2,tp=2", "loss", "float64", "cp with tp", "a sum missing on cp"),
    "chunked loss": ("llama", "tp=2", "backward/norm", "float64", "tp", "a sum missing on tp"),
    "experts doubled": (
        "qwen3-moe",
        "dp_shard=2,ep=2",
        "gradient/layers.1.mlp.experts.down",
        "float64",
        "ep",
        "2.000x: a mean missing on ep",
    ),
    "average sums": (
        "llama",
        "dp_shard=2",
        "gradient/head.weight",
        "float32",
        "dp_shard",
        "2.000x: a mean missing on dp_shard",
    ),
    "labels lost": ("llama", "cp=2", "labels", "float64", "cp", "labels lost on cp"),
    "gather without sum": (
        "qwen3-moe",
        "tp=2",
        "backward/layers.1.attention",
        "float64",
        "tp",
        "a gradient incomplete on tp",
    ),
    "norms not summed": ("llama", "tp=2", "gradient/norm.weight", "float64", "tp", "a sum missing on tp"),
    "norm of own shard": ("llama", "dp_shard=2", "norm", "float64", "dp_shard", "a sum of squares missing"),
    "mean of means": ("llama", "dp_shard=2", "loss", "float64", "dp_shard", "a mean of means on dp_shard"),
}


def config_folder(name: str, folder: Path) -> Path:
    """A folder with nothing but a config.json, which is all that a proof reads."""
    kind, overrides = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(COMMON | overrides))
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def test_every_fault_is_tried() -> None:
    assert set(NAMED) == set(FAULTS)


@pytest.mark.parametrize("fault", NAMED)
def test_a_seeded_fault_is_named(fault: str, tmp_path: Path) -> None:
    model, layout, value, dtype, axis, cause = NAMED[fault]
    proof = prove(config_folder(model, tmp_path), Layout.parse(layout), fault=fault)
    assert not proof.passed
    assert proof.divergence is not None
    assert (proof.divergence.tensor, proof.divergence.dtype, proof.divergence.axis) == (value, dtype, axis)
    assert cause in str(proof.divergence)
