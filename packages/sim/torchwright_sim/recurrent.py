"""The fused cells of LSTM and GRU, which PyTorch asks every device but the CPU for, composed of operators.

They have the CPU's values, but not its bits: the CPU adds biases within its products.
"""

from __future__ import annotations

import torch

Optional = torch.Tensor | None


def register(aten: torch.library.Library) -> None:
    """Register the cells; gradients go through the operators that they are composed of."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):  # the second in inference mode
        aten.impl("_thnn_fused_lstm_cell", lstm_cell, key)
        aten.impl("_thnn_fused_gru_cell", gru_cell, key)


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: Optional = None,
    hidden_bias: Optional = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the cell's output, its state, and what a fused kernel would keep for its backward."""
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    enter, keep, cell, out = gates.chunk(4, 1)
    cy = keep.sigmoid() * cx + enter.sigmoid() * cell.tanh()
    return out.sigmoid() * cy.tanh(), cy, gates.new_empty(0)


def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: Optional = None,
    hidden_bias: Optional = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cell's output, and what a fused kernel would keep for its backward."""
    reset_x, enter_x, new_x = _biased(input_gates, input_bias).chunk(3, 1)
    reset_h, enter_h, new_h = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return new + (enter_x + enter_h).sigmoid() * (hx - new), new.new_empty(0)


def _biased(gates: torch.Tensor, bias: Optional) -> torch.Tensor:
    return gates if bias is None else gates + bias
