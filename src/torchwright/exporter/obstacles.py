# pyright: basic
"""Why a model cannot be exported: the line of its own source, and the change that would help."""

from __future__ import annotations

import linecache
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from torchwright.core.errors import RefusedTechnique, TorchwrightError
from torchwright.optimization.profile.breaks import FRAME, find_breaks, is_users
from torchwright.optimization.profile.causes import cause_of
from torchwright.workloads.base import Case

OWN = Path(__file__).parents[1]


@dataclass(frozen=True)
class Obstacle:
    """Constructs that block an export but not torch.compile, which breaks the graph there and goes on."""

    name: str
    torch_says: str
    line_says: str
    cure: str


OBSTACLES = (
    Obstacle(
        "data-dependent branch",
        "data-dependent",
        r"^(if|elif|while|assert)\b|\bif\b.+\belse\b",
        "compute both sides and choose by torch.where, or use torch.cond(condition, one, other, (x,)), the condition "
        "a tensor; a test of inputs belongs outside of forward",
    ),
    Obstacle(
        "size that has no bounds",
        "data-dependent",
        r"\.item\(|\.tolist\(|\bint\(",
        "take it from a tensor of whole numbers, n = t.long().item() without int() around it, and bound it: "
        "torch._check(n >= 0), torch._check(n <= MOST); or keep the size and mask the values",
    ),
)


class ChangesState(RefusedTechnique):
    """Refused for what the model changes besides giving answers, at a line that is named already."""


def explained(model: nn.Module, case: Case, error: RefusedTechnique) -> RefusedTechnique:
    """`error` of torch.export with the line that it is about, where one can be found."""
    place = _broken(model, case, error.found or "") or _raised(error)
    if place is None:
        return error
    where, cure = place
    return RefusedTechnique(error.summary, found=f"{where}; {error.found}", next=cure)


def _broken(model: nn.Module, case: Case, said: str) -> tuple[str, str] | None:
    """The first line at which torch.compile breaks off: there torch.export does, too."""
    try:
        found = find_breaks(model, lambda made: lambda one: made(*one.args, **one.kwargs), [case]).found
    except TorchwrightError:
        return None
    if not found:
        return None
    first = found[0]
    name, cure = _cured(said, first.text) or (first.cause, first.cure)
    return f"{first.file}, line {first.line}: `{first.text}` ({name})", cure


def _cured(said: str, line: str) -> tuple[str, str] | None:
    """The name of an obstacle and what helps, by what torch.export says and by the line."""
    for one in OBSTACLES:
        if re.search(one.torch_says, said) and re.search(one.line_says, line.strip()):
            return one.name, one.cure
    return None


def changing(program: ExportedProgram) -> ChangesState:
    """The refusal of a model that changes its inputs or buffers, with the line that does."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            frames = FRAME.findall(node.meta.get("stack_trace") or "")
            if mine := [frame for frame in frames if is_users(frame[0])]:
                file, line = mine[-1][:2]
                text = linecache.getline(file, int(line)).strip()
                return _changes(f"{file}, line {line}: `{text}` changes an input or a buffer in place")
    return _changes("a model that changes its inputs or buffers in place")


def _changes(found: str) -> ChangesState:
    return ChangesState(
        "a converted graph gives answers and changes nothing",
        found=found,
        next="hand the state in and give the new one back: forward(x, state) → (y, state)",
    )


def _raised(error: BaseException) -> tuple[str, str] | None:
    """The user's innermost line of the error's own stack."""
    cause: Any = error.__cause__
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    for frame in reversed(frames):
        if is_users(frame.filename) and not Path(frame.filename).is_relative_to(OWN):
            text = frame.line or ""
            cause_here = cause_of(str(cause), text)
            name, cure = _cured(str(cause), text) or (cause_here.name, cause_here.cure)
            return f"{frame.filename}, line {frame.lineno}: `{text}` ({name})", cure
    return None
