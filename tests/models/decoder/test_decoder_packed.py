"""An artifact of a native decoder answers as the decoder that was packed, whatever its family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import MODELS, build, save, token_ids

from torchwright.core.scheme import W4BF16
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu import build as build_kernels
from torchwright.hardware.kernels.linear import PackedLinear
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


def kept(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> PackedLinear:
    """The layer of integers near the weight, as a checkpoint has them."""
    scale_N1 = (weight_NK.float().abs().amax(1, keepdim=True) / 7).half().float()
    integers_NK = ((weight_NK / scale_N1).round() + 8).clamp(0, 15).to(torch.uint8)
    scale_NG = scale_N1.expand(-1, -(-weight_NK.shape[1] // 32))
    return PackedLinear.from_groups(integers_NK, scale_NG, -8 * scale_NG, bias_N, W4BF16)


def test_integers_of_a_checkpoint_are_read_on_any_processor(tmp_path: Path) -> None:
    """Also where they were laid out for another one."""
    if fault := build_kernels.load_fault():
        pytest.skip(f"no kernels: {fault}")
    folder, ids_BT = save(build("llama"), tmp_path / "model"), token_ids(2, 20)
    before, levels = ops.native.isa(), ops.native.isas()
    try:
        for level in {levels[0], levels[-1]}:
            ops.native.use_isa(level)
            (tmp_path / level).mkdir()
            write_packed(load_decoder(folder, torch.bfloat16, make_linear=kept), tmp_path / level)
        for level in {*levels[:2], levels[-1]}:
            ops.native.use_isa(level)
            wanted = load_decoder(folder, torch.bfloat16, make_linear=kept).logits(ids_BT)
            for written in {levels[0], levels[-1]}:
                assert torch.equal(read_packed(tmp_path / written, folder).logits(ids_BT), wanted)
    finally:
        ops.native.use_isa(before)
