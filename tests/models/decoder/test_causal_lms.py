"""Every causal language model of transformers, shrunken, beside transformers' own `generate` (docs/models.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3]))
from benchmarks.models import causal_lms

ROOT = Path(__file__).parents[3]

OURS = ("gemma4_text", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next", "lfm2", "cohere2", "falcon")
"""One of each kind: native, on the transformers back end, one answer at a time."""


def row(kind: str) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.models.causal_lms", causal_lms.WORKER, kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", OURS)
def test_a_type_generates_the_same_tokens(kind: str) -> None:
    found = row(kind)
    assert found["built"], found
    assert found["generate"] == found["serve"] == "same", found


@pytest.mark.sweep
def test_nine_types_of_ten_generate_the_same_tokens() -> None:
    rows = [causal_lms.measured(kind) for kind in causal_lms.types()]
    built = [row for row in rows if row["built"]]
    wrong = [row for row in built if not causal_lms.right(row)]
    assert len(built) > 150, "the default configurations cannot be shrunken as they were"
    assert len(wrong) <= len(built) / 10, wrong


def test_per_layer_fields_are_cut_to_layers_of_every_kind() -> None:
    layers = {
        "num_hidden_layers": 6,
        "layer_types": ["a", "a", "a", "b", "a", "b"],
        "odd": {"3": {"head_dim": 99}},
    }
    found = causal_lms.smaller(layers | {"num_attention_heads": 32, "eos_token_id": 50_000})
    assert found["num_hidden_layers"] == 4
    assert found["layer_types"] == ["a", "a", "a", "b"]
    assert found["odd"] == {3: {"head_dim": 16}}
    assert (found["num_attention_heads"], found["eos_token_id"]) == (4, 2)
