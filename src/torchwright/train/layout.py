"""The parallel layout of a training run: one degree for each axis of parallelism (no torch import)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, Self

from torchwright.core.errors import TorchwrightError, unknown

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
"""The order in which pipeline stages take micro-batches forward and backward."""


class LayoutError(TorchwrightError):
    """A layout that cannot be read, or that does not fit the model or the processes."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism; 1 is an axis not used. The product, without `ep`, is the number of processes.

    The mesh's dimensions lie in the order of the fields, the outermost first, so that neighbours in rank share `tp`.
    Experts are spread over the processes of `dp_shard` and `cp` that a group already has: `ep` divides their product
    and adds no process of its own.
    """

    dp_replicate: int = 1
    """Copies of the sharded model; each sees its own part of the batch (the outer axis of HSDP)."""
    dp_shard: int = 1
    """Processes that share out parameters, gradients and optimizer state (FSDP2), each with its part of the batch."""
    pp: int = 1
    """Stages of consecutive layers."""
    cp: int = 1
    """Processes that share out each sequence."""
    tp: int = 1
    """Processes that share out each layer's matrices and heads."""
    ep: int = 1
    """Processes that share out each layer's experts."""

    def __post_init__(self) -> None:
        for axis, degree in asdict(self).items():
            if degree < 1:
                raise LayoutError(
                    f"the layout's {axis} is {degree}",
                    allowed="whole numbers of at least 1",
                    next=f"leave {axis} out",
                )
        if self.dp_shard * self.cp % self.ep:
            raise LayoutError(
                f"the layout's ep={self.ep} does not divide dp_shard · cp = {self.dp_shard * self.cp}",
                allowed="experts are spread over the processes of dp_shard and cp",
                next="choose an ep that divides their product",
            )

    @property
    def processes(self) -> int:
        """Return the number of processes that the layout takes."""
        return self.dp_replicate * self.dp_shard * self.pp * self.cp * self.tp

    @property
    def batch_ways(self) -> int:
        """Into how many parts the batch's rows are divided."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `dp_shard=4,tp=2`; an empty text is one process.

        Raises `UnknownName` for an axis that does not exist, `LayoutError` for one named twice or a degree that is no
        whole number.
        """
        degrees: dict[str, int] = {}
        for part in filter(None, (word.strip() for word in text.split(","))):
            axis, _, degree = (word.strip() for word in part.partition("="))
            if axis in degrees:
                raise LayoutError(f"the layout names {axis} twice", found=text, next="name each axis once")
            if not degree.isdecimal():
                raise LayoutError(
                    f"the layout's part '{part}' is not AXIS=NUMBER",
                    found=text,
                    next="write it as dp_shard=4,tp=2",
                )
            degrees[axis] = int(degree)
        return cls.from_degrees(degrees)

    @classmethod
    def from_degrees(cls, degrees: Mapping[str, int]) -> Self:
        """From axis → degree. Raises `UnknownName` for an axis that does not exist."""
        names = [field.name for field in fields(cls)]
        for axis in degrees:
            if axis not in names:
                raise unknown("layout axis", axis, names)
        return cls(**degrees)

    def __str__(self) -> str:
        used = [f"{axis}={degree}" for axis, degree in asdict(self).items() if degree > 1]
        return ",".join(used) or "one process"

    def check_processes(self, world: int) -> None:
        """Raise `LayoutError` unless `world` processes are what the layout takes; it says what would fit."""
        if world == self.processes:
            return
        others = self.processes // self.dp_replicate
        fits = (
            f"dp_replicate={world // others}" if world % others == 0 else f"a multiple of {others} processes"
        )
        raise LayoutError(
            f"the layout {self} takes {self.processes} processes",
            found=f"{world} processes",
            next=f"start {self.processes} processes, or use {fits}",
        )


def cut(layers: int, stages: int) -> list[range]:
    """The layers of each of `stages` pipeline stages, as even as they come; the first ones have one less."""
    ends = [layers * (stage + 1) // stages for stage in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
