"""Quantized folders: logits equal to those of the model that their integers stand for, in each format and family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized as made
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torchwright.core.errors import ModelError
from torchwright.hardware.kernels import ops
from torchwright.hub import weight
from torchwright.hub.weight import Grouped
from torchwright.models.decoder import load_decoder
from torchwright.workloads.huggingface import load_model

INT8_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, **more}


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "awq": (lambda: made.awq(128), "AWQ int4, group 128"),
    "awq-symmetric": (lambda: made.awq(64, symmetric=True), "AWQ int4, group 64"),
    "gptq": (lambda: made.gptq(128), "GPTQ int4, group 128"),
    "gptq-zeros": (lambda: made.gptq(32, symmetric=False), "GPTQ int4, group 32"),
    "gptq-rows": (lambda: made.gptq(-1), "GPTQ int4, one scale a row"),
    "gptq-int8": (lambda: made.gptq(128, 8, symmetric=False), "GPTQ int8, group 128"),
    "gptq-v2": (lambda: made.gptq(64, symmetric=False, v2=True), "GPTQ int4, group 64"),
    "gptq-act-order": (lambda: made.gptq(64, act_order=True), "GPTQ int4, group 64, by activation order"),
    "ct-int4": (
        lambda: made.compressed("pack-quantized", integers(4, "group", group_size=128)),
        "compressed-tensors int4, group 128",
    ),
    "ct-int4-zeros": (
        lambda: made.compressed("pack-quantized", integers(4, "group", group_size=64, symmetric=False)),
        "compressed-tensors int4, group 64",
    ),
    "ct-int4-rows": (
        lambda: made.compressed("pack-quantized", integers(4, "channel")),
        "compressed-tensors int4, one scale a row",
    ),
    "ct-int8-packed": (
        lambda: made.compressed("pack-quantized", integers(8, "channel")),
        "compressed-tensors int8, one scale a row",
    ),
    "ct-w8a8": (
        lambda: made.compressed("int-quantized", integers(8, "channel"), INT8_ROWS),
        "compressed-tensors int8, one scale a row",
    ),
    "ct-int8-zeros": (
        lambda: made.compressed("int-quantized", integers(8, "group", group_size=64, symmetric=False)),
        "compressed-tensors int8, group 64",
    ),
    "ct-fp8": (
        lambda: made.compressed("float-quantized", FP8 | {"strategy": "channel"}),
        "compressed-tensors fp8, one scale a row",
    ),
    "ct-fp8-tensor": (
        lambda: made.compressed("float-quantized", FP8 | {"strategy": "tensor"}),
        "compressed-tensors fp8, one scale a weight",
    ),
    "ct-fp8-block": (
        lambda: made.compressed("naive-quantized", FP8 | {"strategy": "block", "block_structure": [96, 128]}),
        "compressed-tensors fp8, block",
    ),
    "fp8-block": (lambda: made.block_fp8([128, 96]), "FP8, blocks of 128 x 96"),
    "fp8-tensor": (lambda: made.block_fp8(None), "FP8, one scale a weight"),
    "nf4": (lambda: made.nf4(double=False), "bitsandbytes nf4"),
    "nf4-double": (lambda: made.nf4(double=True), "bitsandbytes nf4"),
    "llm-int8": (lambda: made.llm_int8(), "bitsandbytes int8, one scale a row"),
    "torchao-int8": (lambda: made.torchao("Int8Tensor", lambda N, K: [1, K]), "torchao Int8Tensor"),
    "torchao-intx": (
        lambda: made.torchao("IntxUnpackedToInt8Tensor", lambda N, K: [1, 32]),
        "torchao IntxUnpackedToInt8Tensor",
    ),
    "torchao-fp8": (lambda: made.torchao("Float8Tensor", lambda N, K: [1, K]), "torchao Float8Tensor"),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_weights_that_the_integers_stand_for(case: str, tmp_path: Path) -> None:
    maker, described = CASES[case]
    family = list(made.FAMILIES)[list(CASES).index(case) % len(made.FAMILIES)]
    model = made.build(family)
    folder = made.write(model, tmp_path, *maker())
    ids_BT = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    loaded = load_decoder(folder)
    torch.testing.assert_close(loaded.logits(ids_BT), made.logits(model, ids_BT), rtol=0, atol=1e-4)
    assert loaded.stored == f"{described}: dequantized to float32"


KEPT = {
    "awq": "repacked as w4bf16",
    "gptq": "repacked as w4bf16",
    "gptq-zeros": "repacked as w4bf16",
    "gptq-rows": "repacked as w4bf16",
    "gptq-int8": "repacked as w8bf16",
    "gptq-act-order": "dequantized to bfloat16",
    "ct-int4": "repacked as w4bf16",
    "ct-int4-zeros": "repacked as w4bf16",
    "ct-int8-packed": "repacked as w8bf16",
    "ct-int8-zeros": "repacked as w8bf16",
    "ct-fp8": "repacked as fp8",
    "ct-fp8-tensor": "repacked as fp8",
    "ct-fp8-block": "repacked as fp8",
    "fp8-block": "repacked as fp8",
    "fp8-tensor": "repacked as fp8",
    "llm-int8": "repacked as w8bf16",
    "nf4": "dequantized to bfloat16",
    "torchao-int8": "repacked as w8bf16",
    "torchao-intx": "repacked as w8bf16",
    "torchao-fp8": "repacked as fp8",
}


@pytest.mark.plain("torchao-int8", "ct-int4", "ct-int8-packed", "ct-int8-zeros")
@pytest.mark.parametrize("case", KEPT)
def test_numbers_that_are_kept_give_the_bits_of_dequantized_ones(case: str, tmp_path: Path) -> None:
    if ops.fault("cpu"):
        pytest.skip(f"no kernels: {ops.fault('cpu')}")
    folder = made.write(made.build("qwen2"), tmp_path, *CASES[case][0]())
    ids_BT = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    kept = load_decoder(folder, torch.bfloat16)
    wide = load_decoder(folder, torch.bfloat16, quantize="none")
    assert kept.stored == f"{CASES[case][1]}: {KEPT[case]}"
    assert wide.stored == f"{CASES[case][1]}: dequantized to bfloat16"
    assert torch.equal(kept.logits(ids_BT), wide.logits(ids_BT))


@pytest.mark.parametrize(
    ("case", "scheme", "same"),
    [
        ("gptq-rows", "w4a16", True),
        ("ct-int4-rows", "w4a8:group_size=64", True),
        ("ct-w8a8", "w8a8", True),
        ("ct-w8a8", None, True),
        ("llm-int8", "w8a8", True),
        ("gptq-rows", "w8a8", False),
        ("awq", "w4a16", False),
    ],
)
def test_integers_go_into_the_asked_scheme_where_a_row_has_one_scale(
    case: str, scheme: str | None, same: bool, tmp_path: Path
) -> None:
    if ops.fault("cpu"):
        pytest.skip(f"no kernels: {ops.fault('cpu')}")
    model = made.build("qwen3")
    folder = made.write(model, tmp_path, *CASES[case][0]())
    loaded = load_decoder(folder, torch.bfloat16, quantize=scheme)
    name = (scheme or "w8a8").partition(":")[0]
    became = f"repacked as {name}" if same else f"dequantized, then rounded to {name}"
    assert loaded.stored == f"{CASES[case][1]}: {became}"
    down: Any = loaded.decoder.layers[0].mlp.down
    wanted = model.model.layers[0].mlp.down_proj.weight
    assert down.scheme.name == name
    assert torch.allclose(down.wide_weight(), wanted, rtol=1e-6, atol=0) == same


def test_settings_that_are_not_read_are_refused_by_their_key(tmp_path: Path) -> None:
    packed = made.compressed("pack-quantized", integers(4, "group", group_size=128))[0]
    group = {"weights": integers(3, "group", group_size=128)}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"quant_method": "awq", "version": "gemv"}, r"quantization_config\.version.*'gemv'.*gemm"),
        ({"quant_method": "awq", "bits": 3}, r"quantization_config\.bits"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, r"bits.*2 or 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 1, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt.*e5m2.*e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "nf3.*nf4"),
        (packed | {"format": "marlin-24"}, "marlin-24.*pack-quantized"),
        (packed | {"transform_config": {"a": 1}}, "rotations"),
        (packed | {"config_groups": {}}, "config_groups"),
        (
            packed | {"config_groups": {"group_0": group}},
            r"config_groups\.group_0\.weights\.num_bits.*4 or 8",
        ),
        ({"quant_method": ["awq"]}, "quantized by"),
    ]
    folder = made.write(made.build("llama", num_hidden_layers=1), tmp_path, *made.awq(128))
    for settings, message in refused:
        change_config(folder, settings)
        with pytest.raises(ModelError, match=message):
            load_decoder(folder)


def change_config(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


DOWN = "model.layers.0.mlp.down_proj"
SPOILT: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "awq words": ("awq", {"qweight": torch.zeros(9, 9, dtype=torch.int32)}, "qweight is|scales is"),
    "awq type": ("awq", {"qweight": torch.zeros(512, 32)}, "of torch.float32"),
    "awq scales": ("awq", {"scales": torch.zeros(3, 256)}, "qzeros is|scales is"),
    "awq zeros gone": ("awq", {"qzeros": None}, "lack the tensor"),
    "gptq zeros": ("gptq", {"qzeros": torch.zeros(4, 3, dtype=torch.int32)}, "qzeros is"),
    "gptq groups beyond": (
        "gptq",
        {"g_idx": torch.full((512,), 9, dtype=torch.int32)},
        "groups from 9 to 9 of 4",
    ),
    "ct shape": ("ct-int4", {"weight_shape": torch.tensor([2**60, 2**60])}, "for a weight of"),
    "ct scales": ("ct-int4", {"weight_scale": torch.ones(7, 3)}, "scales for"),
    "fp8 scales": ("fp8-block", {"weight_scale_inv": torch.ones(7, 3)}, "scales for blocks"),
    "fp8 type": ("fp8-block", {"weight": torch.zeros(256, 512, dtype=torch.int8)}, "torch.int8"),
    "nf4 codes": ("nf4", {"weight": torch.zeros(5, 1, dtype=torch.uint8)}, "the codes is"),
    "nf4 scales": ("nf4", {"weight.absmax": torch.zeros(5)}, "absmax is"),
    "nf4 state": (
        "nf4",
        {"weight.quant_state.bitsandbytes__nf4": torch.zeros(2**20, dtype=torch.uint8)},
        "its description is",
    ),
    "torchao scales": ("torchao-int8", {"_weight_scale": torch.ones(7, 1)}, "scales for"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_parts_that_do_not_belong_together_are_named(case: str, tmp_path: Path) -> None:
    name, changed, message = SPOILT[case]
    folder = made.write(made.build("llama", num_hidden_layers=1), tmp_path, *CASES[name][0]())
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for part, tensor in changed.items():
        del tensors[f"{DOWN}.{part}"]
        if tensor is not None:
            tensors[f"{DOWN}.{part}"] = tensor
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ModelError, match=message) as caught:
        load_decoder(folder)
    assert DOWN in str(caught.value)


def test_one_tensor_is_made_wide_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of rows, whatever the size of the block."""
    folder = made.write(made.build("llama", num_hidden_layers=1), tmp_path, *made.awq(128))
    ids_BT = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(1))
    whole = load_decoder(folder).logits(ids_BT)
    asked: list[int] = []
    rows = Grouped.rows
    monkeypatch.setattr(weight, "BLOCK", 1000)
    monkeypatch.setattr(
        Grouped, "rows", lambda self, a, b: asked.append((b - a) * self.shape[1]) or rows(self, a, b)
    )
    assert torch.equal(load_decoder(folder).logits(ids_BT), whole)
    assert max(asked) <= 1024


def test_transformers_model_of_a_quantized_folder(tmp_path: Path) -> None:
    """What `optimize` starts from: the model that the integers stand for."""
    for case in ("awq", "nf4-double", "torchao-int8", "ct-w8a8", "fp8-block"):
        model = made.build("qwen2", num_hidden_layers=1)
        folder = made.write(model, tmp_path / case, *CASES[case][0]())
        ids_BT = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(1))
        theirs = made.logits(load_model(folder, "AutoModelForCausalLM"), ids_BT)
        torch.testing.assert_close(theirs, made.logits(model, ids_BT), rtol=0, atol=1e-4)
