"""Pictures for a model that runs on transformers' own code: its own encoder, and a prompt to check it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import ModelError
from torchwright.models.decoder.transformers_backend.pictures import PictureSample, Shows
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.picture import PictureError
from torchwright.models.vision.reader import PictureReader

SIDES = (96, 128)
"""Height and width of the checked picture: small, and no square, so that rows and columns cannot be confused."""


def shows_on_transformers(folder: Path) -> Shows:
    """Return the function that gives a folder's loaded model its encoder, and a prompt with a picture."""

    def shows(model: Any) -> tuple[PictureEncoder, PictureSample]:
        encoder = PictureEncoder(folder, model.dtype, model.device, model=model)
        if not hasattr(model.base_model, "get_image_features"):
            raise ModelError(f"{type(model).__name__} has no encoder that can be called by itself")
        return encoder, _sample(folder)

    return shows


def _sample(folder: Path) -> PictureSample:
    pixels = np.random.default_rng(0).integers(0, 256, (*SIDES, 3), np.uint8)
    reader = PictureReader(folder)
    try:
        prepared = reader.read(pixels)
        inputs = reader.whole(f"See {reader.placeholder} and tell.", pixels)
    except PictureError as error:
        raise ModelError(f"the processor of {folder} cannot be used", found=str(error)) from error
    return PictureSample(
        ids=inputs["input_ids"][0].tolist(),
        pictures=[prepared.picture],
        inputs={name: torch.from_numpy(array.copy()) for name, array in inputs.items()},
    )
