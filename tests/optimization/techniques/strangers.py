"""Models written as published repositories write them, each with lines that keep it from being one graph."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> torch.Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.outer(torch.arange(end), freqs).float()
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[3])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, length, _ = x.shape
        xq, xk, xv = (w(x).view(batch, length, self.heads, -1) for w in (self.wq, self.wk, self.wv))
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        xq, xk, xv = (t.transpose(1, 2) for t in (xq, xk, xv))
        scores = xq @ xk.transpose(2, 3) / math.sqrt(xq.shape[-1])
        if mask is not None:
            scores = scores + mask
        probabilities = F.softmax(scores.float(), dim=-1).type_as(xq)
        return self.wo((probabilities @ xv).transpose(1, 2).reshape(batch, length, -1))


class Llama(nn.Module):
    """Complex rotary embeddings, kept in a plain attribute."""

    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 2, vocab: int = 100) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Attention(dim, heads) for _ in range(layers))
        self.output = nn.Linear(dim, vocab, bias=False)
        self.freqs_cis = precompute_freqs_cis(dim // heads, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[:length]
        mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1) if length > 1 else None
        for layer in self.layers:
            h = h + layer(h, freqs_cis, mask)
        return self.output(h)


class DetectionHead(nn.Module):
    """Refines boxes where any score passes, else leaves them; every branch by values."""

    def __init__(self, channels: int = 32, threshold: float = 0.5) -> None:
        super().__init__()
        self.cls, self.reg = nn.Linear(channels, 3), nn.Linear(channels, 4)
        self.refine = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        self.threshold = threshold

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.cls(features).sigmoid()
        boxes = self.reg(features)
        mask = scores.amax(-1) > self.threshold
        if mask.any():
            delta = self.refine(boxes)
            boxes = torch.where(mask[..., None], boxes + delta, boxes)
        else:
            scores = torch.zeros_like(scores)
        return {"scores": scores, "boxes": boxes}


class EarlyReturn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = x.abs().mean()
        if weight < 0.1:
            return x, weight
        x = self.proj(x) / weight
        x = x - x.mean(dim=-1, keepdim=True)
        return x, weight


class Chatty(nn.Module):
    """Prints, logs, and scales by a number taken out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 8)
        self.logger = logger

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("input", x.shape, f"mean {x.mean().item():.3f}")
        scale = max(x.abs().max().item(), 1e-6)
        x = self.fc1(x / scale)
        logger.debug("hidden %s", x.norm().item())
        self.logger.info("%s", float(x.sum()))
        gain = float(x.std()) * 2.0
        return self.fc2(torch.relu(x)) * gain


class WithNumpy(nn.Module):
    """Normalizes its input in NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.mean, self.std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.detach().cpu().numpy()
        image = np.clip(image, 0.0, 1.0)
        image = (image - self.mean[None, :, None, None]) / self.std[None, :, None, None]
        image = np.ascontiguousarray(image.transpose(0, 1, 3, 2)).astype(np.float32)
        return self.conv(torch.from_numpy(image).to(x.device))


def rescaled(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 1.0:
        x = x / 255.0
    return x


class Helper(nn.Module):
    """The branch is in a function beside the class, under a method of a class below it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def _prepare(self, x: torch.Tensor) -> torch.Tensor:
        return rescaled(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self._prepare(x))


class Inheriting(Helper):
    def forward(self, x: torch.Tensor, *, offset: float = 0.5) -> torch.Tensor:
        y = super().forward(x)
        return y + offset if y.sum() > 0 else y - offset


class SideEffect(nn.Module):
    """The branch counts: it must not run when it is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.hits = nn.Linear(16, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        if y.max() > 0.5:
            self.hits += 1
            y = y * 2
        return y


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x += 1
        return x


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ValueError("NaN in the input")
        return x * 2


class NumberLeaks(nn.Module):
    """What is returned is a number, and must stay one."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = x.softmax(-1)
        loss = y.max().item()
        return {"y": y, "loss": loss, "twice": [loss] * int(y.argmax())}


class Looked(nn.Module):
    """One side looks up a table where the other would be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if index.max() < 4:
            x = x + self.table[index]
        return x


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = self.generator.normal()
        return x + noise if x.sum() > 0 else x - noise


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = np.random.normal(size=3).sum()
        return x if x.sum() > noise else -x
