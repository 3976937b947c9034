"""Feed-forward blocks of a decoder layer: gated, plain, and mixtures of experts."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.scheme import BF16
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder.config import DecoderConfig, ExpertsConfig
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.low_rank import LayerAdapters, place_of, project
from torchwright.models.decoder.program import Cells, Program, not_packed
from torchwright.models.decoder.shared import choice
from torchwright.models.decoder.weights import LayerParts


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)), gate and up as one linear layer."""

    def __init__(self, activation: str, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.activation, self.gate_up, self.down = activation, gate_up, down

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        return not_packed(self.gate_up, self.down)

    def forward(self, x_TE: torch.Tensor, adapters: LayerAdapters | None = None) -> torch.Tensor:
        wide_TF = ops.gated(project(self.gate_up, x_TE, "gate_up", adapters), self.activation)
        return project(self.down, wide_TF, "down", adapters)

    def plan(self, program: Program, x: Cells, to: Cells, layer: int | None = None) -> None:
        """Add to a program what `forward` does, with what adapters add in this layer."""
        places = (-1, -1) if layer is None else (place_of(layer, "gate_up"), place_of(layer, "down"))
        with program.scope():
            wide = program.gated(self.activation, program.linear(self.gate_up, x, place=places[0]))
            program.linear(self.down, wide, to, places[1])


class PlainFeedForward(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, activation: str, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.activation, self.up, self.down = activation, up, down

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        return not_packed(self.up, self.down)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.down(ops.activate(self.up(x_TE), self.activation))

    def plan(self, program: Program, x: Cells, to: Cells) -> None:
        """Add to a program what `forward` does."""
        with program.scope():
            wide = program.linear(self.up, x)
            program.activate(self.activation, wide)
            program.linear(self.down, wide, to)


class RoutedExperts(nn.Module):
    """Each token's chosen experts, weighted by the router's softmax; an expert sees all of its tokens in one call."""

    router: torch.Tensor
    packed_router: torch.Tensor | None
    bias: torch.Tensor | None
    router_bias: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(
        self, config: DecoderConfig, experts: ExpertsConfig, weights: LayerParts, layer: int
    ) -> None:
        super().__init__()
        self.config, self.count = experts, experts.count
        router = weights.router(layer)
        self.register_buffer("router", router)
        # PyTorch's product depends on the batch size, and a token near a tie would choose by its neighbours.
        takes = router.dtype == torch.bfloat16 and ops.on(weights.device, router.dtype) is not None
        layout = ops.layout(for_gpu=gpu.takes(weights.device))
        packed = layout.pack_bf16(router) if takes else None
        self.register_buffer("packed_router", packed, persistent=False)
        self.register_buffer("bias", weights.expert_bias(layer))
        # float32, as the compiled product adds it before it rounds.
        self.register_buffer(
            "router_bias", weights.router_bias(layer).float() if experts.router_bias else None
        )
        self.register_buffer("scale", weights.vector(layer, "expert_scale") if experts.expert_scale else None)
        self.experts = nn.ModuleList(
            GatedFeedForward(config.activation, *weights.expert(layer, expert))
            for expert in range(experts.count)
        )
        self.shared = GatedFeedForward(config.activation, *weights.shared(layer)) if experts.shared else None
        self.shared_gate = weights.shared_gate(layer) if experts.shared_gate else None

    def forward(self, x_TE: torch.Tensor, routed_TE: torch.Tensor | None = None) -> torch.Tensor:
        """The router reads `routed_TE`, or `x_TE` if that is not given."""
        expert_TC, share_TC = self._route(x_TE if routed_TE is None else routed_TE)
        out_TE = torch.zeros_like(x_TE)
        # In the order of the experts' numbers, so that a token's sum does not depend on the others.
        for expert in expert_TC.unique().tolist():
            row, place = (expert_TC == expert).nonzero(as_tuple=True)
            part = self.experts[expert](x_TE[row]) * share_TC[row, place, None].to(x_TE.dtype)
            out_TE.index_add_(0, row, part)
        return out_TE if self.shared is None else out_TE + self._shared(self.shared, x_TE)

    def _route(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts (T, C), and the factors of their outputs in float32 or better."""
        config = self.config
        if self.packed_router is None:
            bias_X = None if self.router_bias is None else self.router_bias.to(x_TE.dtype)
            score_TX = F.linear(x_TE, self.router, bias_X)
        else:
            kernels = ops.on(x_TE.device, x_TE.dtype)
            score_TX = kernels.linear_bf16(x_TE, self.packed_router, self.router_bias, self.count)
        return ops.route(score_TX, self.bias, self.scale, *choice(config), config.normalize, config.scale)

    def _shared(self, block: GatedFeedForward, x_TE: torch.Tensor) -> torch.Tensor:
        if self.shared_gate is None:
            return block(x_TE)
        return block(x_TE) * ops.activate(self.shared_gate(x_TE), "sigmoid")

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        if self.packed_router is None:
            return "a mixture of experts whose router is an operator of PyTorch"
        blocks = [cast(GatedFeedForward, expert) for expert in self.experts]
        blocks += [] if self.shared is None else [self.shared]
        found = next((block.unplanned for block in blocks if block.unplanned), None)
        return found or not_packed(self.shared_gate)

    def plan(self, program: Program, x: Cells, to: Cells, routed: Cells | None = None) -> None:
        """Add to a program what `forward` does."""
        assert self.packed_router is not None
        with program.scope():
            scores = program.rows(self.count)
            sizes = (x.width, self.count, 0, BF16.weight_bits, BF16.digits, False, 0)
            router = program.native.add_linear(self.packed_router, None, self.router_bias, *sizes)
            program.native.linear(router, [*(routed or x)], [*scores], -1)
            experts = [cast(GatedFeedForward, expert) for expert in self.experts]
            first, *_ = [
                program.add_linear(cast(PackedLinear, linear))
                for expert in experts
                for linear in (expert.gate_up, expert.down)
            ]
            program.native.experts(
                *([*scores], [*x], [*to], first, self.count, experts[0].activation, self.bias, self.scale),
                *(*choice(self.config), self.config.normalize, self.config.scale),
            )
            if self.shared is None:
                return
            part = program.rows(x.width)
            self.shared.plan(program, x, part)
            if self.shared_gate is not None:
                gate = program.linear(self.shared_gate, x)
                program.activate("sigmoid", gate)
                program.multiply(part, gate, part)
            program.add(to, part, to)


def feed_forward(
    config: DecoderConfig, weights: LayerParts, layer: int
) -> GatedFeedForward | PlainFeedForward | RoutedExperts:
    """The block of a layer that its configuration describes."""
    if config.sparse[layer]:
        assert config.experts
        return RoutedExperts(config, config.experts, weights, layer)
    if not config.gated:
        return PlainFeedForward(config.activation, weights.linear(layer, "up"), weights.linear(layer, "down"))
    return GatedFeedForward(
        config.activation, weights.linear(layer, "gate_up"), weights.linear(layer, "down")
    )
