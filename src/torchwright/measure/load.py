"""The machine's load: how many threads want a core now, and how many cores this process may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchwright.devices.cpu import usable_cores


@dataclass(frozen=True, kw_only=True)
class Load:
    """Threads that run or wait for a core, on the cores that this process may use."""

    running: int
    cores: int

    @classmethod
    def now(cls) -> Load:
        """Read the kernel's count (/proc/loadavg), less the thread that reads; without one nothing else runs."""
        try:
            counts = Path("/proc/loadavg").read_text().split()[3]
            running = int(counts.partition("/")[0]) - 1
        except (OSError, IndexError, ValueError):
            running = 0
        return cls(running=max(running, 0), cores=usable_cores())

    @property
    def slowdown(self) -> float:
        """Factor by which a thread takes longer than on a core of its own: cores are shared fairly."""
        return max(1.0, self.running / self.cores)

    @property
    def busy(self) -> bool:
        """Check whether a thread has half of a core at most."""
        return self.slowdown >= 2.0

    def __str__(self) -> str:
        return f"load {self.running} on {self.cores} core{'s' * (self.cores != 1)}"
