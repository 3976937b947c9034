"""A promptable segmentation model: a picture through the encoder, and a grid of prompts on what it gave."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.core.records import Quality
from torchwright.hub.folder import model_files
from torchwright.models.segment.base import Segmenter
from torchwright.models.segment.beside import masks_beside
from torchwright.models.segment.judge import mask_quality, overlap, packed, unpacked
from torchwright.models.segment.load import FAMILIES, family_of, open_network, side_of
from torchwright.models.segment.network import network_in
from torchwright.models.segment.prompts import GRIDS, Encoded, grid_over
from torchwright.models.vision.user_pictures import UserPictures
from torchwright.report.pictures import MOST_ROWS, PictureRow
from torchwright.workloads.base import (
    CALIBRATION_BATCHES,
    Case,
    Optimized,
    Run,
    Workload,
    batches_to_judge,
    check_sizes,
)
from torchwright.workloads.huggingface import parameter_count
from torchwright.workloads.pictures import PATCH_PIXELS, picture

SAMPLE_PICTURES = 8
SAMPLE_OPERATIONS = 4e12
"""The metric's pictures are cut to what these operations of the encoder pay for; two at least."""
AT_ONCE = 64
"""Prompts of one call, at most."""
CALIBRATION_SEED = 1_000_000
LARGEST_SIDE = 8192


class SegmentWorkload(Workload):
    """A model that cuts objects out of pictures (SAM, SAM 2): the encoder once a picture, a grid of points on it.

    Metric: IoU with the original's masks, all three of each point, over pictures of a folder or made-up ones. The
    coordinates of prompts stay in float32 whatever the rest computes in.
    """

    name = "segment"
    supports = "SAM, SAM 2 and 2.1 on still pictures"
    opens = frozenset({"images"})

    def __init__(self, folder: str | Path, *, points: str = "8x8", images: str | Path | None = None) -> None:
        self.folder, self.label = Path(folder), str(folder)
        self.grid, self.user = _grid(points), None if images is None else UserPictures(Path(images))
        self.family, self.config = family_of(self.folder)
        self.side, self.at_once = side_of(self.config), min(AT_ONCE, self.grid**2)

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return config.get("model_type") in FAMILIES

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "side", "at_once")
        if description.get("family") not in FAMILIES:
            raise ArtifactError(
                f"the recipe's family of segmentation models is {str(description.get('family'))[:80]!r}",
                allowed=", ".join(FAMILIES),
            )
        if (
            any(description.get(name) is None for name in ("side", "at_once"))
            or description["side"] > LARGEST_SIDE
        ):
            raise ArtifactError(
                f"side and at_once are not those of pictures up to {LARGEST_SIDE} pixels wide"
            )

    @classmethod
    def answerer(cls, optimized: Optimized) -> Segmenter:
        told = optimized.description
        return _segmenter(
            FAMILIES[told["family"]], told["side"], told["at_once"], optimized.run, optimized.device
        )

    @classmethod
    def rates(cls, description: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
        return {
            "pictures_per_s": 1 / seconds["encode"],
            "points_per_s": description["at_once"] / seconds["points"],
        }

    def build(self) -> nn.Module:
        return open_network(self.folder, self.family)

    def cast(self, model: nn.Module, dtype: torch.dtype, keep: Callable[[str, nn.Module], bool]) -> nn.Module:
        network_in(model).cast(dtype, keep)
        return model

    def cases(self, dtype: torch.dtype) -> list[Case]:
        """A picture; the grid's points, three masks each; and one prompt, of which one mask is wanted."""
        random = torch.Generator().manual_seed(0)
        shapes = self.family.embedding_shapes(self.config)
        # The encoder's last layers normalize what they give.
        levels = [torch.randn(shape, generator=random).to(self.device) for shape in shapes]
        embeddings = levels if len(levels) > 1 else levels[0]
        asked = _segmenter(self.family, self.side, self.at_once, lambda case: case, self.device)
        encoded = Encoded(height=self.side, width=self.side, embeddings=embeddings)
        prompts = grid_over(encoded, self.grid)
        several, single = (
            asked.ask(embeddings=embeddings, points=points, labels=labels, several=many)
            for (points, labels), many in (
                (asked.marks(encoded, prompts[: self.at_once]), True),
                (asked.marks(encoded, prompts[:1]), False),
            )
        )
        marks = torch.export.Dim("marks", min=2)
        free = {
            "embeddings": None if len(levels) == 1 else [None] * len(levels),
            "points": {2: marks},
            "labels": {2: marks},
            "several": None,
        }
        return [
            self._encode(0),
            Case(name="points", kwargs=several.kwargs, repeat=-(-len(prompts) // self.at_once)),
            Case(name="prompt", kwargs=single.kwargs, dynamic=free),
        ]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        """Other pictures; what prompts compute with are the calls that are timed."""
        _, *prompts = self.cases(dtype)
        pictures = len(self.user.calibration) if self.user else CALIBRATION_BATCHES
        return [*(self._encode(index, calibration=True) for index in range(pictures)), *prompts]

    def calibrates_apart(self) -> bool:
        return True

    @torch.inference_mode()
    def observe(self, run: Run, dtype: torch.dtype) -> dict[str, Any]:
        """The masks of the grid's points on every sampled picture, as `mask_quality` takes them."""
        segmenter = _segmenter(self.family, self.side, self.at_once, run, self.device)
        masks, scores, largest = list[torch.Tensor](), list[torch.Tensor](), 0.0
        for index in self.sample or range(self._rounds()):
            encoded = segmenter.encode(self._picture(index))
            prompts, bits, guesses = grid_over(encoded, self.grid), list[torch.Tensor](), list[torch.Tensor]()
            for first in range(0, len(prompts), self.at_once):
                logits, score = segmenter.decode(encoded, prompts[first : first + self.at_once], several=True)
                bits.append(packed(logits))
                guesses.append(score.cpu())
                # Not Python's max, which would pass over a NaN.
                largest = float(torch.maximum(logits.abs().max().cpu(), torch.tensor(largest)))
            masks.append(torch.cat(bits))
            scores.append(torch.cat(guesses))
        return {"masks": masks, "scores": scores, "largest": largest}

    def unseen(self) -> Self | None:
        return self.judged_after(self._rounds(), len(self.user.judged) if self.user else None)

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return mask_quality(reference, candidate)

    def side_by_side(self, reference: Any, candidate: Any) -> list[PictureRow]:
        """Return each picture's mask that has changed the most."""
        segmenter, rows = _segmenter(self.family, self.side, self.at_once, lambda case: case, self.device), []
        pairs = zip(reference["masks"], candidate["masks"], strict=True)
        for index, (before, after) in zip(self.sample or range(self._rounds()), pairs, strict=True):
            shown = self._picture(index)
            height, width, _ = shown.shape
            iou_PM = overlap(before, after)
            place, which = divmod(int(iou_PM.argmin()), iou_PM.shape[1])
            old_HW, new_HW = (
                segmenter.resized(unpacked(bits[place, which])[None, None], height, width)[0, 0].numpy() > 0
                for bits in (before, after)
            )
            prompt = grid_over(Encoded(height=height, width=width, embeddings=None), self.grid)[place]
            worst = float(iou_PM[place, which])
            title = f"picture {index}, the point {place + 1} of {len(iou_PM)}, mask {which + 1} of 3"
            said = f"IoU {worst:.3f}, of the picture's masks {float(iou_PM.mean()):.3f}"
            rows.append((worst, masks_beside(title, said, shown, old_HW, new_HW, prompt.points)))
        return [row for _, row in sorted(rows, key=lambda each: each[0])[:MOST_ROWS]]

    def files(self, *, weights: bool) -> dict[str, Path]:
        return model_files(self.folder, weights=weights)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "family": self.family.model_types[0],
            "side": self.side,
            "points": f"{self.grid}x{self.grid}",
            "at_once": self.at_once,
            "images": None if self.user is None else str(self.user.folder),
        }

    def properties(self, model: nn.Module) -> set[str]:
        return {"image"}

    def _rounds(self) -> int:
        """Pictures of the metric's sample."""
        operations = 2.0 * parameter_count(self.folder) * self.side**2 / PATCH_PIXELS
        there = len(self.user.judged) if self.user else None
        return batches_to_judge(min(SAMPLE_PICTURES, SAMPLE_OPERATIONS / max(operations, 1.0)), there)

    def _picture(self, index: int, *, calibration: bool = False) -> np.ndarray:
        """RGB (H, W, 3) uint8."""
        if self.user:
            return self.user.read(index, calibration=calibration)
        # Wider than high, as photographs are.
        shape = (3, max(8, self.side * 3 // 4), self.side)
        made_up = picture(index + CALIBRATION_SEED * calibration, shape)
        return (made_up * 255).round().byte().permute(1, 2, 0).numpy()

    def _encode(self, index: int, *, calibration: bool = False) -> Case:
        asked = _segmenter(self.family, self.side, self.at_once, lambda case: case, self.device)
        return asked.ask(pixels=asked.pixels(self._picture(index, calibration=calibration)))


def _segmenter(family: type[Segmenter], side: int, at_once: int, run: Run, device: str) -> Segmenter:
    """Return a network that calls `run`, with its tensors on `device`."""

    def ask(**given: Any) -> Any:
        placed = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }
        name = "encode" if "pixels" in given else "points" if given["several"] else "prompt"
        return run(Case(name=name, kwargs=placed))

    return family(side, ask, at_once=at_once)


def _grid(points: str) -> int:
    """Points of a side, from `NxN`."""
    found = re.fullmatch(r"(\d{1,4})x(\d{1,4})", str(points))
    if found is None or found[1] != found[2] or not GRIDS[0] <= int(found[1]) <= GRIDS[1]:
        raise WorkloadError(
            f"points={points}", allowed=f"NxN, as many down as across, N from {GRIDS[0]} to {GRIDS[1]}"
        )
    return int(found[1])
