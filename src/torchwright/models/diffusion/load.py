"""From a pipeline's folder to what makes pictures."""

from __future__ import annotations

from pathlib import Path

import torch

from torchwright.models.diffusion.diffuser import Diffuser
from torchwright.models.diffusion.folder import open_pipeline
from torchwright.models.diffusion.parts import build_parts


def load_diffuser(folder: str | Path) -> Diffuser:
    """The pipeline of a folder or hub id, on diffusers' modules in float32.

    Raises `UnknownName` for a pipeline that is not in `folder.FAMILIES`, and `ModelError`, naming file or component,
    for a folder that cannot be used.
    """
    opened = open_pipeline(folder)
    parts = build_parts(opened)
    with torch.no_grad():
        return Diffuser(opened, parts)
