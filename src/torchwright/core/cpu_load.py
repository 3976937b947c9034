"""CPU cores this process may use, and other programs that want them: affinity, cgroup quota, run queue."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

PROC, CGROUPS, CPUS = Path("/proc"), Path("/sys/fs/cgroup"), Path("/sys/devices/system/cpu")

QUIET = "TORCHWRIGHT_ASSUME_QUIET"
"""Environment variable: 1 takes the machine as quiet whatever else runs. Tests set it: they run next to each other."""
BUSY_SHARE = 0.4
"""Runnable threads of other programs per core from which on the machine is busy. One busy neighbour on two cores is
0.5 and halves the speed of a parallel region; samples of the run queue vary by about 0.1."""
SAMPLES, APART_SECONDS = 10, 0.01
"""Readings of the run queue, and the time between two: it is a momentary value."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Threads of other programs that want to run, and the cores that this process may use."""

    running: float
    """Runnable threads of processes that are neither this one nor its descendants, and cores that a hypervisor gave to
    other machines."""
    cores: int
    """Physical cores within the CPU affinity of this process."""
    quota: float | None = None
    """Cores' worth of time that the tightest cgroup grants, where one sets a limit."""

    @classmethod
    def now(cls, proc: Path = PROC, cgroups: Path = CGROUPS) -> Load:
        """Read the run queue once: a momentary value, for limits and messages."""
        running = 0.0 if assumed_quiet() else _running(proc)
        return cls(running=running, cores=physical_cores(affinity()), quota=cpu_quota(proc, cgroups))

    @classmethod
    def sampled(
        cls, proc: Path = PROC, cgroups: Path = CGROUPS, sleep: Callable[[float], object] = time.sleep
    ) -> Load:
        """Read the run queue ten times in 0.1 s, for decisions."""
        if assumed_quiet():
            return cls.now(proc, cgroups)
        begun, stolen, loads = time.perf_counter(), stolen_seconds(proc), [cls.now(proc, cgroups)]
        while len(loads) < SAMPLES:
            sleep(APART_SECONDS)
            loads.append(cls.now(proc, cgroups))
        gone = stolen_seconds(proc)
        seconds = sum(value - stolen.get(name, value) for name, value in gone.items())
        running = statistics.mean(load.running for load in loads) + seconds / (time.perf_counter() - begun)
        return replace(loads[-1], running=running)

    @property
    def threads(self) -> int:
        """Threads that can run at the same time on a quiet machine."""
        return whole_cores(self.cores, self.quota)

    @property
    def busy(self) -> bool:
        """Check whether timings of parallel code are disturbed by other programs."""
        return self.running >= BUSY_SHARE * self.cores

    @property
    def crowded(self) -> bool:
        """Check whether others want every core: also turns that wait for none share caches and memory with them."""
        return self.running >= self.cores

    @property
    def trouble(self) -> str | None:
        """The load in words where the machine is busy: "machine busy (load 20 on 2 cores)"."""
        return f"machine busy ({self})" if self.busy else None

    @property
    def slowdown(self) -> float:
        """Factor by which a thread takes longer than on a core of its own: cores are shared fairly."""
        throttled = 1.0 if self.quota is None else 1 / self.quota
        return max(1.0, (self.running + 1) / self.cores, throttled)

    def __str__(self) -> str:
        """For example "load 20 on 2 cores"."""
        text = f"load {self.running:.2g} on {self.cores} core{'s' if self.cores > 1 else ''}"
        return text if self.quota is None else f"{text}, CPU quota {self.quota:g}"


def assumed_quiet() -> bool:
    """Check whether the user says that nothing else runs here (`TORCHWRIGHT_ASSUME_QUIET=1`)."""
    return os.environ.get(QUIET) == "1"


def usable_cores() -> int:
    """Physical cores this process may use: within its CPU affinity, and no more than its cgroup's quota."""
    return whole_cores(physical_cores(affinity()), cpu_quota())


def whole_cores(cores: int, quota: float | None) -> int:
    """Cores that a quota leaves, as a number of threads: at least one."""
    return max(1, cores if quota is None else min(cores, int(quota)))


def physical_cores(logical: Iterable[int], cpus: Path = CPUS) -> int:
    """Physical cores of logical CPUs: two threads of one core share its arithmetic."""
    return len({_core_of(cpu, cpus) for cpu in logical})


def affinity() -> list[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """CPUs that the tightest cgroup around this process grants, or None."""
    limits = [text.partition(" ")[::2] for text in cgroup_texts("", "cpu.max", proc, cgroups)]
    quotas = cgroup_texts("cpu", "cpu.cfs_quota_us", proc, cgroups)
    limits += zip(quotas, cgroup_texts("cpu", "cpu.cfs_period_us", proc, cgroups), strict=False)
    return min(
        (int(quota) / int(period) for quota, period in limits if quota.isdigit() and period.isdigit()),
        default=None,
    )


def cgroup_texts(controller: str, file: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[str]:
    """Return `file` of every cgroup around this process, innermost first. `controller` is empty for cgroup v2."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    texts = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        root = cgroups / controller
        group = root / path.lstrip("/")
        # In a container the path is the host's and only the root is mounted; the loop ends there either way.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            with contextlib.suppress(OSError):
                texts.append((folder / file).read_text(encoding="utf-8").strip())
    return texts


def _core_of(cpu: int, cpus: Path) -> tuple[str, str]:
    """(package, core) of a logical CPU; the CPU's number where the kernel does not tell."""
    folder = cpus / f"cpu{cpu}/topology"
    try:
        return (folder / "physical_package_id").read_text(encoding="utf-8").strip(), (
            folder / "core_id"
        ).read_text(encoding="utf-8").strip()
    except OSError:
        return "cpu", str(cpu)


def _running(proc: Path) -> float:
    """Runnable threads of other programs, shared evenly over the machine's CPUs.

    Only Linux has a run queue to read: elsewhere the load average stands in.
    """
    try:
        lines = [line.split() for line in (proc / "stat").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return _load_average()
    counts = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    machine = sum(name.startswith("cpu") and name != "cpu" for name in counts)
    running = counts.get("procs_running", 0) - _own_running(proc)
    return max(0.0, running * min(1.0, len(affinity()) / max(1, machine)))


def _own_running(proc: Path) -> int:
    """Runnable threads of this process and its descendants."""
    running, pids = 0, ["self"]
    for pid in pids:
        for thread in (proc / pid / "task").glob("*"):
            with contextlib.suppress(OSError, IndexError):  # the thread has ended
                pids += (thread / "children").read_text(encoding="utf-8").split()
                running += (thread / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "R"
    return running


def stolen_seconds(proc: Path = PROC) -> dict[str, float]:
    """Seconds that each CPU of this machine was ready and the hypervisor ran others (`steal`)."""
    try:
        lines = (proc / "stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines if line.startswith("cpu")]
    return {
        name: int(counts[7]) / os.sysconf("SC_CLK_TCK") for name, *counts in fields[1:] if len(counts) > 7
    }


def _load_average() -> float:
    """The load average of one minute without this thread; 0 on Windows, which keeps none."""
    return max(0.0, os.getloadavg()[0] - 1) if hasattr(os, "getloadavg") else 0.0
