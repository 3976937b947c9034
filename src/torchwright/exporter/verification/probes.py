# pyright: basic
"""Probes: numbers that the example does not hold, and where an export answers them otherwise than PyTorch.

An export cannot check its calls as an artifact does. So the verifier says for which numbers it holds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram

from torchwright.optimization.engines.dispatch.integer_ranges import IntegerRanges

SECONDS = 10.0
"""No further probe begins after this long: a verification takes seconds, not minutes."""
PATIENCE = 30.0
"""A probe that takes longer counts as a crash."""
WIDE = 2**32 + 3
"""Needs more than 32 bits, and would pass for 3 in them."""
LARGEST = 2**31 - 1
"""An index that is out of range in any table of which the size is not known."""
TABLES = 4
"""Sizes of tables past which an input of indices is probed."""
SUBNORMAL = "subnormal numbers"
ROW_OF_ZEROS = "a row of zeros"
"""Divided by its own norm it makes NaN inside, which a later operator may drop: only NaN and infinity are compared."""
ALL = "every number that was probed"
UNKNOWN = "other numbers"
ZERO_ROWS = "zero rows"
Value = float | int | str
"""A number, `SUBNORMAL` or `ROW_OF_ZEROS`."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One value in one input of the example's call."""

    tensor: int
    """Its index among the call's tensors."""
    name: str
    """The input's name in the graph."""
    value: Value

    def applied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the example's tensors with the value in every other place of one input's first row."""
        changed = [tensor.clone() for tensor in tensors]
        tensor = changed[self.tensor]
        if self.value == ROW_OF_ZEROS:
            tensor[:1] = 0
        elif isinstance(self.value, str):
            tiny = torch.finfo(tensor.dtype).tiny
            changed[self.tensor] = tensor / tensor.abs().max().clamp_min(tiny) * (tiny / 4)
        else:
            places = torch.zeros(tensor.shape, dtype=torch.bool)
            row = tensor.numel() // tensor.shape[0] if tensor.dim() > 1 else tensor.numel()
            places.view(-1)[:row:2] = True
            tensor.masked_fill_(places, self.value)
        return changed


@dataclass(frozen=True, kw_only=True)
class ProbeOutputs:
    """The outputs of a probe, an error in their place, or a crash."""

    outputs: list[torch.Tensor] | None = None
    refused: str = ""
    crashed: str = ""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Numbers for which an export does not answer as PyTorch does."""

    value: Value
    names: tuple[str, ...]
    raises: bool
    """PyTorch raises an error there."""
    what: str

    def __str__(self) -> str:
        where = f" in {', '.join(self.names)}" if self.names else ""
        return f"for {self.value}{where} {self.what}"


def probes_of(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> list[Probe]:
    """Return the probes of a graph's inputs, sorted by value, so that each input has some where time ends early.

    Values that an input of the example holds already are not probed: the example's own answer is compared.
    """
    ranges = IntegerRanges(program)
    names = [str(node.name) for node in ranges.inputs]
    found: list[Probe] = []
    for index, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        if not tensor.numel():
            continue
        if tensor.is_floating_point():
            zeros = (tensor == 0).flatten(1).all(1) if tensor.dim() > 1 else tensor == 0
            own = {
                math.nan: tensor.isnan(),
                math.inf: tensor == math.inf,
                -math.inf: tensor == -math.inf,
                SUBNORMAL: (tensor != 0) & (tensor.abs() < torch.finfo(tensor.dtype).tiny),
                ROW_OF_ZEROS: zeros if tensor.dim() else torch.tensor(True),
            }
            values: list[Value] = [value for value, holds in own.items() if not bool(holds.any())]
        elif tensor.dtype != torch.bool and not tensor.is_complex():
            ends = sorted(set(ranges.tables(ranges.inputs[index])))[:TABLES] or [LARGEST]
            info, least, most = torch.iinfo(tensor.dtype), int(tensor.min()), int(tensor.max())
            values = [
                value
                for value in (-1, *ends, WIDE)
                if info.min <= value <= info.max and not least <= value <= most
            ]
        else:
            continue
        found += [Probe(tensor=index, name=name, value=value) for value in values]
    order = {value: place for place, value in enumerate(dict.fromkeys(str(probe.value) for probe in found))}
    return sorted(found, key=lambda probe: order[str(probe.value)])


def limits_of(
    probes: Sequence[Probe],
    eager: Callable[[Probe], ProbeOutputs],
    exported: Callable[[Probe], ProbeOutputs],
    allowed: float,
    seconds: float = SECONDS,
) -> list[Limit]:
    """Ask both for every probe, until `seconds` are over, and return where they part: one limit for a value."""
    begun = time.monotonic()
    found: dict[str, Limit] = {}
    for count, probe in enumerate(probes):
        if time.monotonic() - begun > seconds:
            left = ", ".join(f"{one.value} in {one.name}" for one in probes[count:])
            return [*found.values(), unknown(f"a call takes long; not probed: {left}")]
        wanted = eager(probe)
        near = sys.float_info.max if probe.value == ROW_OF_ZEROS else allowed
        limit = limit_at(probe.value, (probe.name,), wanted, exported(probe), near)
        if limit is None:
            continue
        key = f"{probe.value}{limit.raises}"
        known = found.get(key)
        found[key] = replace(known, names=(*known.names, probe.name)) if known else limit
    return list(found.values())


def limit_at(
    value: Value, names: tuple[str, ...], wanted: ProbeOutputs, found: ProbeOutputs, allowed: float
) -> Limit | None:
    """Compare two answers; None where they agree, or where both are errors."""
    raises = wanted.outputs is None
    if wanted.crashed:
        what = ""  # PyTorch has no answer, either
    elif found.crashed:
        what = f"it {found.crashed}" + (f", where PyTorch raises {_kind(wanted.refused)}" if raises else "")
    elif raises:
        what = (
            "" if found.outputs is None else f"PyTorch raises {_kind(wanted.refused)}, and the export answers"
        )
    elif found.outputs is None:
        what = f"it refuses: {found.refused}"
    else:
        what = parting(wanted.outputs or [], found.outputs, allowed)
        what = what and f"it differs: {what}"
    return Limit(value=value, names=names, raises=raises, what=what) if what else None


def parting(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor], allowed: float) -> str:
    """The first number in which outputs part, such as "eager nan, exported -0.017"; "" where they agree."""
    shapes = [[list(tensor.shape) for tensor in side] for side in (wanted, found)]
    if shapes[0] != shapes[1]:
        return f"eager shapes {shapes[0]}, exported {shapes[1]}"
    for before, after in zip(wanted, found, strict=True):
        if before.is_complex():
            before, after = torch.view_as_real(before), torch.view_as_real(after)
        place = _first_wrong(before.flatten(), after.flatten(), allowed)
        if place is not None:
            return f"eager {_number(before, place)}, exported {_number(after, place)}"
    return ""


def unknown(why: str) -> Limit:
    """Return the limit that stands for probes which were not made."""
    return Limit(value=UNKNOWN, names=(), raises=False, what=f"nothing is known: {why}")


def holds_for(limits: Sequence[Limit]) -> str:
    """The inputs for which an export holds, in few words."""
    real = [limit.value for limit in limits if isinstance(limit.value, float)]
    nan, infinite = any(map(math.isnan, real)), any(map(math.isinf, real))
    whole = [limit for limit in limits if isinstance(limit.value, int)]
    said = {
        "finite inputs": nan and infinite,
        "inputs without NaN": nan and not infinite,
        "inputs without infinity": infinite and not nan,
        "no subnormal numbers": any(limit.value == SUBNORMAL for limit in limits),
        "no rows of zeros": any(limit.value == ROW_OF_ZEROS for limit in limits),
        "indices in range": any(limit.raises for limit in whole),
        "no negative integers": any(limit.value == -1 and not limit.raises for limit in whole),
        "integers of 32 bits": any(limit.value != -1 and not limit.raises for limit in whole),
        "at least one row": any(limit.value == ZERO_ROWS for limit in limits),
        "numbers like the example's": any(limit.value == UNKNOWN for limit in limits),
    }
    return ", ".join(text for text, true in said.items() if true) or ALL


def _first_wrong(before: torch.Tensor, after: torch.Tensor, allowed: float) -> int | None:
    """The place of the first number that is wrong; of finite numbers that are too far off together, the furthest."""
    if not before.is_floating_point():
        wrong = before != after
        return int(wrong.nonzero()[0]) if wrong.double().mean() > allowed else None
    before, after = before.double(), after.double()
    both = before.isfinite() & after.isfinite()
    wrong = ~both & ~((before == after) | (before.isnan() & after.isnan()))
    if wrong.any():
        return int(wrong.nonzero()[0])
    # Where a subnormal number counts as zero nothing is lost.
    off = torch.where(both, (after - before).abs(), 0.0)
    off = off.where(off > torch.finfo(torch.float32).tiny, 0.0)
    norm = float(torch.linalg.vector_norm(before.where(both, torch.zeros_like(before))))
    if float(torch.linalg.vector_norm(off)) <= allowed * norm:
        return None
    return int(off.argmax())


def _number(tensor: torch.Tensor, place: int) -> str:
    number: Any = tensor.flatten()[place].item()
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def _kind(error: str) -> str:
    """The error's type, of "IndexError: index out of range in self"."""
    return error.partition(":")[0]
