"""The one error tree: what was asked, what was found, what is allowed, and what to type next.

TorchwrightError                 a user can mend it: one paragraph, exit code 2, never a traceback
├── UnknownName                  a technique, option, workload or field that does not exist (with did-you-mean)
├── ModelError                   the model cannot be read, built or run as the user has it
├── WorkloadError                inputs, metric or text that cannot be used
├── DataError                    data for training or batch inference that is missing or damaged
├── RefusedTechnique             asked for by name, but it cannot run here
├── ArtifactError                missing, damaged, newer, or foreign artifact
├── TechniqueFailed              asked for by name, and could not be measured (exit code 1)
├── RegressionFound              `verify` measured less than the recipe promises (exit code 1)
└── Inconclusive                 `verify` cannot say: the machine is busy with other things (exit code 3)
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

from torchwright.core.escapes import escaped

MOST_OF_VALUE = 500
"""Characters of a user's value, or of another library's message, in an error: a screen of a terminal holds more."""
MOST_OF_CHOICES = 2000
"""Characters of what is allowed: names of ours, or the calls that a model was compiled for."""
ITEMS = 6
"""Items of a list, a dict or a set that `shown` writes."""


class TorchwrightError(Exception):
    """A fault that the user can mend.

    `summary` says what was asked and why it failed; `found`, `allowed` and `next` are optional clauses that
    `str()` joins into one paragraph, without characters that a terminal acts on. `summary` and `found` are cut at
    `MOST_OF_VALUE` characters. `facts` is what was measured all the same: `--json` prints it with the error.
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
        summary = abbreviated(escaped(summary))
        found, allowed, next = (text and escaped(text) for text in (found, allowed, next))
        found, allowed = found and abbreviated(found), allowed and abbreviated(allowed, MOST_OF_CHOICES)
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
        """Return the failure and the finding as one clause, for the row of a refused step."""
        return f"{self.summary}: {self.found}" if self.found else self.summary

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross between our own processes; keyword arguments need their own way through pickle.
        return _rebuild, (type(self), self.summary, self.found, self.allowed, self.next, self.facts)


class UnknownName(TorchwrightError):
    """A name that no registry, option list or schema knows."""


class ModelError(TorchwrightError):
    """The model cannot be read, built or run as the user has it."""


class WorkloadError(TorchwrightError):
    """Inputs, metric or evaluation text that cannot be used."""


class DataError(TorchwrightError):
    """Data for training or batch inference that is missing, damaged, or not what the model reads."""


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


class TrainingMode(UserWarning):
    """A model given in training mode: its `eval()` copy was optimized or exported, which may answer differently."""


class SlowerCall(UserWarning):
    """An optimized model was called in a way that nothing was compiled for, and answered by a slower one."""


class OldArtifact(UserWarning):
    """An artifact has a fault of the version that made it, which optimizing again mends."""


class StandIn(UserWarning):
    """A result of a class that this process has not imported came as a stand-in with the same fields."""


class _Short(reprlib.Repr):
    """`repr` of which no part is long; a tensor or an array is its type, dtype and shape."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = most
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = ITEMS

    def repr1(self, x: Any, level: int) -> str:
        dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
        if isinstance(x, type) or dtype is None or shape is None:
            return super().repr1(x, level)
        return f"{type(x).__name__} {str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"

    def repr_instance(self, x: Any, level: int) -> str:
        """Write a dataclass instance or a named tuple by its fields, each as short as any value."""
        cls: type[Any] = x.__class__
        names = [str(name) for name in getattr(cls, "__dataclass_fields__", getattr(cls, "_fields", ()))]
        if not names:
            return super().repr_instance(x, level)
        if level <= 0:
            return f"{cls.__name__}(…)"
        parts = [f"{name}={self.repr1(getattr(x, name, None), level - 1)}" for name in names[:ITEMS]]
        return f"{cls.__name__}({', '.join(parts)}{', …' if len(names) > ITEMS else ''})"


def shown(value: Any, most: int = MOST_OF_VALUE) -> str:
    """Return the `repr` of a user's value for a message, at most so many characters; large values are not walked."""
    return abbreviated(_Short(most).repr(value), most)


def abbreviated(text: str, most: int = MOST_OF_VALUE) -> str:
    """Return a text as it is, or its beginning and how long it is."""
    if len(text) <= most:
        return text
    tail = f"… ({len(text):,} characters)"
    return text[: max(0, most - len(tail))] + tail if most > 2 * len(tail) else text[: most - 1] + "…"


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
