"""LSTM and GRU layers on Torchwright's own kernels.

The inputs of all steps are multiplied at once. Then a step is a product of its rows with packed weights that stay in
the caches; threads share its units, or the rows. torch runs a GRU operator by operator, step after step. It runs an
LSTM by oneDNN, which is as fast with many rows and slower with one (benchmarks/optimize/recurrent.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import deviation
from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels import cells
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.wrapping import linear_of, named, replace_where

KINDS: dict[str, type[nn.LSTM | nn.GRU]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}
"""By torch's name of a layer's mode."""
TYPES, GATES = tuple(KINDS.values()), {"LSTM": 4, "GRU": 3}


@dataclass(frozen=True, kw_only=True)
class PackedRecurrent(Technique):
    """LSTM and GRU layers in float32 on Torchwright's kernels, which keep packed weights in the caches."""

    name: ClassVar[str] = "packed_recurrent"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"eager", "float_weights"})

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return build.load_fault() if device.kind == "cpu" else "its kernels are for CPUs"

    def refuse(self, target: Target) -> str | None:
        reasons = [_reason(layer) for _, layer in named(target.model, TYPES)]
        if not reasons:
            return "the model has no nn.LSTM or nn.GRU"
        return None if None in reasons else str(reasons[0])

    def apply(self, target: Target) -> None:
        if fault := build.load_fault():
            raise RefusedTechnique("packed_recurrent cannot run", found=fault)
        found = list(named(target.model, TYPES))
        left = replace_where(target.model, found, _reason, PackedLayers)
        self.cover(target, len(found), unit="LSTM and GRU layers", kernel="packed float32", skipped=left)


class PackedLayers(nn.Module):
    """The layers of an `nn.LSTM` or `nn.GRU`, with its arguments and results."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.mode, self.gates = layer.mode, GATES[layer.mode]
        self.input_size, self.hidden_size = layer.input_size, layer.hidden_size
        self.num_layers, self.bias, self.batch_first = layer.num_layers, layer.bias, layer.batch_first
        self.dropout, self.bidirectional, self.proj_size = layer.dropout, layer.bidirectional, layer.proj_size
        self.inputs = nn.ModuleList()
        for number, (by_input, by_state, *biases) in enumerate(_parameters(layer)):
            bias, within = self._biases(*biases)
            self.inputs.append(linear_of(by_input, bias))
            self.register_buffer(f"packed_{number}", cells.pack_cells(by_state, self.gates))
            if self.mode == "GRU":
                self.register_buffer(f"within_{number}", cells.pack_units(within))

    def _biases(
        self, of_inputs: torch.Tensor | None, of_states: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return what is added to the inputs of all steps, and to what a GRU's reset gate scales."""
        if of_inputs is None or of_states is None:
            return None, torch.zeros(self.hidden_size)
        if self.mode == "LSTM":
            return of_inputs + of_states, torch.zeros(0)
        before, within = of_states.split([2 * self.hidden_size, self.hidden_size])
        return of_inputs + F.pad(before, (0, self.hidden_size)), within

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        if isinstance(input, PackedSequence):
            return self.unpacked()(input, hx)
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(0 if self.batch_first else 1)
        states = list(hx) if isinstance(hx, tuple) else [hx]
        if hx is None:
            count = len(self.inputs)
            rows = x.shape[0 if self.batch_first else 1]
            states = [x.new_zeros(count, rows, self.hidden_size)] * (2 if self.mode == "LSTM" else 1)
        elif not batched:
            states = [state.unsqueeze(1) for state in states]
        x, lasts = self._run(x, states)
        if not batched:
            x, lasts = x.squeeze(0 if self.batch_first else 1), [last.squeeze(1) for last in lasts]
        return x, tuple(lasts) if self.mode == "LSTM" else lasts[0]

    def _run(self, x: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        directions = 2 if self.bidirectional else 1
        lasts: list[tuple[torch.Tensor, ...]] = []
        for layer in range(self.num_layers):
            outputs: list[torch.Tensor] = []
            for backwards in range(directions):
                number = layer * directions + backwards
                found = self._layer(x, number, [state[number] for state in states], bool(backwards))
                outputs.append(found[0])
                lasts.append(found[1:])
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        return x, [torch.stack(each) for each in zip(*lasts, strict=True)]

    def _layer(
        self, x: torch.Tensor, number: int, states: list[torch.Tensor], backwards: bool
    ) -> tuple[torch.Tensor, ...]:
        ops: Any = torch.ops.torchwright
        gates, packed = self.inputs[number](x), self.get_buffer(f"packed_{number}")
        if self.mode == "LSTM":
            return ops.lstm_layer(gates, packed, *states, self.batch_first, backwards)
        within = self.get_buffer(f"within_{number}")
        return ops.gru_layer(gates, packed, within, *states, self.batch_first, backwards)

    def flatten_parameters(self) -> None:
        """Do nothing: models call this where cuDNN wants weights in one block."""

    def unpacked(self) -> nn.RNNBase:
        """Return the layers as torch has them, which take sequences of several lengths."""
        layers = KINDS[self.mode](
            self.input_size,
            self.hidden_size,
            self.num_layers,
            batch_first=self.batch_first,
            bidirectional=self.bidirectional,
            device="meta",
        )
        weights = dict[str, torch.Tensor]()
        for number, linear in enumerate(self.inputs):
            packed, before = self.get_buffer(f"packed_{number}"), torch.zeros(self.gates * self.hidden_size)
            bias = before if linear.bias is None else linear.bias
            if self.mode == "GRU":
                within = self.get_buffer(f"within_{number}")[: self.hidden_size]
                before = F.pad(within, (2 * self.hidden_size, 0))
            values = (linear.weight, cells.unpack_cells(packed, self.hidden_size, self.gates), bias, before)
            weights |= dict(zip(_names(number, self.bidirectional), values, strict=True))
        layers.load_state_dict(weights, assign=True)
        return layers.eval().requires_grad_(False)

    def extra_repr(self) -> str:
        return f"{self.mode}, {self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


def _names(number: int, bidirectional: bool) -> list[str]:
    """Return torch's names of a layer's weights of inputs and of states, and of their biases."""
    layer, backwards = divmod(number, 2) if bidirectional else (number, 0)
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [f"{kind}_l{layer}{'_reverse' if backwards else ''}" for kind in kinds]


def _parameters(layer: nn.RNNBase) -> Iterator[list[Any]]:
    """Yield by layer and direction what `_names` names; None for biases that it has not."""
    for number in range(layer.num_layers * (2 if layer.bidirectional else 1)):
        values = [getattr(layer, name, None) for name in _names(number, layer.bidirectional)]
        yield [None if value is None else value.detach() for value in values]


def _reason(layer: Any) -> str | None:
    """Return why the kernels do not take these layers, or why they cannot be replaced."""
    if reason := deviation(layer, TYPES):
        return reason
    if layer.proj_size:
        return "its outputs are projected"
    dtype = layer.weight_ih_l0.dtype
    return None if dtype == torch.float32 else f"its weights are {dtype}"
