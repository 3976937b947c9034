"""Quantized folders: logits equal to those of the model that their integers stand for, in each format and family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized as made
import torch

from torchwright.decoder import load_decoder

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
