"""The acceptance of a head on held-out windows, by the position of a proposal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

REPORT = "acceptance.json"
"""The file of a trained head's folder that says how it did."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Figures of the n-th proposal of a chain, where those before it are the text's own tokens."""

    position: int
    places: int
    agree: float
    """Share of places at which it is the target's likeliest token: greedy acceptance."""
    overlap: float
    """Sum of min(p, q): the probability that a sampled proposal is accepted at temperature 1."""
    chain: float
    """Share of places at which it and all before it are the target's likeliest tokens."""
    loss: float
    """Cross entropy with the target's probabilities, in nats."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The positions of a head's chains."""

    positions: tuple[Position, ...]

    @classmethod
    def of(cls, sums_S5: torch.Tensor) -> Acceptance:
        """Return the figures of the sums that `DraftModel.loss` gives, over all windows."""
        rows = [[value / max(row[0], 1.0) for value in row[1:]] for row in sums_S5.tolist()]
        return cls(
            positions=tuple(
                Position(
                    position=number + 1,
                    places=int(sums_S5[number, 0]),
                    loss=loss,
                    agree=agree,
                    overlap=overlap,
                    chain=chain,
                )
                for number, (loss, agree, overlap, chain) in enumerate(rows)
            )
        )

    @property
    def accepted(self) -> float:
        """Proposals of a chain that are right one after the other, in the mean."""
        return sum(position.chain for position in self.positions)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "accepted_tokens": self.accepted,
            "positions": [vars(position) for position in self.positions],
        }

    def lines(self) -> list[str]:
        """Return the report in words."""
        return [
            f"held-out proposals right in a row: {self.accepted:.2f} of {len(self.positions)}",
            *(
                f"position {one.position}: {one.agree:.1%} are the target's likeliest token, "
                f"{one.overlap:.1%} are accepted when sampled at temperature 1"
                for one in self.positions
            ),
        ]
