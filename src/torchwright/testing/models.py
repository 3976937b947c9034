"""Small models on which techniques are tried: what makes each of them differ from the others is its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x_BE: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BE)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 5)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y = self.stem(x_BCHW)
        return self.head((y + self.block(y)).mean((2, 3)))


class SelfAttention(nn.Module):
    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.qkv, self.out, self.window = nn.Linear(64, 192), nn.Linear(64, 64), window

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        B, T, E = x_BTE.shape
        q, k, v = self.qkv(x_BTE).view(B, T, 3, 4, E // 4).permute(2, 0, 3, 1, 4)
        mask = None
        if self.window:
            distance = torch.arange(T)[:, None] - torch.arange(T)
            mask = (distance >= 0) & (distance < self.window)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(B, T, E)
        )


class Block(nn.Module):
    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.attention, self.norm = SelfAttention(window), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        x_BTE = x_BTE + self.attention(self.norm(x_BTE))
        return x_BTE + self.down(F.gelu(self.up(x_BTE)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x_BTE)[0])


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.net = nn.EmbeddingBag(50, 64), Perceptron()

    def forward(self, ids_BN: torch.Tensor, x_BE: torch.Tensor) -> torch.Tensor:
        return self.net(self.bag(ids_BN) + x_BE)


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (Perceptron, lambda: (torch.randn(8, 64),)),
    "conv+bn": (ConvNet, lambda: (torch.randn(2, 3, 16, 16),)),
    "transformer": (lambda: nn.Sequential(*[Block() for _ in range(3)]), lambda: (torch.randn(2, 16, 64),)),
    "windowed": (
        lambda: nn.Sequential(*[Block(window=32) for _ in range(3)]),
        lambda: (torch.randn(1, 192, 64),),
    ),
    "lstm": (Recurrent, lambda: (torch.randn(2, 6, 32),)),
    "embedding bag": (Recommender, lambda: (torch.randint(0, 50, (8, 4)), torch.randn(8, 64))),
    "torch encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
        lambda: (torch.randn(2, 16, 64),),
    ),
}
"""Name → how to build it, and how to make inputs for it."""


class Parts(nn.Module):
    """Takes keywords and plain values; answers with a dict of tensors in several layouts and of other values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)

    def forward(self, x_BCHW: torch.Tensor, *, scale_C: torch.Tensor, power: int = 2) -> dict[str, Any]:
        y_BHWC = self.norm(self.conv(x_BCHW).permute(0, 2, 3, 1))
        best = y_BHWC.flatten(1).argmax(1)
        return {
            "last": y_BHWC.permute(0, 3, 1, 2) * scale_C.view(1, 8, 1, 1),
            "pair": (best, None, power, [best > 9]),
            "given": x_BCHW,
            "again": best,
            "rows": len(x_BCHW),
        }


class Counter(nn.Module):
    """Changes its second input in place."""

    def forward(self, x_BE: torch.Tensor, seen_E: torch.Tensor) -> torch.Tensor:
        seen_E += x_BE.sum(0)
        return x_BE * 2


class Numbers(nn.Module):
    """Operators that libraries compute otherwise for NaN, infinity, large integers and indices out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(100, 8), nn.Linear(8, 8)

    def forward(
        self, x_BE: torch.Tensor, ids_BT: torch.Tensor, hashes_BT: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        rows_BE = self.table(ids_BT).sum(1)
        return {
            "layer": F.relu(self.layer(x_BE)),
            "relu": F.relu(x_BE),
            "clamp": x_BE.clamp(-1, 1),
            "softmax": x_BE.softmax(-1),
            "largest": x_BE.amax(-1),
            "lesser": torch.minimum(x_BE, rows_BE),
            "rows": rows_BE,
            "hashed": self.table(hashes_BT % 100).sum(1),
            "doubled": hashes_BT + hashes_BT,
        }
