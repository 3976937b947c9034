"""A native encoder and decoder as an artifact keeps them: packed for the kernels, beside the form of each layer.

speech.safetensors   every tensor of stem, encoder and decoder under its module's name
speech.json          the form of each packed layer, and the type of everything else
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from torchwright.decoder.config import DecoderConfig
from torchwright.decoder.precision import SIDES
from torchwright.decoder.weights import DecoderParts
from torchwright.errors import ArtifactError, ModelError
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.json_file import read_json
from torchwright.kernels.cpu.memory import lasting
from torchwright.kernels.linear import PackedForm, PackedLinear
from torchwright.speech.load import NATIVE
from torchwright.speech.native import NativeSpeech

TENSORS, FORMS = "speech.safetensors", "speech.json"
PLACES = {
    "qkv": "attention.qkv",
    "o": "attention.o",
    "memory_q": "memory.q",
    "memory_kv": "memory.kv",
    "memory_o": "memory.o",
    "up": "mlp.up",
    "down": "mlp.down",
}
"""Parts of a layer, by where they hang."""


def write_packed(model: NativeSpeech, folder: Path) -> None:
    """Keep a model's three modules."""
    module = model.module
    layers = {name: each for name, each in module.named_modules() if isinstance(each, PackedLinear)}
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, folder / TENSORS)
    forms = {name: layer.form.as_dict() for name, layer in layers.items()}
    described = {"description": described_by(layers), "layers": forms}
    (folder / FORMS).write_text(json.dumps(described, indent=1))


def described_by(layers: dict[str, PackedLinear]) -> str:
    """What runs, in words: the schemes of each side's layers, the most frequent first."""
    found = []
    for side in SIDES:
        schemes = Counter(str(layer.scheme) for name, layer in layers.items() if name.startswith(f"{side}."))
        found.append(f"{side} {' and '.join(name for name, _ in schemes.most_common()) or 'float32'}")
    return f"Torchwright's kernels, {', '.join(found)}"


def read_packed(folder: Path, model_folder: Path) -> NativeSpeech:
    """The model that `write_packed` kept; `model_folder` holds config.json.

    Raises `ArtifactError` for files that are damaged or do not fit the configuration.
    """
    try:
        described = read_json(folder / FORMS)
        forms = {name: PackedForm.from_dict(form) for name, form in described["layers"].items()}
        tensors = load_file(folder / TENSORS)
        config = read_config(model_folder)
        native = NATIVE[config["model_type"]]
        fields = Fields(model_folder / "config.json", config)
        parts = {side: KeptParts(native.stack_config(fields, side), side, forms, tensors) for side in SIDES}
        return native.assembled(parts, fields, str(described["description"])[:200])
    except (
        *(OSError, SafetensorError, RuntimeError, ValueError, LookupError),
        *(TypeError, AttributeError, ModelError),
    ) as error:
        raise ArtifactError(
            f"the speech model in {folder} cannot be read", found=f"{type(error).__name__}: {error}"
        ) from error


class KeptParts(DecoderParts):
    """Gives one stack its parts, and the stem those that go before the encoder, by their names in the state dict."""

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

    def positions(self) -> torch.Tensor:
        at = "stem" if self._side == "encoder" else self._side
        return self._tensor(f"{at}.positions", self.config.context, self.config.model)

    def head(self, embedding_VE: torch.Tensor) -> nn.Module:
        return self._layer(f"{self._side}.head", self.config.vocabulary, self.config.model)

    def final_norm(self) -> torch.Tensor:
        return self._tensor(f"{self._side}.norm", self.config.model)

    def final_shift(self) -> torch.Tensor:
        return self._tensor(f"{self._side}.shift", self.config.model)

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        name = f"{self._side}.layers.{layer}.{part}"
        return self._tensor(name, self.config.model) if name in self._tensors else None

    def linear(self, layer: int, part: str) -> nn.Module:
        model, wide = self.config.model, self.config.feed_forward
        rows = {"qkv": 3 * model, "memory_kv": 2 * model, "up": wide}.get(part, model)
        columns = wide if part == "down" else model
        return self._layer(f"{self._side}.layers.{layer}.{PLACES[part]}", rows, columns)

    def convolution(self, name: str, channels: int) -> nn.Module:
        return self._layer(f"stem.{name}", self.config.model, 3 * channels)

    def release(self) -> None:
        """Each tensor is copied as it is asked for."""

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
        layer = nn.Linear(columns, rows, device="meta")
        layer.load_state_dict(found, assign=True)
        return layer.requires_grad_(False)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
        return lasting(tensor)
