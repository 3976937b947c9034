"""Ten of the hundred architectures, small, from the search to an artifact that is right in a new process.

`python benchmarks/hundred.py` has all of them as published, and times them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import torchwright as tw

pytest.importorskip("transformers", reason="its architectures")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

BUDGET, SECONDS = 0.01, 25.0
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
"""Fields of the configuration in which they differ from benchmarks/hundred_models.py."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_an_artifact_is_right_on_other_inputs_in_another_batch_in_a_new_process(
    name: str, tmp_path: Path
) -> None:
    import hundred
    import hundred_models
    import hundred_page
    import turns

    model, inputs = hundred_models.make(name, **SMALL[name])
    result = tw.optimize(model, inputs, max_drop=BUDGET, time_budget=SECONDS, progress=False)
    result.save(tmp_path / "artifact")
    _, fresh = hundred_models.make(name, hundred_models.BATCH - 1, inputs=1, **SMALL[name])
    loaded = turns.FromArtifact(model, str(tmp_path / "artifact"))
    with turns.contenders() as start:
        loss = hundred.fresh_loss(start, model, loaded, fresh)
    assert not isinstance(loss, str), loss
    assert loss <= hundred_page.SLACK * BUDGET
