"""Ten architectures of the model zoo benchmark, small, from the search to an artifact that is right in a new process.

`python -m benchmarks.optimize.zoo` has all of them as published, and times them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torchwright as tw

pytest.importorskip("transformers", reason="its architectures")
sys.path.append(str(Path(__file__).parents[1]))

BUDGET, SECONDS = 0.01, 240.0
STEPS = ("dtype", "compile")
"""Named, so that what is tried does not depend on how busy the machine is."""
TINY = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
SMALL: dict[str, dict[str, Any]] = {
    "BertModel": {**TINY, "num_hidden_layers": 2},
    "MobileBertModel": {"num_hidden_layers": 2},
    "OlmoeForCausalLM": {
        **TINY,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_hidden_layers": 2,
        "vocab_size": 500,
    },
    "MambaForCausalLM": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500},
    "T5ForConditionalGeneration": {
        "d_model": 64,
        "d_kv": 16,
        "num_heads": 4,
        "num_layers": 2,
        "vocab_size": 500,
    },
    "SwinForImageClassification": {"image_size": 112, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]},
    "MobileNetV1ForImageClassification": {"image_size": 96, "depth_multiplier": 0.5},
    "YolosForObjectDetection": {**TINY, "num_hidden_layers": 2, "image_size": [64, 96]},
    "SEWForCTC": {**TINY, "num_hidden_layers": 2},
    "PatchTSTForPrediction": {"num_hidden_layers": 2},
}
"""Fields of the configuration in which they differ from benchmarks/models/zoo.py."""


def row(**changes: Any) -> dict[str, Any]:
    even = {"original": [2.0, 1.9, 2.1], "by_hand": [1.2, 1.1, 1.3], "openvino": [1.0, 0.9, 1.1]}
    plain = {
        "model": "BertModel",
        "kind": "text",
        "cut": "",
        "cpu": "a processor",
        "threads": 1,
        "commit": "abc",
        "versions": {"torch": "2"},
        "budget": BUDGET,
        "kept": "dtype",
        "fresh_loss": 0.001,
        "ms": {"original": 2.0, "torchwright": 1.0},
        "best": {"by_hand": "freezing", "openvino": "f32"},
    }
    return plain | {"over": even | changes.pop("over", {})} | changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"fresh_loss": 0.02}, ["off by 2.00% on fresh inputs"]),
        ({"wrong": ["fold_batchnorm"]}, ["the rewrite of fold_batchnorm is wrong"]),
        ({"fresh_loss": "ValueError: shape"}, ["another batch: ValueError: shape"]),
        ({"over": {"original": [0.9, 0.8, 0.97]}}, ["0.90x of the original's speed"]),
        ({"over": {"original": [0.9, 0.8, 0.99]}}, []),
        ({"over": {"openvino": [0.9, 0.8, 1.0]}}, ["behind OpenVINO f32: 0.90x"]),
        ({"over": {"by_hand": [0.5, 0.4, 0.6]}}, ["behind compile by hand, freezing: 0.50x"]),
    ],
)
def test_a_row_says_what_is_wrong_slower_or_behind(changes: dict[str, Any], says: list[str]) -> None:
    from benchmarks.optimize import zoo_page

    found = row(**changes)
    assert zoo_page.faults(found) + zoo_page.behind(found) == says
    assert "; ".join(says) in zoo_page.as_line(found)


def test_the_page_has_the_newest_row_of_each_and_what_has_none() -> None:
    from benchmarks.optimize import zoo_page

    failed = {key: row()[key] for key in ("model", "kind", "cut", "cpu", "threads", "commit", "versions")}
    rows = [row(fresh_loss=0.5), row(), failed | {"model": "GPT2LMHeadModel", "failure": "no answer"}]
    page = zoo_page.page(rows)
    assert "2 of 164 architectures were run" in page
    assert "| right | 1 of 2 (50%) | 100% |" in page
    assert "- `GPT2LMHeadModel`: no answer" in page
    assert "### Not run here yet: 162" in page
    assert "off by" not in page


def test_a_search_is_given_several_calls_that_differ() -> None:
    from benchmarks.models import zoo as models

    name = "T5ForConditionalGeneration"
    _, example = models.make(name, **SMALL[name])
    _, calls = models.make_several(name, **SMALL[name])
    assert len(calls) == models.INPUTS
    assert isinstance(example, dict)
    for key, tensor in example.items():
        given = [call[key] for call in calls if isinstance(call, dict)]
        assert torch.equal(given[0], tensor)
        assert {each.shape for each in given} == {tensor.shape}
        if key != "attention_mask":
            assert len({each.sum().item() for each in given}) == len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_an_artifact_is_right_on_other_inputs_in_another_batch_in_a_new_process(
    name: str, tmp_path: Path
) -> None:
    from benchmarks.harness import contenders
    from benchmarks.models import zoo as models
    from benchmarks.optimize import zoo, zoo_page

    model, inputs = models.make_several(name, **SMALL[name])
    result = tw.optimize(
        model, inputs, max_drop=BUDGET, time_budget=SECONDS, techniques=STEPS, progress=False
    )
    with warnings.catch_warnings():
        # Where nothing was faster it needs the caller's module, which it is given.
        warnings.simplefilter("ignore")
        result.save(tmp_path / "artifact")
    _, fresh = models.make(name, models.OTHER_BATCH, inputs=2, **SMALL[name])
    loaded = contenders.FromArtifact(model, str(tmp_path / "artifact"))
    with contenders.contenders() as start:
        loss = zoo.fresh_loss(start, model, loaded, fresh)
    assert not isinstance(loss, str), loss
    assert loss <= zoo_page.SLACK * BUDGET
