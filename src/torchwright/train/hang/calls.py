"""A rank's dump: the collectives that it called, and its stack at the time of the dump (no torch import)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from torchwright.core.errors import TorchwrightError

_MACHINERY = re.compile(
    r"/torch/(distributed|nn|utils|autograd|multiprocessing|optim|library|fx|_\w+)\b|/torch/_ops\.py"
    r"|/(contextlib|threading|typing_extensions|runpy|spawn|_bootstrap)\.py$|/multiprocessing/|/concurrent/"
    r"|^<frozen|^<string>|/torchwright/train/hang/"
)
"""Files between a program's own line and the collective, or above its first line."""

_UNEQUAL = frozenset({"all_to_all", "all_to_allv", "alltoall", "alltoall_base", "barrier"})
"""Operations whose shapes may differ from rank to rank."""
_OUTPUT_COUNTS = frozenset({"scatter"})
"""Operations of which only the output is on every rank."""


class DumpError(TorchwrightError):
    """Flight-recorder dumps that are missing, not trusted, or cannot be read."""


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        name = "/".join(self.file.rsplit("/", 2)[-2:])
        return f"{name}:{self.line} {self.function}"

    @property
    def own(self) -> bool:
        """Check whether the frame is the program's own, not PyTorch's or the interpreter's."""
        return not _MACHINERY.search(self.file)


@dataclass(frozen=True)
class RankCall:
    """One collective, or one half of a message between two ranks, as one rank called it."""

    group: str
    """The group's key: backend and name."""
    seq: int
    """Its number among the group's calls, from 1; the same on every rank of a program that is right."""
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    outputs: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[str, ...]
    created: int
    """Nanoseconds since 1970 by this rank's clock."""
    done: bool
    """Check whether it has ended, with or without success: gloo's recorder does not tell the two apart."""
    frames: tuple[Frame, ...] = ()
    """Innermost first."""
    peer: int | None = None
    """The other rank, for a send or a receive."""

    @property
    def path(self) -> tuple[Frame, ...]:
        """The program's own lines on the way to it, innermost first; empty where the dump carries no stacks."""
        return tuple(frame for frame in self.frames if frame.own) or self.frames[:1]

    @property
    def where(self) -> str:
        """The innermost of them and the one that called it, since the first is often a helper."""
        return " ← ".join(map(str, self.path[:2]))

    @property
    def what(self) -> str:
        """`all_reduce of [4, 8] float`."""
        peer = "" if self.peer is None else f" {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        sizes, dtypes = (self.shapes, self.dtypes) if self.shapes else (self.outputs, self.output_dtypes)
        if not sizes:
            return f"{self.op}{peer}"
        shown = ", ".join(str(list(size)) for size in sizes[:2]) + (", …" if len(sizes) > 2 else "")
        return f"{self.op}{peer} of {shown} {'/'.join(dict.fromkeys(dtypes)).lower()}".rstrip()


@dataclass
class Dump:
    """One rank's dump."""

    rank: int
    calls: list[RankCall]
    """In the order in which they were made."""
    messages: list[RankCall] = field(default_factory=list)
    """Sends and receives, which have an order for each pair of ranks only."""
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Key → description and members, where the dump knows them."""
    wrapped: bool = False
    """True if the recorder's ring was full, so that earlier calls are gone."""
    world: int | None = None
    taken: int | None = None
    """When it was taken, nanoseconds since 1970."""
    started: int | None = None
    """When the process group was made."""
    reason: str = ""
    """Why it was taken: a silence, or the exception that ended the rank."""
    failed: bool = False
    """True if the rank had left its program by an exception."""
    finished: bool = False
    """True if the rank had come to its end."""
    stack: tuple[Frame, ...] = ()
    """The main thread's stack, innermost first."""

    @property
    def stands(self) -> Frame | None:
        """The program's own line at which the main thread stood."""
        return next((frame for frame in self.stack if frame.own), self.stack[0] if self.stack else None)


def conflict(one: RankCall, other: RankCall) -> str | None:
    """In what two calls of one number in one group contradict each other: `op`, `dtype`, `shape` or nothing.

    Only what every backend needs to be equal counts: elements, not the shape's form; nothing of all-to-all's sizes;
    for scatter the outputs, since only the root has inputs; where ranks gather unequal parts, all outputs.
    """
    if one.op != other.op:
        return "op"
    if one.op in _OUTPUT_COUNTS or not (one.shapes and other.shapes):
        sides = ((call.outputs, call.output_dtypes) for call in (one, other))
    else:
        sides = ((call.shapes, call.dtypes) for call in (one, other))
    (shapes, dtypes), (other_shapes, other_dtypes) = sides
    if not shapes or not other_shapes:
        return None
    if set(dtypes) != set(other_dtypes):
        return "dtype"
    if one.op in _UNEQUAL or _elements(shapes) == _elements(other_shapes):
        return None
    if one.op.startswith("all_gather") and one.outputs and one.outputs == other.outputs:
        return None
    return "shape"


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)
