"""Token mixers of recurrent layers over whole sequences, in place of attention and called like it.

How many heads or channels there are is read from the projections' outputs, so that a part of them works as well. The
decoder that serves computes the same from states (`models/decoder/recurrent.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels import norm
from torchwright.hardware.kernels.reference import ACTIVATIONS
from torchwright.models.decoder.config import DecoderConfig, DeltaConfig, MambaConfig, ShortConvConfig
from torchwright.train.model.blocks import Attention, FeedForward, RotaryAngles
from torchwright.train.model.convolution import Taps, own
from torchwright.train.model.recurrence import recurrence


class ShortConvolution(nn.Module):
    """o(gate(x) · convolution(gate_in(x) · v(x))) (Liquid AI, 2025)."""

    def __init__(self, config: DecoderConfig, mixer: ShortConvConfig) -> None:
        super().__init__()
        E = config.model
        self.gate_in, self.gate, self.v, self.o = (nn.Linear(E, E, bias=mixer.bias) for _ in range(4))
        self.conv = Taps(E, mixer.width, bias=mixer.bias, silu=False)

    def forward(
        self, x_BTE: torch.Tensor, _angles: RotaryAngles, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        mixed_BTE = self.conv(self.gate_in(x_BTE) * self.v(x_BTE), documents_BS)
        return self.o(self.gate(x_BTE) * mixed_BTE)


class SelectiveScan(nn.Module):
    """A selective state space (Dao and Gu, 2024): B and C are keys and queries of `key_dim` numbers."""

    def __init__(self, heads: int, key_dim: int) -> None:
        super().__init__()
        self.key_dim = key_dim
        self.log_rate, self.shift, self.skip = (nn.Parameter(torch.empty(heads)) for _ in range(3))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step_BTH: torch.Tensor,
        documents_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        exact = torch.promote_types(v.dtype, torch.float32)
        rate_H, shift_H, skip_H = (own(p).to(exact) for p in (self.log_rate, self.shift, self.skip))
        step_BTH = F.softplus(step_BTH.to(exact) + shift_H)
        q_BTGM, k_BTGM = (x.unflatten(-1, (-1, self.key_dim)) for x in (q, k))
        v_BTHD = v.unflatten(-1, (len(rate_H), -1))
        log_decay_BTH = -rate_H.exp() * step_BTH
        out = recurrence(q_BTGM, k_BTGM, v_BTHD, log_decay_BTH, step_BTH, documents_BS, corrects=False)
        return (out + v_BTHD * skip_H[:, None]).flatten(2).to(v.dtype)


class GatedDelta(nn.Module):
    """A state that forgets, and corrects what it has for a key of `key_dim` numbers (Yang et al., 2024)."""

    def __init__(self, heads: int, key_dim: int) -> None:
        super().__init__()
        self.key_dim = key_dim
        self.log_rate, self.shift = (nn.Parameter(torch.empty(heads)) for _ in range(2))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay_BTH: torch.Tensor,
        gain_BTH: torch.Tensor,
        documents_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        exact = torch.promote_types(v.dtype, torch.float32)
        rate_H, shift_H = (own(p).to(exact) for p in (self.log_rate, self.shift))
        log_decay_BTH = -rate_H.exp() * F.softplus(decay_BTH.to(exact) + shift_H)
        q_BTGM, k_BTGM = (x.unflatten(-1, (-1, self.key_dim)) for x in (q, k))
        v_BTHD, gain_BTH = v.unflatten(-1, (len(rate_H), -1)), gain_BTH.to(exact).sigmoid()
        return recurrence(
            q_BTGM, k_BTGM, v_BTHD, log_decay_BTH, gain_BTH, documents_BS, corrects=True
        ).flatten(2)


class GatedNorm(nn.Module):
    """rms_norm of parts of a width, each with its own weights or all with the same, and silu(gate)."""

    def __init__(self, size: int, part: int, eps: float, *, gate_first: bool) -> None:
        super().__init__()
        self.part, self.eps, self.gate_first = part, eps, gate_first
        self.weight = nn.Parameter(torch.empty(size))
        self.mean: Callable[[torch.Tensor], torch.Tensor] | None = None
        """From the mean square here to that over all processes, where tensor parallelism divides a part."""

    def forward(self, x_BTV: torch.Tensor, gate_BTV: torch.Tensor) -> torch.Tensor:
        exact = torch.promote_types(x_BTV.dtype, torch.float32)
        x, gate = (y.to(exact).unflatten(-1, (-1, self.part)) for y in (x_BTV, gate_BTV))
        weight = own(self.weight).to(exact).unflatten(0, (-1, self.part))
        if self.gate_first:
            x = x * F.silu(gate)
        if self.mean is None:
            x = norm.rms_norm(x, None, self.eps) * weight
        else:
            x = x * torch.rsqrt(self.mean(x.square().mean(-1, keepdim=True)) + self.eps) * weight
        if not self.gate_first:
            x = x * F.silu(gate)
        return x.flatten(2).to(x_BTV.dtype)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule, behind short convolutions and before a gated norm by head."""

    def __init__(self, config: DecoderConfig, mixer: DeltaConfig) -> None:
        super().__init__()
        E = config.model
        widths = {"q": mixer.keys, "k": mixer.keys, "v": mixer.values}
        for part, width in widths.items():
            self.add_module(part, nn.Linear(E, width, bias=False))
            self.add_module(f"{part}_conv", Taps(width, mixer.width, bias=False, silu=True))
        self.gate = nn.Linear(E, mixer.values, bias=False)
        self.gain, self.decay = (nn.Linear(E, mixer.heads, bias=False) for _ in range(2))
        self.delta = GatedDelta(mixer.heads, mixer.key_dim)
        self.out_norm = GatedNorm(mixer.head_dim, mixer.head_dim, config.eps, gate_first=False)
        self.o = nn.Linear(mixer.values, E, bias=False)

    def forward(
        self, x_BTE: torch.Tensor, _angles: RotaryAngles, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (
            self.get_submodule(f"{part}_conv")(self.get_submodule(part)(x_BTE), documents_BS)
            for part in "qkv"
        )
        mixed = self.delta(q, k, v, self.decay(x_BTE), self.gain(x_BTE), documents_BS)
        return self.o(self.out_norm(mixed, self.gate(x_BTE)))


class Mamba2(nn.Module):
    """A selective state space behind short convolutions; its output is gated, and normed where the family does."""

    def __init__(self, config: DecoderConfig, mixer: MambaConfig) -> None:
        super().__init__()
        E, values, keys = config.model, mixer.values, mixer.keys
        self.input_scale, self.key_heads = mixer.input_scale, mixer.key_heads
        parts = {"gate": values, "v": values, "k": keys, "q": keys, "step": mixer.heads}
        self.scales = dict(zip(parts, mixer.scales or (1.0,) * len(parts), strict=True))
        for part, width in parts.items():
            self.add_module(part, nn.Linear(E, width, bias=mixer.bias))
            if part in ("v", "k", "q"):
                self.add_module(f"{part}_conv", Taps(width, mixer.width, bias=mixer.conv_bias, silu=True))
        self.shared = nn.Identity()
        """Passed by keys and queries on the way to heads: where all heads share one, tensor parallelism sums here."""
        self.scan = SelectiveScan(mixer.heads, mixer.key_dim)
        self.out_norm: GatedNorm | None = None
        if mixer.normed:
            part = values // mixer.key_heads
            self.out_norm = GatedNorm(values, part, config.eps, gate_first=mixer.gate_first)
        self.o = nn.Linear(values, E, bias=mixer.out_bias)

    def forward(
        self, x_BTE: torch.Tensor, _angles: RotaryAngles, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.input_scale != 1:
            x_BTE = x_BTE * self.input_scale
        q, k, v = (self._projected(part, x_BTE) for part in "qkv")
        projected = {"q": self.shared(q), "k": self.shared(k), "v": v}
        q, k, v = (self.get_submodule(f"{part}_conv")(x, documents_BS) for part, x in projected.items())
        mixed = self.scan(q, k, v, self._projected("step", x_BTE), documents_BS)
        gate = self._projected("gate", x_BTE)
        return self.o(mixed * F.silu(gate) if self.out_norm is None else self.out_norm(mixed, gate))

    def _projected(self, part: str, x_BTE: torch.Tensor) -> torch.Tensor:
        out, scale = self.get_submodule(part)(x_BTE), self.scales[part]
        return out if scale == 1 else out * scale


class ParallelMixer(nn.Module):
    """Attention and a recurrent mixer that read the same input next to each other, each with factors (Falcon-H1)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        assert config.parallel
        self.factors = config.parallel
        self.attention, self.mixer = Attention(config, layer), mixer(config)

    def forward(
        self, x_BTE: torch.Tensor, angles: RotaryAngles, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        mixed = self.mixer(x_BTE, angles, documents_BS) * self.factors.mixer_out
        seen = self.attention(x_BTE * self.factors.attention_in, angles, documents_BS)
        return mixed + seen * self.factors.attention_out


class ScaledFeedForward(FeedForward):
    """down(activation(gate(x) · factor) · up(x)) · factor."""

    def __init__(self, config: DecoderConfig, hidden: int) -> None:
        super().__init__(config, hidden)
        assert config.parallel
        self.factors = config.parallel

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        gate_BTF = ACTIVATIONS[self.activation](self.gate(x_BTE) * self.factors.gate)
        return self.down(gate_BTF * self.up(x_BTE)) * self.factors.down


RecurrentMixer = ShortConvolution | GatedDeltaNet | Mamba2


def mixer(config: DecoderConfig) -> RecurrentMixer:
    """Return an empty token mixer of the model's kind."""
    match config.mixer:
        case ShortConvConfig():
            return ShortConvolution(config, config.mixer)
        case DeltaConfig():
            return GatedDeltaNet(config, config.mixer)
        case MambaConfig():
            return Mamba2(config, config.mixer)
        case None:
            raise AssertionError("a model without recurrent layers")


EXACT = ("router", "shared_gate", "step", "gain", "decay")
"""Linear layers that low precision leaves as they are: small ones that decide where tokens go and what is forgotten."""
MOST_RATE = 16.0
"""Rates of the delta rule begin between 0 and this, as in transformers."""


def start(name: str, heads: int) -> torch.Tensor | None:
    """Return the first values of a recurrence's vector, as transformers has them; None for any other parameter.

    Rates of a state space are 1 to `heads`; those of the delta rule are drawn there, and spread evenly here.
    """
    *_, module, part = name.split(".")
    if part in ("shift", "skip"):
        return torch.ones(heads)
    if part != "log_rate":
        return None
    if module == "scan":
        return torch.arange(1, heads + 1).log()
    return ((torch.arange(heads) + 0.5) * MOST_RATE / heads).log()
