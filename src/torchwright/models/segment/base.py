"""The interface of promptable segmentation models: a picture is encoded once, then prompts give masks on it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from torchwright.core import nested
from torchwright.core.errors import WorkloadError
from torchwright.models.segment.everything import SCORE, STABILITY, find
from torchwright.models.segment.masks import Mask, Points, stability
from torchwright.models.segment.network import INSIDE, LEFT_TOP, NO_POINT, OUTSIDE, RIGHT_BOTTOM, Network
from torchwright.models.segment.prompts import Encoded, Prompt, check_within, grid_over, prompts_of
from torchwright.models.vision.picture import read_picture


class Segmenter(ABC):
    """A segmentation model of one family, opened by `load_segmenter`."""

    model_types: ClassVar[tuple[str, ...]]
    """The model types in config.json."""
    architecture: ClassVar[str]
    """The class in transformers."""
    network: ClassVar[type[Network]]
    ends_boxes: ClassVar[bool] = False
    """True if the mark that ends points also follows a box."""

    def __init__(self, side: int, ask: Callable[..., Any], *, at_once: int | None = None) -> None:
        """`side`: pixels of the square that the encoder takes. `ask` is called as `Network.forward`, by keywords.

        `at_once` says that `ask` takes so many prompts where it gives several masks of each, and else one prompt.
        """
        self.side, self.ask, self.at_once = side, ask, at_once

    @classmethod
    @abstractmethod
    def embedding_shapes(cls, config: dict[str, Any]) -> list[tuple[int, ...]]:
        """Return the shapes of the encoder's outputs for a picture, by the contents of config.json."""

    @abstractmethod
    def pixels(self, picture_HW3: np.ndarray) -> torch.Tensor:
        """Return the encoder's input (1, 3, side, side), float32, for an RGB picture (H, W, 3), uint8."""

    @abstractmethod
    def scale(self, height: int, width: int) -> tuple[float, float]:
        """By what x and y in a picture are multiplied to be those in the encoder's square."""

    @abstractmethod
    def resized(self, logits_1NSS: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Mask logits (1, N, height, width) in float32 of the decoder's (1, N, S, S)."""

    @torch.inference_mode()
    def encode(self, source: Any) -> Encoded:
        """A file, Pillow image or array as `read_picture` takes it, through the encoder."""
        return next(self.encode_many([source]))

    def encode_many(self, sources: Iterable[Any], *, together: int = 1) -> Iterator[Encoded]:
        """Pictures of any sizes, up to `together` in one call of the encoder, each in a square of its own.

        What was compiled for one picture takes them one by one. Raises what `read_picture` raises.
        """
        if together < 1:
            raise WorkloadError(f"{together} pictures together", allowed="1 or more")
        waiting = iter(sources)
        count = together if self.at_once is None else 1
        while batch := [read_picture(source) for source in itertools.islice(waiting, count)]:
            with torch.inference_mode():
                squares = torch.cat([self.pixels(picture_HW3) for picture_HW3 in batch])
                found = self.ask(pixels=squares)
            for place, picture_HW3 in enumerate(batch):
                height, width, _ = picture_HW3.shape
                own = nested.map_leaves(lambda level, place=place: level[place : place + 1], found)
                yield Encoded(height=height, width=width, embeddings=own)

    @torch.inference_mode()
    def decode(
        self, encoded: Encoded, prompts: Sequence[Prompt], *, several: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask logits (P, M, S, S) and scores (P, M), float32: with `several` three masks a prompt, else one.

        Prompts may differ in size: those of as many points, with a box or without, share a call. Filling them up with
        marks that mean nothing would change their masks, since the decoder attends to all marks.
        """
        if not prompts:
            raise WorkloadError("no prompts are decoded", allowed="one or more")
        kinds = dict[tuple[int, bool], list[int]]()
        for place, prompt in enumerate(prompts):
            kinds.setdefault((len(prompt.points), prompt.box is None), []).append(place)
        found = [
            self._decode_alike(encoded, [prompts[place] for place in places], several)
            for places in kinds.values()
        ]
        order = torch.tensor([place for places in kinds.values() for place in places]).argsort()
        logits, scores = (torch.cat(parts)[order] for parts in zip(*found, strict=True))
        return logits, scores

    def _decode_alike(
        self, encoded: Encoded, prompts: Sequence[Prompt], several: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of prompts of one size."""
        points_1PT2, labels_1PT = self.marks(encoded, prompts)
        count = len(prompts) if self.at_once is None else self.at_once if several else 1
        parts = list[tuple[torch.Tensor, torch.Tensor]]()
        for first in range(0, len(prompts), count):
            # The last call is filled up with the last prompt.
            places = torch.arange(first, first + count).clamp(max=len(prompts) - 1)
            logits_1PMSS, scores_1PM = self.ask(
                embeddings=encoded.embeddings,
                points=points_1PT2[:, places],
                labels=labels_1PT[:, places],
                several=several,
            )
            wanted = min(count, len(prompts) - first)
            parts.append((logits_1PMSS[0, :wanted], scores_1PM[0, :wanted]))
        logits, scores = zip(*parts, strict=True)
        return torch.cat(logits), torch.cat(scores)

    def marks(self, encoded: Encoded, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts as the network takes them: points (1, P, T, 2) float32 and labels (1, P, T) int32."""
        across, down = self.scale(encoded.height, encoded.width)
        points, labels = list[Any](), list[Any]()
        for prompt in prompts:
            marks = [
                (*point, INSIDE if on else OUTSIDE)
                for point, on in zip(prompt.points, prompt.inside, strict=True)
            ]
            if prompt.box is not None:
                left, top, right, bottom = prompt.box
                marks += [(left, top, LEFT_TOP), (right, bottom, RIGHT_BOTTOM)]
            if prompt.box is None or self.ends_boxes:
                marks.append((0.0, 0.0, NO_POINT))
            points.append([(x * across, y * down) for x, y, _ in marks])
            labels.append([label for *_, label in marks])
        return torch.tensor([points], dtype=torch.float64).float(), torch.tensor([labels], dtype=torch.int32)

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
        """Return the masks of a picture's objects: one that contains all points and none of `outside`, or one per
        box.

        Points are (x, y) and boxes (left, top, right, bottom) in pixels; with one box the points belong to that
        object. Raises `WorkloadError` for prompts without meaning or outside the picture, and the errors of
        `read_picture`.
        """
        wanted = prompts_of(points, outside, boxes)
        encoded = self.encode(source)
        for prompt in wanted:
            check_within(prompt, encoded)
        return [self.mask(encoded, prompt) for prompt in wanted]

    def everything(
        self,
        source: Any,
        *,
        grid: int = 32,
        batch: int = 64,
        least_score: float = SCORE,
        least_stability: float = STABILITY,
        tell: Callable[[int, int], None] | None = None,
    ) -> list[Mask]:
        """All objects that `grid` x `grid` points find, best first; see `everything.py`.

        A mask stays whose score is above `least_score`, and whose stability is no less than `least_stability`.
        `batch` points are decoded at once, after which `tell` gets how many of how many are done.
        """
        encoded = self.encode(source)
        decode = partial(self.decode, encoded, several=True)
        finished = partial(self.finished, encoded)
        return find(
            grid_over(encoded, grid),
            decode,
            finished,
            batch=batch,
            least_score=least_score,
            least_stability=least_stability,
            tell=tell,
        )
