"""An artifact of a native decoder answers as the decoder that was packed, whatever its family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import MODELS, build, save, token_ids

from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.packed import read_packed, write_packed


@pytest.mark.plain("phi3-fp32", "phi3-bf16", "phi3-longrope-fp32", "glm-no-bias-fp32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_read_again(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Norms, sinks, biases, routers, shared experts and the parts of recurrent layers are all kept."""
    folder = save(build(name), tmp_path / "model")
    packed = load_decoder(folder, dtype, "w8a8")
    (tmp_path / "artifact").mkdir()
    write_packed(packed, tmp_path / "artifact")
    again = read_packed(tmp_path / "artifact", folder)
    ids_BT = token_ids(2, 20)
    assert torch.equal(again.logits(ids_BT), packed.logits(ids_BT))
