"""One stack of an encoder and a decoder as an artifact keeps it: its parts by their names in the state dict."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from torchwright.hardware.kernels.cpu.memory import lasting
from torchwright.hardware.kernels.linear import PackedForm, PackedLinear
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.weights import DecoderParts

PLACES = {
    "qkv": "attention.qkv",
    "o": "attention.o",
    "memory_q": "memory.q",
    "memory_kv": "memory.kv",
    "memory_o": "memory.o",
    "up": "mlp.up",
    "gate_up": "mlp.gate_up",
    "down": "mlp.down",
}
"""Parts of a layer, by where they hang."""


class ArtifactParts(DecoderParts):
    """Each part is copied as it is asked for; raises `ValueError` where it does not fit the configuration."""

    device = torch.device("cpu")

    def __init__(
        self,
        config: DecoderConfig,
        side: str,
        forms: dict[str, PackedForm],
        tensors: dict[str, torch.Tensor],
    ) -> None:
        self.config, self._side, self._forms, self._tensors = config, side, forms, tensors

    def embedding(self) -> torch.Tensor:
        return self._tensor(f"{self._side}.embedding", self.config.vocabulary, self.config.model)

    def positions(self) -> torch.Tensor | None:
        return self._optional(f"{self._side}.positions", self.config.context, self.config.model)

    def head(self, embedding_VE: torch.Tensor) -> nn.Module:
        return self._layer(f"{self._side}.head", self.config.vocabulary, self.config.model)

    def final_norm(self) -> torch.Tensor | None:
        return self._optional(f"{self._side}.norm", self.config.model)

    def final_shift(self) -> torch.Tensor | None:
        return self._optional(f"{self._side}.shift", self.config.model)

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        return self._optional(f"{self._side}.layers.{layer}.{part}", self.config.model)

    def layer_norm(self, layer: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pair(f"{self._side}.layers.{layer}.post_{part}")

    def embedding_norm(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        name = f"{self._side}.embedding_norm"
        return self._pair(name) if f"{name}.weight" in self._tensors else None

    def attention_bias(self) -> torch.Tensor | None:
        return self._bias_HD

    def linear(self, layer: int, part: str) -> nn.Module:
        config = self.config
        model, wide, inner = config.model, config.feed_forward, config.heads * config.head_dim
        rows = {
            "qkv": 3 * inner,
            "memory_q": inner,
            "memory_kv": 2 * inner,
            "up": wide,
            "gate_up": 2 * wide,
        }.get(part, model)
        columns = {"o": inner, "memory_o": inner, "down": wide}.get(part, model)
        return self._layer(f"{self._side}.layers.{layer}.{PLACES[part]}", rows, columns)

    def release(self) -> None:
        """Nothing is held besides what was given."""

    @cached_property
    def _bias_HD(self) -> torch.Tensor | None:
        """One for all layers, which the first has in the file."""
        name = f"{self._side}.layers.0.attention.bias"
        return self._optional(name, self.config.heads, 2 * self.config.context)

    def _layer(self, name: str, rows: int, columns: int) -> nn.Module:
        found: dict[str, Any] = {
            part: lasting(self._tensors[f"{name}.{part}"])
            for part in ("packed", "scale", "bias", "weight")
            if f"{name}.{part}" in self._tensors
        }
        form = self._forms.get(name)
        shape = (rows, columns) if form is None else (form.out_features, form.in_features)
        if shape != (rows, columns):
            raise ValueError(f"{name} is {shape[0]} × {shape[1]}, not {rows} × {columns}")
        if form is not None:
            return PackedLinear.from_packed(form, found)
        layer = nn.Linear(columns, rows, bias="bias" in found, device="meta")
        layer.load_state_dict(found, assign=True)
        return layer.requires_grad_(False)

    def _pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and shift of a LayerNorm."""
        E = self.config.model
        return self._tensor(f"{name}.weight", E), self._tensor(f"{name}.shift", E)

    def _optional(self, name: str, *shape: int) -> torch.Tensor | None:
        return self._tensor(name, *shape) if name in self._tensors else None

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
        return lasting(tensor)
