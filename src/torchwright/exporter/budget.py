# pyright: basic
"""The most exact of a target's precisions that fits a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchwright.core.errors import RefusedTechnique


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits on the package's bytes and on the memory that opening and running it adds to a process; None means no
    limit.
    """

    size: int | None = None
    memory: int | None = None

    def __bool__(self) -> bool:
        return self.size is not None or self.memory is not None

    def excess(self, report: Mapping[str, Any]) -> str | None:
        """Return which limit a verified package exceeds, or None if it holds and fits."""
        if report["verdict"] != "holds":
            return f"off by {report['largest_error']:.2g}" if report["largest_error"] else "does not run"
        if self.memory is not None and report["memory_bytes"] > self.memory:
            return f"{report['memory_bytes']:,} bytes in memory"
        return self.too_large(report["size_bytes"])

    def too_large(self, size: int) -> str | None:
        """The same of a package that is only written: what is too large is not verified."""
        return f"{size:,} bytes large" if self.size is not None and size > self.size else None

    def choose(self, reports: Mapping[str, Mapping[str, Any] | str]) -> str:
        """Return the precision of least error that fits; a string in place of a report gives the reason for its
        absence.

        Raises `RefusedTechnique`, with what each lacks, where none fits.
        """
        lacks = {
            precision: report if isinstance(report, str) else self.excess(report)
            for precision, report in reports.items()
        }
        fitting = {name: report for name, report in reports.items() if lacks[name] is None}
        if not fitting:
            raise RefusedTechnique(
                "no precision fits",
                found="; ".join(f"{name}: {why}" for name, why in lacks.items()),
                allowed=str(self),
                next="raise the bound, or take a smaller model",
            )
        return min(fitting, key=lambda name: fitting[name]["largest_error"])  # type: ignore[index]

    def __str__(self) -> str:
        said = ((self.size, "of the package"), (self.memory, "of memory"))
        return ", ".join(f"{bound:,} bytes {what}" for bound, what in said if bound is not None)
