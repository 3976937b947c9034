"""Every causal language model of transformers, shrunken, beside transformers' own `generate` (docs/models.md)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
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


PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
SAME = sorted(
    {kind for line in re.findall(r"^`.*`\.$", PAGE, re.MULTILINE) for kind in re.findall(r"`([^`]+)`", line)}
)
"""Types that the page says generate the same tokens, alone and in eight."""


@pytest.mark.sweep
@pytest.mark.parametrize("kind", SAME)
def test_a_type_is_what_the_page_says(kind: str) -> None:
    found = causal_lms.measured(kind)
    if f"transformers {version('transformers')}'s" not in PAGE and not found["built"]:
        pytest.skip(f"transformers {version('transformers')}: {found['reason']}")
    assert found["built"], found
    assert causal_lms.right(found), found


def test_the_page_has_nine_types_of_ten_of_those_that_can_be_built() -> None:
    found = re.search(r"\*\*(\d+) of (\d+) types", PAGE)
    assert found
    count, built = map(int, found.groups())
    assert count == len(SAME) >= 0.9 * built
    assert built > 150, "the default configurations cannot be shrunken as they were"


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
