"""A head's folder in SpecForge's own code: every tensor is loaded, and each unrolled step computes the same.

`pip install --no-deps specforge` makes this test run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_draft_head import STEPS, made, token_ids
from tiny import build, save

from torchwright.train.draft.target import TargetModel

auto: Any = pytest.importorskip(
    "specforge.modeling.auto", reason="specforge is not installed; its dependencies include SGLang"
)


def test_specforge_loads_the_folder_and_computes_the_same(tmp_path: Path) -> None:
    folder = save(build("llama"), tmp_path / "target")
    target = TargetModel(str(folder), "fp32", None, "cpu")
    head = made(target, tmp_path / "head")
    _, report = auto.AutoDraftModel.from_pretrained(
        tmp_path / "head", torch_dtype=torch.float32, output_loading_info=True
    )
    assert set(report["missing_keys"]) == {"embed_tokens.weight"}, "which it takes from the target"
    assert not report["unexpected_keys"]
    # transformers 5 leaves its rotary tables, which no file has, as they lie in memory: the module is made anew.
    theirs = auto.AutoDraftModel.from_config(
        auto.AutoDraftModelConfig.from_file(str(tmp_path / "head" / "config.json"))
    )
    theirs.load_state_dict(load_file(tmp_path / "head" / "model.safetensors"), strict=False)
    theirs.load_embedding(str(folder))
    assert (theirs.d2t + torch.arange(len(theirs.d2t))).equal(head.ids)
    ids_BT = token_ids(1, 16)
    features_BTF = torch.randn(1, 16, 3 * 64, generator=torch.Generator().manual_seed(5))
    positions_BT = torch.arange(16)[None]
    mask = torch.zeros(1, 1, 16, 16).masked_fill(
        torch.ones(16, 16).triu(1).bool(), torch.finfo(torch.float32).min
    )
    cache: list[list[torch.Tensor]] = [[], []]
    # Its norms are compiled functions.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        ours = [*head.chains(ids_BT, features_BTF, positions_BT, None, STEPS)]
        state = theirs.project_hidden_states(features_BTF)
        for step in range(STEPS):
            following_BT = torch.nn.functional.pad(ids_BT[:, 1 + step :], (0, 1 + step))
            state = theirs.backbone(
                theirs.embed_input_ids(following_BT), state, cache, mask, positions_BT, use_cache=True
            )
            torch.testing.assert_close(ours[step], state, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                head.answer(ours[step]), theirs.compute_logits(state), rtol=1e-4, atol=1e-4
            )
