# pyright: basic
"""Why a model cannot be exported: the line of its own source, and the change that would help."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from torch import nn

from torchwright.errors import RefusedTechnique, TorchwrightError
from torchwright.profile.breaks import find_breaks, is_users
from torchwright.profile.causes import cause_of
from torchwright.workloads.base import Case

OWN = Path(__file__).parents[1]


def explained(model: nn.Module, case: Case, error: RefusedTechnique) -> RefusedTechnique:
    """`error` of torch.export with the line that it is about, where one can be found."""
    place = _broken(model, case) or _raised(error)
    if place is None:
        return error
    where, cure = place
    return RefusedTechnique(error.summary, found=f"{where}; {error.found}", next=cure)


def _broken(model: nn.Module, case: Case) -> tuple[str, str] | None:
    """The first line at which torch.compile breaks off: there torch.export does, too."""
    try:
        found = find_breaks(model, lambda made: lambda one: made(*one.args, **one.kwargs), [case]).found
    except TorchwrightError:
        return None
    if not found:
        return None
    first = found[0]
    return f"{first.file}, line {first.line}: `{first.text}` ({first.cause})", first.cure


def _raised(error: BaseException) -> tuple[str, str] | None:
    """The user's innermost line of the error's own stack."""
    cause: Any = error.__cause__
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    for frame in reversed(frames):
        if is_users(frame.filename) and not Path(frame.filename).is_relative_to(OWN):
            cured = cause_of(str(cause), frame.line or "")
            return f"{frame.filename}, line {frame.lineno}: `{frame.line}` ({cured.name})", cured.cure
    return None
