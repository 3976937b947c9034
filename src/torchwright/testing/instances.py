"""A model whose arguments and results are instances of classes of its own."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

ROWS = 4


class Sign(enum.Enum):
    """A part of the argument and of the result."""

    PLUS = "plus"
    MINUS = "minus"


class Level(enum.IntEnum):
    """An enum whose members are numbers as well."""

    LOW = 1
    HIGH = 2


@dataclass
class Batch:
    """An argument: tensors, a number, an optional tensor, a list, enum members, text, and a dict."""

    x_BE: torch.Tensor
    scale: float = 1.0
    mask_BF: torch.Tensor | None = None
    extras: list[torch.Tensor] = field(default_factory=list["torch.Tensor"])
    sign: Sign = Sign.PLUS
    level: Level = Level.LOW
    note: str | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])


class Pair(NamedTuple):
    """An argument by keyword, and a part of the result."""

    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """A part of the result, of a class without a dictionary."""

    values: torch.Tensor
    name: str = "hidden"


@dataclass
class Output(OrderedDict[str, Any]):
    """A dict as well, like transformers' `ModelOutput`: fields that hold None are not items."""

    logits: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("logits", "states"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


@dataclass(frozen=True)
class Answer:
    """The result."""

    output: Output
    hidden: Hidden
    many: list[Any]
    sign: Sign
    level: Level
    nothing: None = None
    count: int = 3


class Instances(nn.Module):
    """A perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, batch: Batch, *, pair: Pair | None = None) -> Answer:
        h_BF = torch.relu(self.first(batch.x_BE * batch.scale))
        for extra_BF in batch.extras:
            h_BF = h_BF + extra_BF
        if batch.mask_BF is not None:
            h_BF = h_BF * batch.mask_BF
        if pair is not None:
            h_BF = h_BF + pair.low * pair.high
        y_BE = self.last(h_BF) * batch.options.get("deep", {}).get("factor", 1.0)
        y_BE = (y_BE if batch.sign is Sign.PLUS else -y_BE) * batch.level
        return Answer(
            output=Output(logits=y_BE),
            hidden=Hidden(h_BF),
            many=[y_BE + 1, {"double": y_BE * 2}, Pair(y_BE, h_BF)],
            sign=batch.sign,
            level=batch.level,
        )


def build() -> nn.Module:
    torch.manual_seed(0)
    return Instances().eval()


def call(rows: int = ROWS, seed: int = 0) -> dict[str, Any]:
    """The arguments of a call, by keyword."""
    generator = torch.Generator().manual_seed(seed)

    def random(width: int) -> torch.Tensor:
        return torch.rand(rows, width, generator=generator)

    batch = Batch(random(64), 0.5, random(128), [random(128)], sign=Sign.MINUS, level=Level.HIGH)
    batch.options = {"deep": {"factor": random(64), "name": "text"}, "none": None}
    return {"batch": batch, "pair": Pair(random(128), random(128))}
