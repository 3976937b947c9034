"""Recurrent states of sequences, in slots.

A page is the same whichever sequence reads it; a state is the sum of all that its sequence has read so far. So each
sequence has a slot of its own. To continue from an earlier token takes a copy of the state as it was there. The layers
write it into another slot while they compute (`kernels/recurrent.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from torchwright.core.errors import WorkloadError


class StatesFull(WorkloadError):
    """More sequences than there are slots for; a serving engine asks `free` first."""


@dataclass(frozen=True)
class StateShape:
    """One layer's state of a sequence: a float32 tensor of each of these shapes."""

    parts: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        return sum(4 * math.prod(part) for part in self.parts)


@dataclass(frozen=True)
class LayerStates:
    """One layer's states: tensors of `StateShape`'s shapes behind a dimension of slots."""

    parts: tuple[torch.Tensor, ...]

    def copy(self, source: int, target: int) -> None:
        for part in self.parts:
            part[target] = part[source]

    def clear(self, slot: int) -> None:
        for part in self.parts:
            part[slot] = 0


class StatePool:
    """The states of all layers in so many slots, and which of these are free."""

    def __init__(self, shapes: Sequence[StateShape], slots: int, device: torch.device) -> None:
        self.layers = [
            LayerStates(tuple(torch.zeros(slots, *part, device=device) for part in shape.parts))
            for shape in shapes
        ]
        self._slots = slots
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A slot whose content is anything; raises `StatesFull` where none is free."""
        if not self._free:
            raise StatesFull(
                "the cache has no room for the state of one more sequence",
                found=f"{self._slots} slots, all taken",
                next="finish or free a sequence, or make the cache larger",
            )
        return self._free.pop()

    def take_empty(self) -> int:
        """A slot with the state of a sequence that has read nothing."""
        slot = self.take()
        for layer in self.layers:
            layer.clear(slot)
        return slot

    def take_copy(self, source: int) -> int:
        """A slot with the same state as another."""
        slot = self.take()
        for layer in self.layers:
            layer.copy(source, slot)
        return slot

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            assert slot not in self._free, f"slot {slot} is free"
            self._free.append(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise `AssertionError` unless `held` are all slots that are taken, each by one holder."""
        slots = sorted([*held, *self._free])
        assert slots == list(range(self._slots)), "slots are lost, or have two holders"
