"""A vision encoder as an artifact keeps it: its weights as they are, and the scheme of each packed layer.

    vision/config.json          of the whole model
    vision/model.safetensors    the tensors of the model's folder that are not the language model's
    vision/schemes.json         packed layers by name → their scheme, where it is not bf16

Layers are packed as they are loaded, which takes seconds and gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.core.json_file import read_json
from torchwright.core.scheme import BF16, MADE, Scheme, scheme_of
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.folder import read_config
from torchwright.hub.language_part import loaded_tensors
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.load import vision_part
from torchwright.models.vision.native import OntoKernels
from torchwright.models.vision.record import Picture

PLACE, SCHEMES = "vision", "schemes.json"


class KeptEncoder(PictureEncoder):
    """The encoder of an artifact, whose schemes were chosen when it was made."""

    def __init__(self, artifact: Path, model_folder: Path) -> None:
        super().__init__(model_folder, torch.bfloat16)
        self._kept = artifact / PLACE
        self._schemes_of = _read_schemes(self._kept / SCHEMES)

    def _load(self, example: Picture | None) -> Any:
        model = vision_part(self._kept, torch.bfloat16)
        OntoKernels(None, self._schemes_of).replace(model)
        names = {name for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
        if unknown := sorted(self._schemes_of.keys() - names):
            raise ArtifactError(
                f"{self._kept / SCHEMES} names no layer of the encoder", found=unknown[0][:80]
            )
        schemes = sorted({scheme.name for scheme in self._schemes_of.values()})
        self.runs_as: str | None = f"our kernels in {' and '.join(schemes) or BF16}, as the artifact has it"
        return model


def write_encoder(model: Any, model_folder: Path, artifact: Path) -> None:
    """Keep the encoder `model`, whose layers are on kernels, of the folder that its weights are from."""
    place = artifact / PLACE
    place.mkdir()
    shutil.copyfile(model_folder / "config.json", place / "config.json")
    language = loaded_tensors(read_config(model_folder))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(model_folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if not language(name)}  # noqa: SIM118
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    schemes = {
        name: str(layer.scheme)
        for name, layer in model.named_modules()
        if isinstance(layer, PackedLinear) and layer.scheme != BF16
    }
    (place / SCHEMES).write_text(json.dumps(schemes, indent=1), encoding="utf-8")


def _read_schemes(path: Path) -> dict[str, Scheme]:
    try:
        return {name: _scheme(text) for name, text in read_json(path).items()}
    except (OSError, ValueError, AttributeError, TorchwrightError) as error:
        raise ArtifactError(f"{path} cannot be read", found=f"{type(error).__name__}: {error}") from error


def _scheme(text: object) -> Scheme:
    name, _, option = str(text).partition(":group_size=")
    scheme = scheme_of(name, int(option)) if option else scheme_of(name)
    if scheme.name not in MADE:
        raise ValueError(f"the scheme is {name[:80]}")
    return scheme
