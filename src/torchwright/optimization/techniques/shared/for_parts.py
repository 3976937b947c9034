"""Techniques that a model of several components, such as a pipeline, may have for some of them alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import nn

from torchwright.optimization.techniques.base import Target, Technique
from torchwright.optimization.techniques.shared.wrapping import named, plain_name


def strange_part(parts: Sequence[str], target: Target) -> str | None:
    """Return the name that is not a component of the model, with the model's components; or None."""
    known = target.workload.parts()
    strange = [part for part in parts if part not in known]
    if not strange:
        return None
    there = f"it has {', '.join(known)}" if known else "it is one, and parts are a pipeline's"
    return f"the model has no component {strange[0]!r}: {there}"


@dataclass(frozen=True, kw_only=True)
class ForParts(Technique):
    """A technique that changes modules, and can be restricted to a component's.

    Two steps of one technique stand in a recipe side by side where no component has both.
    """

    parts: tuple[str, ...] = ()
    """Components of a pipeline that it changes, such as transformer or vae; without any, the whole model."""

    @property
    def components(self) -> tuple[str, ...]:
        return self.parts

    @property
    def removed(self) -> frozenset[str]:
        """Nothing that the other components still have."""
        return frozenset() if self.parts else self.removes

    def replaces(self, other: Technique) -> bool:
        mine, theirs = {*self.parts}, {*other.components}
        if mine and theirs and not mine & theirs:
            return False
        # Where one of both is for some components alone, what it takes away is not among the model's properties.
        clash = bool(mine or theirs) and bool(other.removes & self.needs)
        return super().replaces(other) or (clash and isinstance(other, ForParts))

    def refuse(self, target: Target) -> str | None:
        return strange_part(self.parts, target)

    def lacks(self, target: Target, *kinds: type[nn.Module]) -> str | None:
        """Why there is nothing of these kinds to change in its components, or None."""
        if not self.parts or any(self.covers(name) for name, _ in named(target.model, kinds)):
            return None
        return f"{', '.join(self.parts)} has no {' or '.join(kind.__name__ for kind in kinds)} to change"

    def covers(self, name: str) -> bool:
        """Check whether a module of this name belongs to its components."""
        plain = f"{plain_name(name)}."
        return not self.parts or any(plain.startswith(f"{part}.") for part in self.parts)

    def by_parts(self, target: Target) -> Iterable[Self]:
        """The technique for the whole model, then for each of its components where it has several."""
        return [self, *(replace(self, parts=(part,)) for part in target.workload.parts())]
