"""Layers whose attention and recurrent part read the same input next to each other (Falcon-H1)."""

from __future__ import annotations

import torch
from torch import nn

from torchwright.models.decoder.attention import PagedAttention
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.layers import join
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.program import Cells, Program, not_packed
from torchwright.models.decoder.recurrent import mixer
from torchwright.models.decoder.rotary_cache import RotaryAngles
from torchwright.models.decoder.states import LayerStates
from torchwright.models.decoder.weights import LayerParts


class ScaledFeedForward(nn.Module):
    """down(activation(gate(x) · factor) · up(x)) · factor."""

    def __init__(self, activation: str, gate: float, down: float, gate_up: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.activation, self.gate_scale, self.down_scale = activation, gate, down
        self.gate_up, self.down = gate_up, out

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, dim=-1)
        wide_TF = ops.gated(torch.cat([gate_TF * self.gate_scale, up_TF], dim=-1), self.activation)
        return self.down(wide_TF) * self.down_scale

    def plan(self, program: Program, x: Cells, to: Cells) -> None:
        """Add to a program what `forward` does."""
        with program.scope():
            wide = program.linear(self.gate_up, x)
            program.scale(self.gate_scale, wide.part(0, wide.width // 2))
            program.linear(self.down, program.gated(self.activation, wide), to)
            program.scale(self.down_scale, to)


class ParallelLayer(nn.Module):
    """Called like `Layer`, but with pages and states; each part has a factor, as muP asks (Yang et al., 2022)."""

    pre_attention: torch.Tensor
    pre_mlp: torch.Tensor
    memory = None

    def __init__(self, config: DecoderConfig, weights: LayerParts, layer: int) -> None:
        super().__init__()
        assert config.parallel
        self.eps, self.factors, self.layer = config.eps, config.parallel, layer
        self.attention = PagedAttention(config, weights, layer)
        self.mixer = mixer(config, weights, layer)
        self.mlp = ScaledFeedForward(
            config.activation,
            config.parallel.gate,
            config.parallel.down,
            weights.linear(layer, "gate_up"),
            weights.linear(layer, "down"),
        )
        for part in ("pre_attention", "pre_mlp"):
            self.register_buffer(part, weights.norm(layer, part))

    def forward(
        self,
        delta_TE: torch.Tensor | None,
        stream_TE: torch.Tensor,
        batch: Batch,
        angles: RotaryAngles,
        kept: tuple[LayerPages, LayerStates],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factors, (pages, states) = self.factors, kept
        x_TE, stream_TE = join(delta_TE, stream_TE, self.pre_attention, self.eps)
        mixed_TE = self.mixer(x_TE, batch, states) * factors.mixer_out
        seen_TE = self.attention(x_TE * factors.attention_in, batch, angles, pages) * factors.attention_out
        x_TE, stream_TE = join(mixed_TE + seen_TE, stream_TE, self.pre_mlp, self.eps)
        return self.mlp(x_TE), stream_TE

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        return self.attention.unplanned or self.mixer.unplanned or not_packed(self.mlp.gate_up, self.mlp.down)

    def plan(
        self, program: Program, delta: Cells | None, rotary: int, kept: tuple[LayerPages, LayerStates]
    ) -> Cells:
        """Add to a program what `forward` does; `rotary` is the index of its rotary embedding."""
        factors, (pages, states) = self.factors, kept
        x, out = program.join(delta, self.pre_attention), program.delta
        program.note(self.layer, program.stream)
        with program.scope():
            mixed, scaled = program.rows(x.width), program.rows(x.width)
            self.mixer.plan(program, x, mixed, states)
            program.scale(factors.mixer_out, mixed)
            program.scale(factors.attention_in, x, scaled)
            self.attention.plan(program, scaled, out, rotary, pages)
            program.scale(factors.attention_out, out)
            program.add(mixed, out, out)
        self.mlp.plan(program, program.join(out, self.pre_mlp), out)
        return out
