"""Gemma 4's layers: each has an input of its own for every token, and a number that scales its output."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.models.decoder.attention import PagedAttention
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.feed_forward import GatedFeedForward, RoutedExperts
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.layers import join
from torchwright.models.decoder.low_rank import LayerAdapters
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.program import Cells, Program, not_packed
from torchwright.models.decoder.rotary_cache import RotaryAngles
from torchwright.models.decoder.weights import DecoderParts, LayerParts


class TokenInputs(nn.Module):
    """The inputs (T, L, I) of all layers: half of a table's row of the token, half of a product of its embedding."""

    table: torch.Tensor
    norm: torch.Tensor

    def __init__(self, config: DecoderConfig, weights: DecoderParts) -> None:
        super().__init__()
        table_VI, self.project, norm_I = weights.layer_inputs()
        self.eps, self.layers, self.shrink = config.eps, config.layers, config.model**-0.5
        # As the model's dtype rounds it, like the factor of the embedding.
        self.scale = torch.tensor(len(norm_I) ** 0.5, dtype=table_VI.dtype).item()
        self.register_buffer("table", table_VI)
        self.register_buffer("norm", norm_I)

    def forward(self, ids_T: torch.Tensor, embedded_TE: torch.Tensor) -> torch.Tensor:
        own_TLI = (F.embedding(ids_T, self.table) * self.scale).unflatten(1, (self.layers, -1))
        mixed_TLI = (self.project(embedded_TE) * self.shrink).unflatten(1, (self.layers, -1))
        return (ops.rms_norm(mixed_TLI, self.norm, self.eps) + own_TLI) * 2**-0.5

    def plan(self, program: Program) -> Cells:
        """Add to a program what `forward` does; the rows hold the layers' inputs one after another."""
        inputs = program.linear(self.project, program.stream)
        program.scale(self.shrink, inputs)
        program.norm(self.norm, inputs, inputs)
        with program.scope():
            own = program.rows(inputs.width)
            program.lookup(self.table, self.scale, own)
            program.add(inputs, own, inputs)
        program.scale(2**-0.5, inputs)
        return inputs


class InputLayer(nn.Module):
    """Attention, a feed-forward block, perhaps experts next to it, and the layer's own input; called like `Layer`.

    Each part has a norm before it and behind it. Between layers there is the stream alone.
    """

    pre_attention: torch.Tensor
    post_attention: torch.Tensor
    pre_mlp: torch.Tensor
    post_mlp: torch.Tensor
    post_input: torch.Tensor | None
    router_scale: torch.Tensor | None
    post_dense: torch.Tensor | None
    pre_experts: torch.Tensor | None
    post_experts: torch.Tensor | None
    layer_scale: torch.Tensor
    memory = None

    def __init__(self, config: DecoderConfig, weights: LayerParts, layer: int) -> None:
        super().__init__()
        assert config.layer_inputs
        self.eps, self.layer, self.activation = config.eps, layer, config.activation
        self.attention = PagedAttention(config, weights, layer)
        self.mlp = GatedFeedForward(
            config.activation, weights.linear(layer, "gate_up"), weights.linear(layer, "down")
        )
        self.experts = (
            None if config.experts is None else RoutedExperts(config, config.experts, weights, layer)
        )
        has_input = config.layer_inputs.width > 0
        self.input_gate = weights.linear(layer, "input_gate") if has_input else None
        self.input_out = weights.linear(layer, "input_out") if has_input else None
        for part in ("pre_attention", "post_attention", "pre_mlp", "post_mlp"):
            self.register_buffer(part, weights.norm(layer, part))
        for part in ("post_dense", "pre_experts", "post_experts"):
            self.register_buffer(part, weights.norm(layer, part) if config.experts else None)
        self.register_buffer("post_input", weights.norm(layer, "post_input") if has_input else None)
        self.register_buffer(
            "router_scale", weights.vector(layer, "router_scale") if config.experts else None
        )
        self.register_buffer("layer_scale", weights.vector(layer, "layer_scale"))

    def forward(
        self, delta_TE: None, stream_TE: torch.Tensor, batch: Batch, angles: RotaryAngles, pages: LayerPages
    ) -> tuple[None, torch.Tensor]:
        x_TE, stream_TE = join(delta_TE, stream_TE, self.pre_attention, self.eps)
        out_TE = self._norm(self.attention(x_TE, batch, angles, pages), self.post_attention)
        x_TE, stream_TE = join(out_TE, stream_TE, self.pre_mlp, self.eps)
        out_TE = self.mlp(x_TE, None if batch.adapted is None else LayerAdapters(batch.adapted, self.layer))
        if self.experts is not None:
            out_TE = self._norm(out_TE, self.post_dense) + self._norm(
                self._routed(stream_TE), self.post_experts
            )
        stream_TE = stream_TE + self._norm(out_TE, self.post_mlp)
        if self.input_gate is not None and self.input_out is not None:
            assert batch.inputs_TLI is not None, "a step without the inputs of its layers"
            gate_TI = ops.activate(self.input_gate(stream_TE), self.activation)
            out_TE = self.input_out(gate_TI * batch.inputs_TLI[:, self.layer])
            stream_TE = stream_TE + self._norm(out_TE, self.post_input)
        return None, stream_TE * self.layer_scale.to(stream_TE.dtype)

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        experts = None if self.experts is None else self.experts.unplanned
        inputs = not_packed(self.input_gate, self.input_out)
        return self.attention.unplanned or self.mlp.unplanned or experts or inputs

    def plan(self, program: Program, delta: None, rotary: int, kept: LayerPages) -> None:
        """Add to a program what `forward` does; `rotary` is the index of its rotary embedding."""
        x, out, stream = program.join(delta, self.pre_attention), program.delta, program.stream
        program.note(self.layer, stream)
        self.attention.plan(program, x, out, rotary, kept)
        program.norm(self.post_attention, out, out)
        self.mlp.plan(program, program.join(out, self.pre_mlp), out, self.layer)
        if self.experts is not None:
            self._plan_experts(program, self.experts)
        program.norm(self.post_mlp, out, out)
        program.add(stream, out, stream)
        if self.input_gate is not None and self.input_out is not None and self.post_input is not None:
            assert program.inputs is not None, "a program without the inputs of its layers"
            with program.scope():
                gate = program.linear(self.input_gate, stream)
                program.activate(self.activation, gate)
                program.multiply(gate, program.inputs.part(self.layer * gate.width, gate.width), gate)
                program.linear(self.input_out, gate, out)
            program.norm(self.post_input, out, out)
            program.add(stream, out, stream)
        program.scale(self.layer_scale.to(program.dtype).item(), stream)

    def _plan_experts(self, program: Program, experts: RoutedExperts) -> None:
        """Add the experts' output to that of the dense block."""
        stream, out = program.stream, program.delta
        assert self.post_dense is not None
        assert self.post_experts is not None
        assert self.pre_experts is not None
        assert self.router_scale is not None
        program.norm(self.post_dense, out, out)
        with program.scope():
            normed, routed, found = (program.rows(stream.width) for _ in range(3))
            program.norm(self.pre_experts, stream, normed)
            program.norm(self.router_scale, stream, routed)
            experts.plan(program, normed, found, routed)
            program.norm(self.post_experts, found, found)
            program.add(out, found, out)

    def _routed(self, stream_TE: torch.Tensor) -> torch.Tensor:
        assert self.experts is not None
        return self.experts(self._norm(stream_TE, self.pre_experts), self._norm(stream_TE, self.router_scale))

    def _norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor | None) -> torch.Tensor:
        assert weight_E is not None
        return ops.rms_norm(x_TE, weight_E, self.eps)
