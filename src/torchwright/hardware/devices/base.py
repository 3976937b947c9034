"""The device contract, and the file in which measured ceilings are kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from torchwright.core.paths import cache_folder
from torchwright.core.process.files import replacing
from torchwright.core.records import DeviceFacts

log = logging.getLogger(__name__)

CEILINGS_FORMAT = 2
DISTURBED_SECONDS = 60.0
"""Age of disturbed figures at which they are measured again, once the machine is quiet."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """A device's ceilings, as measured here: 1e9 bytes per second, 1e12 operations per second."""

    read_gb_per_s: float | None = None
    """None: not measured."""
    tflops: dict[str, float] = field(default_factory=dict)
    """Matrix-multiply rate per dtype name; a multiply and an add are two operations. No entry: it cannot."""
    disturbed: str | None = None
    """Reason for lower bounds, or for no figures, such as "machine busy (load 20 on 2 cores)"."""


class Device(ABC):
    """One kind of device. Constructing it touches nothing; `facts` measures once per machine and torch version.

    A package of its own adds one by an entry point of the group `torchwright.devices`. Everything that depends on the
    device asks its class: which is taken by default, what the command line offers, how trials are started, what can be
    compiled. Our kernels run on the types of torch that they are compiled for, and plain PyTorch elsewhere.
    """

    name: ClassVar[str]
    """Under which it is registered, and which torch.device knows."""
    preference: ClassVar[int] = 1
    """The device of the highest is taken where nobody names one; one below 0 is only taken by its name."""
    forks: ClassVar[bool] = False
    """Check whether a process that has used it may be forked; the driver of a card does not survive that."""
    uncompiled: ClassVar[str | None] = None
    """Why torch.compile makes no code for it, or None."""
    remedy: ClassVar[str | None] = None
    """The command that would make an unavailable device available."""

    @classmethod
    @abstractmethod
    def unavailable(cls) -> str | None:
        """Why this machine cannot use the device, or None."""

    @classmethod  # noqa: B027
    def start(cls) -> None:
        """Prepare a process for tensors on the device, such as by importing a backend; may be called again."""

    @abstractmethod
    def identify(self) -> DeviceFacts:
        """Describe the device without measuring anything: the ceilings are left out."""

    @abstractmethod
    def measure(self) -> Ceilings:
        """Measure the ceilings in at most three seconds. A fast one of several runs counts."""

    def disturbance(self) -> str | None:
        """Return why rates measured now would be too low, or None."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was started on the device is done."""

    @abstractmethod
    def reset_peak_memory(self) -> bool:
        """Start the peak afresh. False: the counter cannot be reset and covers the whole life of the process."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """The most memory held since the last reset: resident for the CPU, reserved from the driver for CUDA."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Return the memory that this process can still allocate on the device."""

    def facts(self, *, refresh: bool = False) -> DeviceFacts:
        """Describe the device and its ceilings: `identify` with `ceilings`.

        Disturbed ceilings are left out, as if they had not been measured, because they are not limits.
        """
        ceilings = self.ceilings(refresh=refresh)
        if ceilings.disturbed:
            return self.identify()
        return dataclasses.replace(
            self.identify(), read_gb_per_s=ceilings.read_gb_per_s, tflops=dict(ceilings.tflops)
        )

    def ceilings(self, *, refresh: bool = False) -> Ceilings:
        """Return the measured ceilings, cached in `cache_folder()` per machine, thread count and torch version.

        On a busy machine nothing is measured, unless `refresh` asks for it. Disturbed ceilings are measured again when
        the machine is quiet, and never replace undisturbed ones.
        """
        path = _file(self.identity())
        kept = _read(path)
        if not refresh:
            if kept is not None and kept.disturbed is None:
                return kept
            if busy := self.disturbance():
                return dataclasses.replace(kept or Ceilings(), disturbed=busy)
            if kept is not None and 0 <= time.time() - path.stat().st_mtime < DISTURBED_SECONDS:
                return kept
        measured = self.measure()
        if measured.disturbed is None or kept is None or kept.disturbed:
            self.keep(measured)
        return measured

    def keep(self, ceilings: Ceilings) -> None:
        """Cache ceilings, such as those of an equal machine, as if they had been measured here."""
        identity = self.identity()
        _write(_file(identity), identity, ceilings)

    def identity(self) -> dict[str, object]:
        """Return everything that decides the ceilings, as plain data: they are measured again when any part changes."""
        return {
            "format": CEILINGS_FORMAT,
            "device": dataclasses.asdict(self.identify()),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


def fast_seconds(
    call: Callable[[], object], *, budget: float, synchronize: Callable[[], None], runs: int = 8
) -> float:
    """Return the lower quartile of `timed_runs`.

    Other tenants make runs slower, and a clock that jumps makes a single one too fast.
    """
    seconds = timed_runs(call, budget=budget, synchronize=synchronize, runs=runs)
    return seconds[len(seconds) // 4]


def timed_runs(
    call: Callable[[], object], *, budget: float, synchronize: Callable[[], None], runs: int = 8
) -> list[float]:
    """Seconds of runs, fastest first: one to warm up, then up to `runs` of them while `budget` (seconds) lasts."""
    started = time.perf_counter()
    call()
    synchronize()
    seconds: list[float] = []
    for _ in range(runs):
        before = time.perf_counter()
        call()
        synchronize()
        now = time.perf_counter()
        seconds.append(now - before)
        if now - started + seconds[-1] > budget:
            break
    return sorted(seconds)


def _file(identity: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "ceilings" / f"{digest}.json"


def _read(path: Path) -> Ceilings | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["ceilings"]
        tflops = {str(dtype): float(rate) for dtype, rate in found["tflops"].items()}
        disturbed = None if found["disturbed"] is None else str(found["disturbed"])
        return Ceilings(read_gb_per_s=float(found["read_gb_per_s"]), tflops=tflops, disturbed=disturbed)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("measuring the ceilings again: %s cannot be read (%s)", path, error)
        return None


def _write(path: Path, identity: dict[str, object], ceilings: Ceilings) -> None:
    """Write to a temporary file and rename, so that another process reads the whole file or nothing."""
    text = json.dumps({"measured_on": identity, "ceilings": dataclasses.asdict(ceilings)}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        log.warning("the measured ceilings cannot be kept in %s: %s", path.parent, error)
