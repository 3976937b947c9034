"""What every family of promptable segmentation models answers: a picture encoded once, then masks of prompts on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from torchwright.errors import WorkloadError
from torchwright.segment.everything import find
from torchwright.segment.masks import Mask, Points, stability
from torchwright.segment.picture import read_picture
from torchwright.segment.prompts import Encoded, Prompt, check_within, grid_over, prompts_of


class Segmenter(ABC):
    """A segmentation model of one family, opened by `load_segmenter`."""

    model_types: ClassVar[tuple[str, ...]]
    """Of config.json."""
    architecture: ClassVar[str]
    """The class in transformers."""
    encoder: ClassVar[tuple[str, ...]] = ("vision_encoder",)
    """The modules that a picture goes through."""

    def __init__(self, folder: Path, model: Any, dtype: torch.dtype = torch.float32) -> None:
        """`model` is in float32; its encoder computes in `dtype`.

        Prompts and masks stay in float32: they take little time, and bfloat16 has no place for pixel 650.
        """
        self.folder, self.model, self.dtype = folder, model, dtype
        for name in self.encoder:
            model.get_submodule(name).to(dtype)
        self.side = int(model.config.prompt_encoder_config.image_size)
        """Pixels of the square that the encoder takes."""

    @abstractmethod
    def pixels(self, picture_HW3: np.ndarray) -> torch.Tensor:
        """What the encoder takes (1, 3, side, side) of RGB (H, W, 3) uint8, float32."""

    @abstractmethod
    def scale(self, height: int, width: int) -> tuple[float, float]:
        """By what x and y in a picture are multiplied to be those in the encoder's square."""

    @abstractmethod
    def embeddings(self, pixels: torch.Tensor) -> Any:
        """What the decoder takes of the encoder's pixels, in float32."""

    @abstractmethod
    def resized(self, logits_1NSS: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Mask logits (1, N, height, width) in float32 of the decoder's (1, N, S, S)."""

    @torch.inference_mode()
    def encode(self, source: Any) -> Encoded:
        """A file, Pillow image or array as `read_picture` takes it, through the encoder."""
        picture_HW3 = read_picture(source)
        height, width, _ = picture_HW3.shape
        embeddings = self.embeddings(self.pixels(picture_HW3).to(self.dtype))
        return Encoded(height=height, width=width, embeddings=embeddings)

    @torch.inference_mode()
    def decode(
        self, encoded: Encoded, prompts: Sequence[Prompt], *, several: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask logits (P, M, S, S) and scores (P, M), float32: with `several` three masks a prompt, else one.

        All prompts have as many points, and a box all or none of them. Raises `WorkloadError` where they have not.
        """
        kinds = {(len(prompt.points), prompt.box is None) for prompt in prompts}
        if len(kinds) != 1:
            raise WorkloadError("prompts of one batch have as many points each, and a box all or none")
        across, down = self.scale(encoded.height, encoded.width)
        asked: dict[str, torch.Tensor] = {}
        if prompts[0].points:
            points_PN2 = torch.tensor([prompt.points for prompt in prompts], dtype=torch.float64)
            asked["input_points"] = (points_PN2 * torch.tensor([across, down]))[None].float()
            asked["input_labels"] = torch.tensor([prompt.inside for prompt in prompts])[None].int()
        if prompts[0].box is not None:
            boxes_P4 = torch.tensor([prompt.box for prompt in prompts], dtype=torch.float64)
            asked["input_boxes"] = (boxes_P4 * torch.tensor([across, down] * 2))[None].float()
        out = self.model(image_embeddings=encoded.embeddings, multimask_output=several, **asked)
        return out.pred_masks[0], out.iou_scores[0]

    def mask(self, encoded: Encoded, prompt: Prompt) -> Mask:
        """The object that a prompt means; of a single point the mask with the best score of three."""
        logits_1MSS, score_1M = self.decode(encoded, [prompt], several=prompt.ambiguous)
        best = int(score_1M[0].argmax())
        return self.finished(encoded, logits_1MSS[0, best], float(score_1M[0, best]), prompt.points)

    @torch.inference_mode()
    def finished(self, encoded: Encoded, logits_SS: torch.Tensor, score: float, points: Points) -> Mask:
        """A mask in the picture's size of the decoder's logits."""
        logits_HW = self.resized(logits_SS[None, None], encoded.height, encoded.width)[0, 0]
        return Mask(
            pixels_HW=(logits_HW > 0).numpy(),
            score=score,
            stability=float(stability(logits_HW[None])[0]),
            points=points,
        )

    def segment(
        self,
        source: Any,
        *,
        points: Sequence[Sequence[float]] = (),
        outside: Sequence[Sequence[float]] = (),
        boxes: Sequence[Sequence[float]] = (),
    ) -> list[Mask]:
        """The masks of a picture's objects: one that all points are on and none of `outside`, or one in each box.

        Points are (x, y) and boxes (left, top, right, bottom) in pixels; with one box the points are of that object.
        Raises `WorkloadError` for prompts that mean nothing or lie beside the picture, and what `read_picture` raises.
        """
        wanted = prompts_of(points, outside, boxes)
        encoded = self.encode(source)
        for prompt in wanted:
            check_within(prompt, encoded)
        return [self.mask(encoded, prompt) for prompt in wanted]

    def everything(
        self, source: Any, *, grid: int = 32, batch: int = 64, tell: Callable[[int, int], None] | None = None
    ) -> list[Mask]:
        """All objects that `grid` x `grid` points find, best first; see `everything.py`.

        `batch` points are decoded at once, after which `tell` gets how many of how many are done.
        """
        encoded = self.encode(source)
        decode = partial(self.decode, encoded, several=True)
        return find(grid_over(encoded, grid), decode, partial(self.finished, encoded), batch=batch, tell=tell)
