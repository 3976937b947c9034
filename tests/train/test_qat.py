"""Fake quantization gives what the packed kernels compute, passes gradients through, and ends with a receipt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from runs import CONFIG, make_run
from torch import nn
from torch.nn import functional as F

from torchwright.core.scheme import scheme_of
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder import read_decoder_config
from torchwright.train.model import Transformer
from torchwright.train.run.config.run import Qat
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.qat import (
    RECEIPT,
    FakeQuantizedLinear,
    difference,
    fake_quantize,
    rounded_activations,
    rounded_weight,
)

SCHEMES = [Qat(scheme="w8a8"), *(Qat(scheme="w4a8", group_size=size) for size in (32, 64, 128))]


@pytest.mark.parametrize("qat", SCHEMES, ids=lambda qat: f"{qat.scheme}-{qat.group_size}")
def test_a_layer_computes_what_its_packed_form_does(qat: Qat) -> None:
    """The rounded weight is the packed one's to the bit; outputs agree to float32's sums (1e-5 of their size)."""
    generator = torch.Generator().manual_seed(hash((qat.scheme, qat.group_size)) % 1000)
    linear = nn.Linear(200, 70)
    nn.init.normal_(linear.weight, generator=generator)
    x = torch.randn(9, 200, generator=generator) * torch.logspace(-3, 3, 9)[:, None]
    x[4] = 0
    packed = PackedLinear(linear.weight.detach(), linear.bias, scheme_of(qat.scheme, qat.group_size))
    fake = FakeQuantizedLinear.around(linear, qat)
    assert torch.equal(rounded_weight(linear.weight, qat), packed.wide_weight())
    with torch.no_grad():
        y, reference, kernel = fake(x), packed.reference(x), packed(x)
    size = reference.abs().amax(1, keepdim=True)
    assert ((y - reference) / size).abs().max() < 1e-5
    assert ((y - kernel) / size).abs().max() < 1e-5


def test_gradients_pass_straight_through() -> None:
    qat = Qat(scheme="w4a8")
    weight = torch.randn(6, 64, requires_grad=True)
    x = torch.randn(3, 64, requires_grad=True)
    grad = torch.randn(3, 6)
    F.linear(rounded_activations(x), rounded_weight(weight, qat)).backward(grad)
    w_value, x_value = rounded_weight(weight, qat).detach(), rounded_activations(x).detach()
    torch.testing.assert_close(x.grad, grad @ w_value)
    torch.testing.assert_close(weight.grad, grad.T @ x_value)
    assert (w_value - weight).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a8", "w8a8"])
def test_what_is_rounded_stays_on_its_device(tmp_path: Path, scheme: Literal["w4a8", "w8a8"]) -> None:
    """The meta device stands for a card: a tensor of the CPU in between is refused there."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with torch.device("meta"):
        model = Transformer(read_decoder_config(tmp_path))
        ids = torch.zeros(2, 16, dtype=torch.int64)
    fake_quantize(model, Qat(scheme=scheme))
    total, _ = model.loss(ids, ids, torch.arange(16, device="meta"))
    total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.plain("w8a8-mixtral")
@pytest.mark.parametrize(
    ("scheme", "model"),
    [
        ("w4a8", CONFIG),
        (
            "w8a8",
            {
                **CONFIG,
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "tie_word_embeddings": False,
            },
        ),
    ],
    ids=["w4a8-llama", "w8a8-mixtral"],
)
def test_the_receipt_compares_trained_converted_and_served(tmp_path: Path, scheme: str, model: dict) -> None:
    """A rounding that falls the other way shifts a logit by less than rounding as a whole does."""
    run = make_run(
        tmp_path,
        tokens=12 * 256,
        model={"config": model},
        qat={"scheme": scheme, "receipt_tokens": 256},
        data={"train": ["a.npy"], "validation": ["held.npy"]},
    )
    outcome = train(run, live=False)
    receipt = json.loads((tmp_path / "out" / RECEIPT).read_text())
    assert receipt["tokens"] == 256
    assert receipt["unquantized"]["relative"] > 1e-3
    for form in ("converted", "served"):
        assert receipt[form]["relative"] < 0.1 * receipt["unquantized"]["relative"]
        assert receipt[form]["kl_divergence"] < 1e-4
        assert receipt[form]["top1_agreement"] > 0.97
    assert outcome.loss is not None


def test_differences_by_hand() -> None:
    one = torch.tensor([[[0.0, 1.0], [2.0, 0.0]]])
    found = difference(one, one + torch.tensor([[[0.0, -2.0], [0.0, 0.0]]]))
    assert found.largest == 2
    assert found.top1_agreement == 0.5
    assert found.relative == pytest.approx((4 / 5) ** 0.5)
    p, q = torch.softmax(one[0, 0], 0), torch.softmax(torch.tensor([0.0, -1.0]), 0)
    assert found.kl_divergence == pytest.approx(float((p * (p / q).log()).sum()) / 2)
