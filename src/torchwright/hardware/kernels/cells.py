"""LSTM and GRU layers in one direction: packed weights, and the reference in plain PyTorch.

Axes: T steps, B rows, H units, G gates of a unit in torch's order. An LSTM has four (input, forget, cell, output), a
GRU three (reset, update, new). What the inputs add to the gates is computed before, for all steps at once:
(T, B, G·H), or (B, T, G·H) with `batch_first`, and so are the outputs. A packed weight lies in blocks of 16 units, each
(H, G, 16); the last block is made up by zeros. All is float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from torchwright.hardware.kernels.limits import LANES


def pack_cells(weight: torch.Tensor, gates: int) -> torch.Tensor:
    """Pack the weight (G·H, H) that the outputs of the step before are multiplied with; one dimension."""
    H = weight.shape[1]
    blocks_GHK = F.pad(weight.detach().float().view(gates, H, H), (0, 0, 0, -H % LANES))
    return blocks_GHK.unflatten(1, (-1, LANES)).permute(1, 3, 0, 2).flatten()


def unpack_cells(packed: torch.Tensor, size: int, gates: int) -> torch.Tensor:
    """Invert `pack_cells`."""
    blocks = packed.view(-1, size, gates, LANES).permute(2, 0, 3, 1)
    return blocks.reshape(gates, -1, size)[:, :size].reshape(gates * size, size)


def pack_units(values_H: torch.Tensor) -> torch.Tensor:
    """Return a number for each unit, padded by zeros to whole blocks."""
    return F.pad(values_H.detach().float(), (0, -len(values_H) % LANES))


def lstm_layer(
    gates: torch.Tensor,
    packed: torch.Tensor,
    state_BH: torch.Tensor,
    cell_BH: torch.Tensor,
    batch_first: bool,
    backwards: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs of all steps, the last of them, and the cell behind it."""
    weight, outputs = unpack_cells(packed, state_BH.shape[1], 4), list[torch.Tensor]()
    for gates_BG in _steps(gates, batch_first, backwards):
        i, f, g, o = (gates_BG + F.linear(state_BH, weight)).chunk(4, 1)
        cell_BH = f.sigmoid() * cell_BH + i.sigmoid() * g.tanh()
        state_BH = o.sigmoid() * cell_BH.tanh()
        outputs.append(state_BH)
    return _together(outputs, gates, state_BH, batch_first, backwards), state_BH, cell_BH


def gru_layer(
    gates: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor,
    state_BH: torch.Tensor,
    batch_first: bool,
    backwards: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of all steps, and the last of them.

    `bias`, by `pack_units`, is the new gate's that stands within what the reset gate scales.
    """
    H, outputs = state_BH.shape[1], list[torch.Tensor]()
    weight = unpack_cells(packed, H, 3)
    for gates_BG in _steps(gates, batch_first, backwards):
        (r, z, n), (by_r, by_z, by_n) = gates_BG.chunk(3, 1), F.linear(state_BH, weight).chunk(3, 1)
        r, z = (r + by_r).sigmoid(), (z + by_z).sigmoid()
        state_BH = (1 - z) * (n + r * (by_n + bias[:H])).tanh() + z * state_BH
        outputs.append(state_BH)
    return _together(outputs, gates, state_BH, batch_first, backwards), state_BH


def _steps(gates: torch.Tensor, batch_first: bool, backwards: bool) -> list[torch.Tensor]:
    steps = list(gates.unbind(1 if batch_first else 0))
    return steps[::-1] if backwards else steps


def _together(
    outputs: list[torch.Tensor],
    gates: torch.Tensor,
    state_BH: torch.Tensor,
    batch_first: bool,
    backwards: bool,
) -> torch.Tensor:
    if not outputs:
        return gates.new_empty((*gates.shape[:-1], state_BH.shape[1]))
    return torch.stack(outputs[::-1] if backwards else outputs, 1 if batch_first else 0)
