"""Token mixers of recurrent layers, in place of attention: short convolutions, the gated delta rule and Mamba-2."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from torchwright.hardware.kernels.limits import LANES
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.config import (
    DecoderConfig,
    DeltaConfig,
    MambaConfig,
    RecurrenceConfig,
    ShortConvConfig,
)
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.program import Cells, Program, not_packed
from torchwright.models.decoder.states import LayerStates


class MixerParts(Protocol):
    """The parts of a recurrent layer; `weights.LayerParts` says what they are."""

    def linear(self, layer: int, part: str) -> nn.Module: ...
    def recurrent(self, layer: int, part: str) -> torch.Tensor | None: ...


class ShortConvolution(nn.Module):
    """out(c · convolution(b · x)) with b, c and x from one linear layer (Liquid AI, 2025)."""

    conv: torch.Tensor
    conv_bias: torch.Tensor | None

    def __init__(self, weights: MixerParts, layer: int) -> None:
        super().__init__()
        self.conv_in, self.conv_out = weights.linear(layer, "conv_in"), weights.linear(layer, "conv_out")
        self.register_buffer("conv", weights.recurrent(layer, "conv"))
        self.register_buffer("conv_bias", weights.recurrent(layer, "conv_bias"))

    def forward(self, x_TE: torch.Tensor, batch: Batch, states: LayerStates) -> torch.Tensor:
        b, c, x = self.conv_in(x_TE).chunk(3, dim=-1)
        mixed_TE = ops.short_conv(b * x, self.conv, self.conv_bias, states.parts[0], *rows(batch), False)
        return self.conv_out(c * mixed_TE)

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        return not_packed(self.conv_in, self.conv_out)

    def plan(self, program: Program, x: Cells, to: Cells, states: LayerStates) -> None:
        """Add to a program what `forward` does."""
        with program.scope():
            whole, mixed = program.linear(self.conv_in, x), program.rows(x.width)
            b, c, values = whole.split(*[x.width] * 3)
            program.multiply(b, values, values)
            _plan_conv(program, self.conv, self.conv_bias, values, mixed, states, silu=False)
            program.multiply(c, mixed, mixed)
            program.linear(self.conv_out, mixed, to)


class GatedDeltaNet(nn.Module):
    """Linear attention whose state forgets, and corrects what it has for a key (Yang et al., 2024).

    Queries, keys, values and the output's gate are one linear layer; what decides how much is forgotten and corrected
    is another, which is never quantized: it is small, and its error grows with every token.
    """

    conv: torch.Tensor
    rate: torch.Tensor
    shift: torch.Tensor
    out_norm: torch.Tensor

    def __init__(self, config: DeltaConfig, eps: float, weights: MixerParts, layer: int) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.delta_in, self.delta_out = weights.linear(layer, "delta_in"), weights.linear(layer, "delta_out")
        self.decay = weights.linear(layer, "decay")
        for part in ("conv", "rate", "shift", "out_norm"):
            self.register_buffer(part, weights.recurrent(layer, part))

    def forward(self, x_TE: torch.Tensor, batch: Batch, states: LayerStates) -> torch.Tensor:
        config, at = self.config, rows(batch)
        qkv, gate = self.delta_in(x_TE).split([2 * config.keys + config.values, config.values], dim=-1)
        qkv = ops.short_conv(qkv, self.conv, None, states.parts[0], *at, True)
        q, k, v = qkv.split([config.keys, config.keys, config.values], dim=-1)
        b, a = self.decay(x_TE).chunk(2, dim=-1)
        out = ops.gated_delta(q, k, v, a, b, self.rate, self.shift, states.parts[1], *at, config.key_heads)
        return self.delta_out(ops.gated_norm(out, gate, self.out_norm, self.eps))

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        return _uneven(self.config) or not_packed(self.delta_in, self.delta_out, self.decay)

    def plan(self, program: Program, x: Cells, to: Cells, states: LayerStates) -> None:
        """Add to a program what `forward` does."""
        config = self.config
        convolved = 2 * config.keys + config.values
        with program.scope():
            whole, mixed = program.linear(self.delta_in, x), program.rows(convolved)
            qkv, gate = whole.split(convolved, config.values)
            _plan_conv(program, self.conv, None, qkv, mixed, states, silu=True)
            b, a = program.linear(self.decay, x).split(config.heads, config.heads)
            q, k, v = mixed.split(config.keys, config.keys, config.values)
            out = program.rows(config.values)
            program.native.gated_delta(
                *([*cells] for cells in (q, k, v, a, b, out)),
                *(self.rate, self.shift, states.parts[1], config.key_heads),
            )
            _plan_norm(program, out, gate, self.out_norm, self.eps, gate_first=False)
            program.linear(self.delta_out, out, to)


class Mamba2(nn.Module):
    """A selective state space (Dao and Gu, 2024); how long a token's step is, is never quantized."""

    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    rate: torch.Tensor
    shift: torch.Tensor
    skip: torch.Tensor
    out_norm: torch.Tensor | None
    scales: torch.Tensor | None

    def __init__(self, config: MambaConfig, eps: float, weights: MixerParts, layer: int) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.mamba_in, self.mamba_out = weights.linear(layer, "mamba_in"), weights.linear(layer, "mamba_out")
        self.decay = weights.linear(layer, "decay")
        for part in ("conv", "conv_bias", "rate", "shift", "skip"):
            self.register_buffer(part, weights.recurrent(layer, part))
        self.register_buffer("out_norm", weights.recurrent(layer, "out_norm") if config.normed else None)
        sizes = torch.tensor([config.values, config.values, config.keys, config.keys])
        scales = torch.tensor(config.scales[:4]).repeat_interleave(sizes) if config.scales else None
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x_TE: torch.Tensor, batch: Batch, states: LayerStates) -> torch.Tensor:
        config, at = self.config, rows(batch)
        x_TE = x_TE if config.input_scale == 1 else x_TE * config.input_scale
        wide = self.mamba_in(x_TE)
        wide = wide if self.scales is None else wide * self.scales.to(wide.dtype)
        gate, vkq = wide.split([config.values, 2 * config.keys + config.values], dim=-1)
        vkq = ops.short_conv(vkq, self.conv, self.conv_bias, states.parts[0], *at, True)
        v, k, q = vkq.split([config.values, config.keys, config.keys], dim=-1)
        steps_TH = self.decay(x_TE) * config.scales[4] if config.scales else self.decay(x_TE)
        out = ops.selective_scan(
            q, k, v, steps_TH, self.rate, self.shift, self.skip, states.parts[1], *at, config.key_heads
        )
        if self.out_norm is None:
            return self.mamba_out(out * ops.activate(gate.contiguous(), "silu"))
        gated = ops.gated_norm(out, gate, self.out_norm, self.eps, gate_first=config.gate_first)
        return self.mamba_out(gated)

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        uneven = self.out_norm is not None and self.out_norm.shape[-1] % LANES
        if uneven:
            return "norms of parts that the compiled kernels do not take"
        return _uneven(self.config) or not_packed(self.mamba_in, self.mamba_out, self.decay)

    def plan(self, program: Program, x: Cells, to: Cells, states: LayerStates) -> None:
        """Add to a program what `forward` does."""
        config = self.config
        with program.scope():
            if config.input_scale != 1:
                x, whole = program.rows(x.width), x
                program.scale(config.input_scale, whole, x)
            wide, mixed = program.linear(self.mamba_in, x), program.rows(2 * config.keys + config.values)
            if self.scales is not None:
                program.scale_columns(self.scales, wide)
            gate, vkq = wide.split(config.values, mixed.width)
            _plan_conv(program, self.conv, self.conv_bias, vkq, mixed, states, silu=True)
            steps, out = program.linear(self.decay, x), program.rows(config.values)
            if config.scales:
                program.scale(config.scales[4], steps)
            v, k, q = mixed.split(config.values, config.keys, config.keys)
            program.native.selective_scan(
                *([*cells] for cells in (q, k, v, steps, out)),
                *(self.rate, self.shift, self.skip, states.parts[1], config.key_heads),
            )
            if self.out_norm is None:
                program.activate("silu", gate)
                program.multiply(out, gate, out)
            else:
                _plan_norm(program, out, gate, self.out_norm, self.eps, gate_first=config.gate_first)
            program.linear(self.mamba_out, out, to)


def _plan_conv(
    program: Program,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
    x: Cells,
    to: Cells,
    states: LayerStates,
    *,
    silu: bool,
) -> None:
    program.native.short_conv([*x], [*to], weight_WC, bias_C, states.parts[0], silu)


def _plan_norm(
    program: Program, x: Cells, gate: Cells, weight_HD: torch.Tensor, eps: float, *, gate_first: bool
) -> None:
    """A gated norm, in place."""
    program.native.gated_norm([*x], [*gate], [*x], weight_HD, eps, gate_first)


def _uneven(config: RecurrenceConfig) -> str | None:
    return (
        f"states of {config.head_dim} columns, which the compiled recurrence does not take"
        if config.head_dim % LANES
        else None
    )


def rows(batch: Batch) -> tuple[Any, ...]:
    """Return the arguments of the kernels that follow from a batch."""
    states = batch.states
    assert states is not None, "a batch of a cache without states"
    return batch.query_starts, states.slots_B, states.mark_rows_N, states.mark_slots_N


def mixer(
    config: DecoderConfig, weights: MixerParts, layer: int
) -> ShortConvolution | GatedDeltaNet | Mamba2:
    """Return the token mixer of a recurrent layer."""
    match config.mixer:
        case ShortConvConfig():
            return ShortConvolution(weights, layer)
        case DeltaConfig():
            return GatedDeltaNet(config.mixer, config.eps, weights, layer)
        case MambaConfig():
            return Mamba2(config.mixer, config.eps, weights, layer)
        case None:
            raise AssertionError("a model without recurrent layers")
