"""MXFP4 experts are read as transformers unpacks them, and refused where they are damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folders import VOCABULARY, causal, save
from torchwright.core.errors import ModelError
from torchwright.core.scheme import MXFP4
from torchwright.hardware.kernels import ops
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.folder import read_config
from torchwright.models.decoder import load_decoder
from torchwright.optimization.open_model import open_model

EXPERTS = ("gate_up_proj", "down_proj")


def packed(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales of a weight (X, N, K)."""
    generator = torch.Generator().manual_seed(seed)
    X, N, K = shape
    blocks = torch.randint(0, 256, (X, N, K // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 124, (X, N, K // 32), generator=generator, dtype=torch.uint8)


def gpt_oss(folder: Path) -> Path:
    """A small gpt-oss whose experts are kept in MXFP4."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "sliding_window": 8}
    save(causal("GptOss", num_local_experts=4, num_experts_per_tok=2, **sizes), folder)
    tensors = load_file(folder / "model.safetensors")
    for place, name in enumerate(sorted(name for name in tensors if name.endswith(EXPERTS))):
        X, K, N = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed((X, N, K), place)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def unpacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights (X, K, N) in bfloat16 that transformers makes of blocks and scales."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    return {
        name: convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        for name in names
    }


def test_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    folder = gpt_oss(tmp_path)
    checkpoint = Checkpoint(folder, read_config(folder))
    for name, wanted in unpacked(load_file(folder / "model.safetensors")).items():
        found = checkpoint.weight(name, tuple(wanted.shape))
        assert torch.equal(found.rows(0, len(wanted)).bfloat16(), wanted)
        assert torch.equal(found.rows(1, 2).bfloat16(), wanted[1:2])
        assert checkpoint.holds(name)
    assert str(checkpoint.format) == "MXFP4"


def test_a_folder_answers_as_its_unpacked_weights_do(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, plain = gpt_oss(tmp_path / "packed"), tmp_path / "plain"
    shutil.copytree(folder, plain)
    tensors = load_file(folder / "model.safetensors")
    weights = unpacked(tensors)
    others = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    save_file(others | weights, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    ids_BT = torch.randint(5, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        wanted = model(input_ids=ids_BT, use_cache=False).logits
    found = load_decoder(folder, torch.float32).logits(ids_BT)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    kept, wide = (load_decoder(folder, torch.bfloat16, quantize) for quantize in (None, "none"))
    if ops.fault("cpu") is None:
        assert kept.stored == "MXFP4: repacked as mxfp4"
        experts: Any = kept.decoder.get_submodule("layers.0.mlp.experts")
        assert {experts[0].gate_up.scheme, experts[3].down.scheme} == {MXFP4}
    assert wide.stored == "MXFP4: dequantized to bfloat16"
    assert torch.equal(kept.logits(ids_BT), wide.logits(ids_BT))

    opened: Any = open_model(str(folder), dtype="fp32", device="cpu").model
    tokens: list[int] = []
    opened.write([5, 6, 7], 4, seed=0, on_token=tokens.append)
    assert 1 <= len(tokens) <= 4


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda blocks, scales: (blocks[..., :8], scales), "its blocks"),
        (lambda blocks, scales: (blocks, scales[:, :1]), "its scales"),
        (lambda blocks, scales: (blocks.float(), scales), "its blocks"),
        (lambda blocks, scales: (blocks[0], scales), "four dimensions"),
    ],
)
def test_damaged_blocks_are_refused(damage: Any, said: str, tmp_path: Path) -> None:
    folder = gpt_oss(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_blocks")).removesuffix("_blocks")
    blocks, scales = damage(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks.contiguous(), scales.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said):
        open_model(str(folder), dtype="fp32", device="cpu")
