"""The report of a NumPy function's check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class ProgramRefused(Exception):
    """Why compiled code may not serve; its text goes to the report."""


@dataclass(frozen=True, kw_only=True)
class NumpyReport:
    """The result of checking one kind of call. ``str(report)`` is a paragraph for people."""

    function: str
    status: Literal["unmeasured", "compiled", "original"]
    """Which function serves calls of this kind."""
    reason: str
    signature: str = ""
    speedup: float | None = None
    """Median over at least three rounds of time of the original / time of the best candidate, also when it lost; None
    where there were fewer. See ``busy``."""
    speedup_interval: tuple[float, float] | None = None
    """95% interval of ``speedup``."""
    busy: bool = False
    """Others ran while it was timed: ``speedup`` is the low end of its interval."""
    numpy_ms: float | None = None
    compiled_ms: float | None = None
    rounds: int = 0
    threads: int | None = None
    """Threads of the best compiled candidate."""
    float64_default: bool = False
    """True if it had to be traced with float64 as torch's default dtype to agree (int / int, say)."""
    compile_seconds: float = 0.0
    graphs: int = 0
    graph_breaks: int = 0
    break_reasons: tuple[str, ...] = ()
    dtype_differences: tuple[str, ...] = ()
    """Results with another dtype than NumPy's: such a candidate never serves."""
    max_relative_error: float | None = None
    """Largest |compiled - NumPy| over the largest |NumPy| of the same result."""
    edge_differences: tuple[str, ...] = ()
    """Differences from NumPy on values that the first call did not hold: NumPy serves."""
    candidates: tuple[str, ...] = ()
    rechecks: int = 0
    """Guard misses after the first call, each compared with NumPy before it was allowed to serve."""

    def __str__(self) -> str:
        lines = [f"{self.function}{self.signature}: {self.status} serves: {self.reason}"]
        if self.speedup is not None and self.speedup_interval is not None:
            lines.append(
                "  speed-up {:.2f}x [{:.2f}, {:.2f}]: ".format(self.speedup, *self.speedup_interval)
                + f"NumPy {self.numpy_ms:.3f} ms, compiled"
                f" {self.compiled_ms:.3f} ms on {self.threads} thread(s), {self.rounds} paired round(s)"
                + (", measured on a busy machine" if self.busy else "")
            )
        elif self.compiled_ms is not None:
            lines.append(f"  one run each: NumPy {self.numpy_ms:.3f} ms, compiled {self.compiled_ms:.3f} ms")
        if self.compile_seconds:
            lines.append(
                f"  compiled in {self.compile_seconds:.1f} s; {self.graphs} graph(s),"
                f" {self.graph_breaks} graph break(s), {self.rechecks} recheck(s)"
            )
        lines += [f"  break: {text}" for text in self.break_reasons]
        lines += [f"  dtype: {text}" for text in self.dtype_differences]
        if self.max_relative_error is not None:
            lines.append(f"  largest relative error {self.max_relative_error:.1e}")
        lines += [f"  edge values: {text}" for text in self.edge_differences]
        lines += [f"  candidate: {text}" for text in self.candidates]
        return "\n".join(lines)


def first_line(error: object) -> str:
    """The first line of an error's text, or the error's name where it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
