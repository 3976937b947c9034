"""Magika, which tells a file's type by its bytes.

    pip install magika scikit-image scikit-learn matplotlib

Files of installed packages, each package either to search by or held out. A type is right if the file's name ends as
files of that type do. The metric is the accuracy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.trained.task import Inputs, Trained, answers, package_folder

SEEN, BLOCK, PADDING = 1024, 4096, 256
"""Bytes seen at each end, bytes there without the white space that is left out, and the number that pads."""
GROUP, WIDTH, TYPES = 4, 64, 214
"""Bytes of a position, features of a byte, and types."""
BATCH, SEARCH_CALLS, HELD_OUT_CALLS = 16, 12, 20
SEARCH = ("torch", "sklearn", "numpy", "PIL")
HELD_OUT = ("matplotlib", "skimage", "scipy", "transformers", "fontTools", "networkx")
ENDINGS = (
    "py",
    "pyi",
    "h",
    "cpp",
    "json",
    "png",
    "jpg",
    "ttf",
    "pdf",
    "svg",
    "css",
    "js",
    "csv",
    "gz",
    "npz",
    "html",
)
"""Endings of names that say the type."""
MORE = {"h": ("c", "cpp"), "npz": ("npz", "zip")}
"""Types that an ending stands for, in addition to those that list the ending."""
MOST, SMALLEST = 96, 512
"""Files of one ending in each half, and bytes of the smallest."""


class Magika(nn.Module):
    """Bytes (batch, 2 × SEEN) → logits of the types; the layers of Magika 3.3."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(PADDING + 1, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.norm = nn.LayerNorm(2 * SEEN // GROUP, eps=1e-6)
        self.conv = nn.Conv1d(GROUP * WIDTH, 512, 5)
        self.head_norm = nn.LayerNorm(512, eps=1e-6)
        self.head = nn.Linear(512, TYPES)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        features = F.gelu(self.embedding(bytes_BT) + self.bias, approximate="tanh")
        positions_BEP = features.view(len(bytes_BT), -1, GROUP * WIDTH).transpose(1, 2)
        found_BEP = F.gelu(self.conv(self.norm(positions_BEP)), approximate="tanh")
        return self.head(self.head_norm(found_BEP.amax(-1)))


@dataclass
class TypeAccuracy:
    """Share of files whose type is one of those that their name says."""

    calls: list[Inputs]
    right: torch.Tensor
    """True where a type is right for a file: (files, types)."""
    __name__: str = field(default="accuracy")

    def __call__(self, model: nn.Module) -> float:
        found = answers(model, self.calls).argmax(-1, keepdim=True)
        return self.right.gather(1, found).double().mean().item()


def magika() -> Trained:
    """Return the model with files of packages."""
    search, held_out = (
        calls(files(packages, count * BATCH))
        for packages, count in ((SEARCH, SEARCH_CALLS), (HELD_OUT, HELD_OUT_CALLS))
    )
    return Trained(
        model=load(),
        search=search.calls,
        search_metric=search,
        held_out=held_out.calls,
        held_out_metric=held_out,
        higher_is_better=True,
        source=f"magika; files of {', '.join(SEARCH + HELD_OUT)}",
    )


def load() -> Magika:
    """Return the layers with the package's weights."""
    import onnx  # pyright: ignore[reportMissingImports]
    from onnx import numpy_helper  # pyright: ignore[reportMissingImports]

    graph = onnx.load(folder() / "model.onnx").graph
    state: dict[str, Any] = {each.name: numpy_helper.to_array(each) for each in graph.initializer}

    def named(end: str) -> torch.Tensor:
        (name,) = (name for name in state if name.endswith(end))
        return torch.tensor(state[name]).squeeze()

    model = Magika()
    model.load_state_dict(
        {
            "embedding.weight": named("get_logits_/Const:0"),
            "bias": named("Dense_0/Reshape:0"),
            "norm.weight": named("LayerNorm_0/Reshape_2:0"),
            "norm.bias": named("LayerNorm_0/Reshape_3:0"),
            "conv.weight": named("Conv_0/transpose_3:0"),
            "conv.bias": named("const_fold_opt__209"),
            "head_norm.weight": named("LayerNorm_1/Reshape_2:0"),
            "head_norm.bias": named("LayerNorm_1/Reshape_3:0"),
            "head.weight": named("get_logits_/Const_24:0").T,
            "head.bias": named("Dense_1/Reshape:0"),
        }
    )
    return model.eval().requires_grad_(False)


def folder() -> Path:
    return package_folder("magika") / "models" / "standard_v3_3"


def labels() -> list[str]:
    """Return the names of the types in the order of the logits."""
    return json.loads((folder() / "config.min.json").read_text())["target_labels_space"]


def files(packages: tuple[str, ...], count: int) -> list[Path]:
    """Return so many files of these packages, at most MOST of an ending."""
    every: dict[str, list[Path]] = {ending: [] for ending in ENDINGS}
    for name in packages:
        for file in sorted(package_folder(name).rglob("*.*")):
            if file.suffix[1:] in every and file.stat().st_size > SMALLEST:
                every[file.suffix[1:]].append(file)
    found = list[Path]()
    for alike in every.values():
        order = torch.randperm(len(alike), generator=torch.Generator().manual_seed(0))[:MOST].tolist()
        found += [alike[place] for place in order]
    if len(found) < count:
        raise RuntimeError(
            f"{', '.join(packages)} have {len(found)} files of known types, {count} are needed"
        )
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return [found[place] for place in order]


def calls(chosen: list[Path]) -> TypeAccuracy:
    """Return the files in calls of BATCH with their types."""
    known = json.loads((package_folder("magika") / "config" / "content_types_kb.min.json").read_text())
    right = torch.zeros(len(chosen), TYPES, dtype=torch.bool)
    for row, file in enumerate(chosen):
        ending = file.suffix[1:]
        for place, label in enumerate(labels()):
            right[row, place] = ending in known[label]["extensions"] or label in MORE.get(ending, ())
    seen = torch.tensor([ends(file.read_bytes()) for file in chosen])
    return TypeAccuracy([(rows,) for rows in seen.split(BATCH)], right)


def ends(content: bytes) -> list[int]:
    """Return what Magika sees of a file: its first and last bytes without the white space around them."""
    first, last = content[:BLOCK].lstrip()[:SEEN], content[-BLOCK:].rstrip()[-SEEN:]
    return [*first, *[PADDING] * (SEEN - len(first)), *[PADDING] * (SEEN - len(last)), *last]
