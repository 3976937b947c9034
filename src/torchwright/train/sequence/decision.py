"""The question to a placement rule, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from torchwright.train.sequence.placement import WHOLE, Placement, Shard


class Refused(Exception):
    """Why an operation cannot run on a part of the sequence."""


@dataclass(frozen=True)
class Decision:
    """The plan for an operation whose operands are divided."""

    output: Placement
    inputs: Mapping[Node, Placement] = field(default_factory=dict)
    """The placements that operands must have; the others stay where they are."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that differ from the whole operation's, by their name in its schema."""
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    """Another function in place of the operation, with its arguments."""
    scale: float | None = None
    """By what the result is multiplied."""
    then: Placement | None = None
    """The placement to which the result moves at once."""
    repeat: Mapping[Node, tuple[int, int]] = field(default_factory=dict)
    """Operands whose axis is repeated first: (axis, times)."""
    attention: str = ""
    """The report's line about it, if it is an attention."""


class Call:
    """An operation of the captured graph: its arguments by name, their placements and whole shapes."""

    def __init__(
        self, node: Node, places: Mapping[Node, Placement], ways: int, group: str, length: int
    ) -> None:
        self.node, self.ways, self.group, self.length = node, ways, group, length
        self._places = places
        schema = node.target._schema  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        self._arguments: dict[str, Any] = {each.name: each.default_value for each in schema.arguments}
        self._arguments |= dict(zip(self._arguments, node.args, strict=False)) | node.kwargs

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._arguments.get(name, default)

    def place(self, operand: Node) -> Placement:
        return self._places[operand]

    def divided(self) -> list[Node]:
        """The operands of which processes have parts."""
        return [node for node in self.node.all_input_nodes if isinstance(self._places[node], Shard)]

    def only(self, name: str) -> tuple[Node, Shard]:
        """The named operand and its division; refused where another operand is divided and it is not."""
        operand = self[name]
        place = self._places[operand]
        if not isinstance(place, Shard) or self.divided() != [operand]:
            raise Refused("an operand is divided that must be whole")
        return operand, place

    def fit(self, operand: Any, wanted: Shard, rank: int) -> dict[Node, Placement]:
        """Return how an operand broadcast against `rank` axes combines with a result that is divided this way."""
        if not isinstance(operand, Node):
            return {}
        dim = wanted.dim - (rank - len(shape(operand)))
        broadcast = dim < 0 or shape(operand)[dim] == 1
        place, target = self._places[operand], (WHOLE if broadcast else wanted.at(dim))
        if isinstance(place, Shard) and place != target:
            raise Refused(f"operands are divided over different axes, {place.dim} and {target}")
        return {operand: target}


def shape(operand: Node) -> tuple[int, ...]:
    """The whole tensor's."""
    return tuple(operand.meta["val"].shape)


def axis(dim: int, rank: int) -> int:
    return dim % max(rank, 1)
