"""Segment Anything: a picture's longer side becomes the encoder's, the rest of the square is empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from torchwright.models.segment.base import Segmenter
from torchwright.models.segment.network import LEFT_TOP, RIGHT_BOTTOM, Network
from torchwright.models.segment.square import normalized


class SamNetwork(Network):
    """transformers' SamModel."""

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model.vision_encoder(pixels.to(self.dtype)).last_hidden_state.float()

    def decode(
        self, embeddings: Any, points: Any, labels: Any, several: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model, prompts = self.model, self.model.prompt_encoder
        sparse = prompts._embed_points(points, labels, pad=False)
        for label in (LEFT_TOP, RIGHT_BOTTOM):
            sparse = sparse + (labels == label)[..., None] * prompts.point_embed[label].weight
        return model.mask_decoder(
            image_embeddings=embeddings.to(self.dtype),
            image_positional_embeddings=model.get_image_wide_positional_embeddings().to(self.dtype),
            sparse_prompt_embeddings=sparse.to(self.dtype),
            dense_prompt_embeddings=self.dense().to(self.dtype),
            multimask_output=several,
        )


class Sam(Segmenter):
    """SAM: ViT-B, L and H (Kirillov et al., 2023)."""

    model_types = ("sam",)
    architecture = "SamModel"
    network = SamNetwork

    @classmethod
    def embedding_shapes(cls, config: dict[str, Any]) -> list[tuple[int, ...]]:
        prompts = config["prompt_encoder_config"]
        size = prompts["image_size"] // prompts["patch_size"]
        return [(1, prompts["hidden_size"], size, size)]

    def pixels(self, picture_HW3: np.ndarray) -> torch.Tensor:
        from PIL import Image

        height, width = self._inside(*picture_HW3.shape[:2])
        # By Pillow, as the model was trained: its filter widens with the step.
        resized: Any = Image.fromarray(picture_HW3).resize((width, height), Image.Resampling.BILINEAR)
        pixels_3HW = normalized(torch.from_numpy(np.array(resized)).permute(2, 0, 1).float())
        return F.pad(pixels_3HW, (0, self.side - width, 0, self.side - height))[None]

    def scale(self, height: int, width: int) -> tuple[float, float]:
        inner_height, inner_width = self._inside(height, width)
        return inner_width / width, inner_height / height

    def resized(self, logits_1NSS: torch.Tensor, height: int, width: int) -> torch.Tensor:
        inner_height, inner_width = self._inside(height, width)
        square = F.interpolate(logits_1NSS, (self.side, self.side), mode="bilinear")
        inside = square[..., :inner_height, :inner_width]
        return F.interpolate(inside, (height, width), mode="bilinear")

    def _inside(self, height: int, width: int) -> tuple[int, int]:
        """The picture's part of the square: of the thinnest strip a pixel is left."""
        longer = max(height, width)
        return max(1, int(height * self.side / longer + 0.5)), max(1, int(width * self.side / longer + 0.5))
