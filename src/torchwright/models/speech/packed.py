"""Native encoders and decoders in an artifact: weights packed for the kernels, with the form of each layer.

speech.safetensors   every tensor of stem, encoder and decoder under its module's name
speech.json          the form of each packed layer, and the type of everything else
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from torchwright.core.errors import ArtifactError, ModelError
from torchwright.core.json_file import read_json
from torchwright.hardware.kernels.linear import PackedForm, PackedLinear
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.models.decoder.artifact_parts import ArtifactParts
from torchwright.models.decoder.precision import SIDES
from torchwright.models.speech.load import NATIVE
from torchwright.models.speech.native import NativeSpeech

TENSORS, FORMS = "speech.safetensors", "speech.json"


def write_packed(model: NativeSpeech, folder: Path) -> None:
    """Keep a model's three modules."""
    module = model.module
    layers = {name: each for name, each in module.named_modules() if isinstance(each, PackedLinear)}
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, folder / TENSORS)
    forms = {name: layer.form.as_dict() for name, layer in layers.items()}
    described = {"description": described_by(layers), "layers": forms}
    (folder / FORMS).write_text(json.dumps(described, indent=1), encoding="utf-8")


def described_by(layers: dict[str, PackedLinear]) -> str:
    """Describe the schemes of each side's layers, the most frequent first."""
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
        parts = {side: SpeechParts(native.config(fields, side), side, forms, tensors) for side in SIDES}
        return native.assembled(parts, fields, str(described["description"])[:200])
    except (
        *(OSError, SafetensorError, RuntimeError, ValueError, LookupError),
        *(TypeError, AttributeError, ModelError),
    ) as error:
        raise ArtifactError(
            f"the speech model in {folder} cannot be read", found=f"{type(error).__name__}: {error}"
        ) from error


class SpeechParts(ArtifactParts):
    """Gives the stem those parts, too, that go before the encoder."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self._tensors["decoder.embedding"].dtype

    def positions(self) -> torch.Tensor | None:
        if self.config.ropes[0] is not None:
            return None
        at = "stem" if self._side == "encoder" else self._side
        return self._tensor(f"{at}.positions", self.config.context, self.config.model)

    def convolution(self, name: str, rows: int, channels: int, kernel: int) -> nn.Module:
        return self._layer(f"stem.{name}", rows, kernel * channels)

    def stem(self, name: str, *shape: int) -> torch.Tensor:
        return self._tensor(f"stem.{name}", *shape)
