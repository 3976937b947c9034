"""Training with the rounding that the packed kernels do, and a receipt that what is served is what was trained.

Every linear layer but those in `EXACT` rounds its weight and its input exactly as `PackedLinear` of the scheme does
(`hardware/kernels/pack.py`, `hardware/kernels/reference.py`); gradients pass as if nothing were rounded
(straight-through: Bengio et al., 2013; Jacob et al., 2018). Under autocast the products of the rounded values are
taken in bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.scheme import scheme_of
from torchwright.hardware.kernels import pack, reference
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.trained import trained_scheme
from torchwright.models.decoder import read_decoder_config
from torchwright.models.decoder.load import load_decoder
from torchwright.train.model import Transformer, load_weights
from torchwright.train.model.blocks import ExpertBiases, Experts, biased, by_expert, gated
from torchwright.train.model.recurrent import EXACT
from torchwright.train.run.config.run import Qat

RECEIPT = "qat_receipt.json"


class FakeQuantizedLinear(nn.Linear):
    """y = round(x) · round(W)ᵀ + b, in the values that the scheme's integers stand for."""

    qat: Qat

    @classmethod
    def around(cls, linear: nn.Linear, qat: Qat) -> FakeQuantizedLinear:
        new = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        new.weight, new.bias, new.qat = linear.weight, linear.bias, qat
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(rounded_activations(input), rounded_weight(self.weight, self.qat), self.bias)


def fake_quantize(model: Transformer, qat: Qat) -> list[str]:
    """Replace the model's linear layers and let its experts round; the names of what was changed."""
    changed = []
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith(EXACT):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, FakeQuantizedLinear.around(module, qat))
            changed.append(name)
        elif isinstance(module, Experts):
            module.compute = partial(_rounded_experts, qat)
            changed.append(name)
    model.tie()
    return changed


def rounded_weight(weight_NK: torch.Tensor, qat: Qat) -> torch.Tensor:
    """The values that the packed weight stands for, in float32; the gradient is the weight's."""
    with torch.no_grad():
        wide_NK = weight_NK.detach().float()
        group = scheme_of(qat.scheme, qat.group_size).group
        if group is None:
            integers_NK, scale_N = pack.quantize_w8(wide_NK)
            value_NK = integers_NK.float()
        else:
            integers_NK, times_NG, scale_N = pack.quantize_w4(wide_NK, group)
            times_NK = times_NG.float().repeat_interleave(group, 1)[:, : wide_NK.shape[1]]
            value_NK = integers_NK.float() * times_NK
        value_NK *= scale_N[:, None]
    return _Through.apply(weight_NK, value_NK)  # type: ignore[return-value]


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """`x` (…, K) rounded to 8 bits for each row, in x's dtype; the gradient is x's."""
    with torch.no_grad():
        wide = x.detach().float() if x.dtype != torch.float64 else x.detach()
        peak = wide.abs().amax(-1, keepdim=True)
        value = torch.round(wide * reference.steps(peak)) * (peak / reference.LEVELS_8)
    return _Through.apply(x, value.to(x.dtype))  # type: ignore[return-value]


class _Through(torch.autograd.Function):
    """Gives the second argument; the gradient goes to the first."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.dtype = given.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def _rounded_experts(
    qat: Qat,
    x_SE: torch.Tensor,
    counts_X: torch.Tensor,
    gate_XFE: torch.Tensor,
    up_XFE: torch.Tensor,
    down_XEF: torch.Tensor,
    activation: str,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """`compute_experts` with every matrix and its input rounded."""
    parts = []
    rows, offsets = x_SE.split(counts_X.tolist()), by_expert(biases, len(counts_X))
    experts = zip(rows, gate_XFE, up_XFE, down_XEF, offsets, strict=True)
    for x_NE, *matrices, (gate_F, up_F, down_E) in experts:
        gate_FE, up_FE, down_EF = (rounded_weight(matrix, qat) for matrix in matrices)
        x_NE = rounded_activations(x_NE)
        gate_NF = biased(F.linear(x_NE, gate_FE), gate_F)
        hidden_NF = gated(gate_NF, biased(F.linear(x_NE, up_FE), up_F), activation)
        parts.append(biased(F.linear(rounded_activations(hidden_NF), down_EF), down_E))
    return torch.cat(parts)


@dataclass(frozen=True, kw_only=True)
class LogitDifference:
    """The distance between the logits of two forms of the model."""

    largest: float
    """The largest absolute difference."""
    relative: float
    """Root mean square over that of the logits."""
    kl_divergence: float
    """Nats per token."""
    top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The receipt of quantization-aware training, on held-out tokens in float32."""

    scheme: str
    group_size: int
    tokens: int
    converted: LogitDifference
    """Fake-quantized against the same modules with packed integers."""
    served: LogitDifference
    """Fake-quantized against what `load_decoder` makes of the written folder, as the server loads it."""
    unquantized: LogitDifference
    """Fake-quantized against the weights without any rounding: what rounding still costs."""


@torch.no_grad()
def write_receipt(folder: Path, ids_BT: torch.Tensor, qat: Qat, out: Path) -> Receipt:
    """Compare the forms of the trained model in `folder` on `ids_BT` and write RUN/qat_receipt.json.

    Each form is made from the folder afresh, by the code that trains, converts and serves.
    """
    config = read_decoder_config(folder)

    def fresh(*, rounded: bool) -> Transformer:
        model = Transformer(config)
        load_weights(model, folder)
        if rounded:
            fake_quantize(model, qat)
        return model.eval()

    trained = fresh(rounded=True)(ids_BT).float()
    converted = fresh(rounded=True)
    convert(converted)
    receipt = Receipt(
        scheme=qat.scheme,
        group_size=qat.group_size,
        tokens=ids_BT.numel(),
        converted=difference(trained, converted(ids_BT)),
        served=difference(trained, load_decoder(folder, quantize=trained_scheme(folder)).logits(ids_BT)),
        unquantized=difference(trained, fresh(rounded=False)(ids_BT)),
    )
    (out / RECEIPT).write_text(json.dumps(asdict(receipt), indent=1), encoding="utf-8")
    return receipt


def convert(model: Transformer) -> None:
    """Put packed integers in the place of every fake-quantized layer; experts keep rounding as they compute."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FakeQuantizedLinear):
            parent, _, last = name.rpartition(".")
            qat = module.qat
            weight = pack.finite(module.weight.detach(), name)
            packed = PackedLinear(weight, module.bias, scheme_of(qat.scheme, qat.group_size))
            setattr(model.get_submodule(parent), last, packed)


def difference(logits_BTV: torch.Tensor, other_BTV: torch.Tensor) -> LogitDifference:
    """Return the distance of `other_BTV` from `logits_BTV`."""
    one, two = logits_BTV.double(), other_BTV.double()
    kl = F.kl_div(two.log_softmax(-1), one.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    return LogitDifference(
        largest=float((one - two).abs().max()),
        relative=float((one - two).square().mean().sqrt() / one.square().mean().sqrt()),
        kl_divergence=float(kl.mean()),
        top1_agreement=float((one.argmax(-1) == two.argmax(-1)).double().mean()),
    )
