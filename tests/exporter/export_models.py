"""A small model of several kinds of layer, with weights that none of them shares."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """(N, 4, 16) → (N, 3, 14)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv, self.norm = nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3)
        for parameter in self.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        self.norm.running_mean = torch.randn(3)
        self.norm.running_var = torch.rand(3) + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(self.conv(x))


class Drowned(nn.Module):
    """One feature of the hidden ones is a thousand times the others, and counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight.data[:, 0] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * torch.tensor([1000.0] + [1.0] * 15)
        return self.last(hidden)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line that is named
            return x * 2
        return x


class Gates(nn.Module):
    """Its branch asks for a number, which is what torch.compile stumbles over."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean().item() > 0.1:
            return x * 2
        return x


class Unbounded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int(x[0, 0].item())
        return torch.zeros(count, 3) + x.sum()


class Bounded(nn.Module):
    """The same with the change that is told."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x[0, 0].long().item()
        torch._check(count >= 0)
        torch._check(count <= 16)
        return torch.zeros(count, 3) + x.sum()  # type: ignore[arg-type]


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.abs().sum().item()
        return x + self.total


class Logs(nn.Module):
    """Not a number from between its layers on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.log(-self.first(x).abs()))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.seen


class Sums(Counts):
    """Its answers do not show that it counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + 0 * self.seen


def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """For `export_models:small` on the command line."""
    return Small().eval(), (torch.randn(3, 4, 16),)
