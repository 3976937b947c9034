"""A decoder over one process's part of the weights, made to give what the whole gives.

The model knows nothing of other processes: what leaves a block is summed over them, and what leaves the output layer is
put together, by hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.tensor_parallel.processes import Processes
from torchwright.models.decoder.tensor_parallel.shape import divided
from torchwright.models.decoder.tensor_parallel.weights import DividedWeights


def divided_decoder(config: DecoderConfig, weights: DividedWeights, processes: Processes) -> Decoder:
    """Return a decoder that computes together with those of the other processes, which have to be called alike.

    The embedding table and the norms are whole in each of them. Two sums a layer; logits are the same bits everywhere.
    """
    decoder = Decoder(divided(config, processes.ways), weights)

    def summed(_module: nn.Module, _inputs: Any, out_TE: torch.Tensor) -> torch.Tensor:
        return processes.sum(out_TE)

    def joined(_module: nn.Module, _inputs: Any, part_NV: torch.Tensor) -> torch.Tensor:
        return processes.join_last(part_NV, config.vocabulary)

    for layer in decoder.layers:
        layer.get_submodule("attention").register_forward_hook(summed)
        layer.get_submodule("mlp").register_forward_hook(summed)
    decoder.head.register_forward_hook(joined)
    decoder.ways = processes.ways
    return decoder
