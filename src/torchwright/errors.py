"""The one error tree: what was asked, what was found, what is allowed, and what to type next.

TorchwrightError                 a user can mend it: one paragraph, exit code 2, never a traceback
├── UnknownName                  a technique, option, workload or field that does not exist (with did-you-mean)
├── ModelError                   the model cannot be read, built or run as the user has it
├── WorkloadError                inputs, metric or text that cannot be used
├── RefusedTechnique             asked for by name, but it cannot run here
├── ArtifactError                missing, damaged, newer, or foreign artifact
├── TechniqueFailed              asked for by name, and nothing was measured of it (exit code 1)
├── RegressionFound              `verify` measured less than the recipe promises (exit code 1)
└── Inconclusive                 `verify` cannot say: the machine is busy with other things (exit code 3)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class TorchwrightError(Exception):
    """A fault that the user can mend.

    `summary` says what was asked and why it failed; `found`, `allowed` and `next` are optional clauses that
    `str()` joins into one paragraph. `facts` is what was measured all the same: `--json` prints it with the error.
    """

    exit_code = 2

    def __init__(
        self,
        summary: str,
        *,
        found: str | None = None,
        allowed: str | None = None,
        next: str | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        summary = _written(summary)
        found, allowed, next = (text and _written(text) for text in (found, allowed, next))
        self.summary, self.found, self.allowed, self.next = summary, found, allowed, next
        self.facts = facts or {}
        parts = [_sentence(summary)]
        if found:
            parts.append(_sentence(f"Found: {found}"))
        if allowed:
            parts.append(_sentence(f"Allowed: {allowed}"))
        if next:
            parts.append(_sentence(f"Next: {next}"))
        super().__init__(" ".join(parts))

    @property
    def reason(self) -> str:
        """What failed and what was found, as one clause: the waterfall says it of a step that is refused."""
        return f"{self.summary}: {self.found}" if self.found else self.summary

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross between our own processes; keyword arguments need their own way through pickle.
        return _rebuild, (type(self), self.summary, self.found, self.allowed, self.next, self.facts)


def _written(text: str) -> str:
    """What a terminal and a log can take: of a name in a file there may be half a character (a lone surrogate)."""
    return text.encode(errors="backslashreplace").decode()


class UnknownName(TorchwrightError):
    """A name that no registry, option list or schema knows."""


class ModelError(TorchwrightError):
    """The model cannot be read, built or run as the user has it."""


class WorkloadError(TorchwrightError):
    """Inputs, metric or evaluation text that cannot be used."""


class RefusedTechnique(TorchwrightError):
    """A technique asked for by name that cannot run on this model or machine."""


class ArtifactError(TorchwrightError):
    """An artifact that is missing, damaged, newer than this version, or not trusted."""


class TechniqueFailed(TorchwrightError):
    """A technique asked for by name that crashed, or that the time budget left unmeasured."""

    exit_code = 1


class RegressionFound(TorchwrightError):
    """`verify` measured less than the recipe promises."""

    exit_code = 1


class Inconclusive(TorchwrightError):
    """`verify` measured an interval that neither keeps the promise nor breaks it."""

    exit_code = 3


class SlowerCall(UserWarning):
    """An optimized model was called in a way that nothing was compiled for, and answered by a slower one."""


def unknown(kind: str, name: str, known: Iterable[str], next: str | None = None) -> UnknownName:
    """The error for a name that is not in `known`, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return UnknownName(f"unknown {kind} '{name}'{hint}", allowed=", ".join(names) or "none", next=next)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?", ":")) else text + "."


def _rebuild(
    cls: type[TorchwrightError],
    summary: str,
    found: str | None,
    allowed: str | None,
    next: str | None,
    facts: dict[str, Any],
) -> TorchwrightError:
    return cls(summary, found=found, allowed=allowed, next=next, facts=facts)


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's text that says something; after a heading ("…:") the line below it, too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    heading = len(lines) > 1 and lines[0].endswith(":")
    return " ".join(lines[: 1 + heading])[:300] if lines else "no message"
