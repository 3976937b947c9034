"""From a Hugging Face folder to a model that segments."""

from __future__ import annotations

from pathlib import Path

import torch

from torchwright.errors import ModelError, unknown
from torchwright.hub.folder import read_config, resolve
from torchwright.segment.base import Segmenter
from torchwright.segment.sam import Sam
from torchwright.segment.sam2 import Sam2
from torchwright.workloads.huggingface import load_model

FAMILIES: dict[str, type[Segmenter]] = {
    model_type: family for family in (Sam, Sam2) for model_type in family.model_types
}
"""By `model_type` of config.json. To add one, write a `Segmenter` and put it here."""
DTYPES = (torch.float32, torch.bfloat16)


def load_segmenter(folder: str | Path, dtype: torch.dtype = torch.float32) -> Segmenter:
    """The segmentation model of a Hugging Face folder or hub id, on transformers' modules.

    `dtype`, float32 or bfloat16, is its encoder's.

    Raises `UnknownName` for a family that is not in `FAMILIES`, and `ModelError`, naming the file, for weights or
    configurations that cannot be used.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype}", allowed=", ".join(map(str, DTYPES)))
    path = resolve(str(folder))
    kind = read_config(path).get("model_type")
    if kind not in FAMILIES:
        raise unknown("family of segmentation models", str(kind), FAMILIES)
    family = FAMILIES[kind]
    return family(path, load_model(path, family.architecture), dtype)
