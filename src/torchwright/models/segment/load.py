"""From a Hugging Face folder to a model that segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError, first_line, unknown
from torchwright.hub.folder import Wanted, read_config, resolve
from torchwright.models.segment.base import Segmenter
from torchwright.models.segment.network import Network
from torchwright.models.segment.sam import Sam
from torchwright.models.segment.sam2 import Sam2
from torchwright.models.segment.semantic import ENDING, ClassSegmenter, open_classifier, preparation_of
from torchwright.models.vision.picture import check_pillow
from torchwright.workloads.base import CastBoundary, to_dtype
from torchwright.workloads.huggingface import load_model, quiet_transformers

FAMILIES: dict[str, type[Segmenter]] = {
    model_type: family for family in (Sam, Sam2) for model_type in family.model_types
}
"""By `model_type` of config.json. To add one, write a `Segmenter` and put it here."""
DTYPES = (torch.float32, torch.bfloat16)
WANTED = Wanted(
    "the folder or hub id of a SAM, a SAM 2 or a SegFormer of transformers, or an artifact of one"
)


def load_segmenter(folder: str | Path, dtype: torch.dtype = torch.float32) -> Segmenter:
    """The promptable segmentation model of a Hugging Face folder or hub id, on transformers' modules.

    `dtype`, float32 or bfloat16, is what all but its prompts' coordinates compute in.

    Raises `UnknownName` for a family that is not in `FAMILIES`, and `ModelError`, naming the file, for weights or
    configurations that cannot be used.
    """
    _check_dtype(dtype)
    path = resolve(str(folder), WANTED)
    if names_classes(path):
        raise ModelError(f"{folder} takes no prompts: it names classes", next="tw.load_class_segmenter")
    family, config = family_of(path)
    network = open_network(path, family)
    if dtype != torch.float32:
        network.cast(dtype, lambda name, module: False)
    return family(side_of(config), network)


def load_class_segmenter(folder: str | Path, dtype: torch.dtype = torch.float32) -> ClassSegmenter:
    """The model for semantic segmentation (…ForSemanticSegmentation) of a folder or hub id, in float32 or bfloat16.

    Raises `ModelError` for another model, and for files that cannot be used.
    """
    _check_dtype(dtype)
    path = resolve(str(folder), WANTED)
    if not names_classes(path):
        raise ModelError(f"{folder} is no model for semantic segmentation", next="tw.load_segmenter")
    preparation, model = preparation_of(path), open_classifier(path)
    if dtype != torch.float32:
        to_dtype(model, dtype, lambda name, module: False)
        model = CastBoundary(model, dtype)
    return ClassSegmenter(preparation, model)


def names_classes(path: Path) -> bool:
    """Check whether a folder's model classifies each pixel."""
    return any(str(name).endswith(ENDING) for name in read_config(path).get("architectures") or [])


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype}", allowed=", ".join(map(str, DTYPES)))


def family_of(path: Path) -> tuple[type[Segmenter], dict[str, Any]]:
    """A folder's family, and its config.json with what that leaves at its defaults. Raises as `load_segmenter`."""
    kind = read_config(path).get("model_type")
    if kind not in FAMILIES:
        raise unknown("family of segmentation models", str(kind), FAMILIES)
    with quiet_transformers():
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever transformers stumbles over
            raise ModelError(f"{path / 'config.json'} cannot be used", found=first_line(error)) from error
    return FAMILIES[kind], config.to_dict()


def open_network(path: Path, family: type[Segmenter]) -> Network:
    """A folder's model in float32 and eval mode. Raises `ModelError` as `load_segmenter`."""
    check_pillow()
    return family.network(load_model(path, family.architecture)).eval()


def side_of(config: dict[str, Any]) -> int:
    """Return the side in pixels of the encoder's square. Raises `ModelError` if it is not a square."""
    side = config["prompt_encoder_config"]["image_size"]
    if type(side) is not int or side < 1:
        raise ModelError("pictures are no square", found=f"prompt_encoder_config.image_size: {side!r}")
    return side
