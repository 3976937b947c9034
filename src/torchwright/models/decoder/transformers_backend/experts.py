"""A mixture of experts of transformers, with packed layers: each expert sees all of its tokens in one call.

transformers keeps the weights of all experts in two tensors, and says by flags of the module how they are laid out
(`use_experts_implementation`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.core.scheme import Scheme
from torchwright.hardware.kernels.linear import PackedLinear

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def has_experts(module: nn.Module) -> bool:
    """Check whether a module is a mixture of experts as transformers describes them."""
    flags = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
    down = getattr(module, "down_proj", None)
    return all(hasattr(module, flag) for flag in flags) and isinstance(down, torch.Tensor) and down.dim() == 3


class PackedExperts(nn.Module):
    """The experts of one layer: outputs (T, E) of states (T, E), chosen experts (T, C) and their shares (T, C)."""

    def __init__(self, experts: Any, scheme: Scheme, device: torch.device) -> None:
        super().__init__()
        self.rules = experts
        """The module itself, for its activation and norms."""
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        self.up, self.down = (_packed(experts, name, scheme, device) for name in (first, "down_proj"))

    def release(self) -> None:
        """Let go of the module's own weights."""
        for name in WEIGHTS:
            for key in (name, f"{name}_bias"):
                self.rules._parameters.pop(key, None)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        parts_TCE = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1], dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            row, place = (top_k_index == expert).nonzero(as_tuple=True)
            up = self.up[expert](hidden_states[row])
            inner = self.rules._apply_gate(up) if self.rules.has_gate else self.rules.act_fn(up)
            out = self.down[expert](inner)
            if self.rules.has_post_expert_norm:
                out = self.rules.post_expert_norm(out)
            parts_TCE[row, place] = (out * top_k_weights[row, place, None]).float()
        return parts_TCE.sum(1).to(hidden_states.dtype)


def _packed(experts: Any, name: str, scheme: Scheme, device: torch.device) -> nn.ModuleList:
    weights, biases = getattr(experts, name).detach(), getattr(experts, f"{name}_bias", None)
    made = nn.ModuleList()
    for place, weight in enumerate(weights):
        weight_NK = weight.t().contiguous() if experts.is_transposed else weight
        bias_N = biases[place].detach() if experts.has_bias and biases is not None else None
        made.append(PackedLinear(weight_NK, bias_N, scheme, device=device))
    return made
