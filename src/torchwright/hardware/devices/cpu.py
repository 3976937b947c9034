"""The CPU: instruction sets, usable cores, measured ceilings, peak memory of the process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F

from torchwright.core import system
from torchwright.core.cpu_load import Load, assumed_quiet, cgroup_texts, usable_cores
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.base import Ceilings, Device, timed_runs

MIB = 1 << 20
CPUINFO = Path("/proc/cpuinfo")

# The kernel's names (/proc/cpuinfo: x86 `flags`, Arm `Features`) → the names that recipes and refusals use.
ISA = {
    "avx2": "avx2",
    "fma": "fma",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_tile": "amx_tile",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "asimd": "neon",
    "neon": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
    "sme": "sme",
}

# Arm's names of the above → the entry of the auxiliary vector and the bit (Linux' uapi/asm/hwcap.h).
AT_HWCAP, AT_HWCAP2 = 16, 26
ARM_BITS = {
    "asimd": (AT_HWCAP, 1),
    "asimdhp": (AT_HWCAP, 10),
    "asimddp": (AT_HWCAP, 20),
    "sve": (AT_HWCAP, 22),
    "sve2": (AT_HWCAP2, 1),
    "i8mm": (AT_HWCAP2, 13),
    "bf16": (AT_HWCAP2, 14),
    "sme": (AT_HWCAP2, 23),
}

# The layer whose rate is measured: the batch size grows until one call is long enough to time.
FEATURES_K, FEATURES_N = 2048, 4096
LONG_ENOUGH_SECONDS = 0.02

SPREAD = 2.0
"""Slow runs (upper quartile) against fast ones (lower quartile), from which on something else ran: 1.0 to 1.3 alone."""
UNDISTURBED_SHARE = 0.8
"""The least share of the processor time of all threads: measured 0.98 on an idle machine, 0.52 with one other busy
process.
"""


class CPU(Device):
    """The cores this process may use. `process` is the folder in which the kernel describes the process."""

    name = "cpu"
    preference = 0
    forks = True
    batch_sizes: ClassVar[tuple[int, ...]] = (16, 64, 256, 1024)
    """The batch sizes with which a linear layer is timed."""
    read_bytes: ClassVar[int] = 256 * MIB
    """Least size of the array whose reading is timed."""

    def __init__(self, process: Path = Path("/proc/self")) -> None:
        self.process = process

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def identify(self) -> DeviceFacts:
        return DeviceFacts(
            kind="cpu",
            name=_model_name(),
            isa=instruction_sets(),
            cores=usable_cores(),
            memory_bytes=usable_memory_bytes(),
            without=tuple(dtype for dtype in ("bfloat16", "float16") if not onednn_computes(dtype)),
        )

    def measure(self) -> Ceilings:
        started, cpu_started = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            bandwidth, matmuls = _read_bandwidth(self.read_bytes), _matmuls(self.batch_sizes)
        # Every thread computes or spins throughout, so less processor time than that is what others took.
        cores = (time.process_time() - cpu_started) / (time.perf_counter() - started)
        return Ceilings(
            read_gb_per_s=bandwidth.best / 1e9,
            tflops={dtype: rate.best / 1e12 for dtype, rate in matmuls.items()},
            disturbed=None
            if assumed_quiet()
            else _disturbed(
                cores, torch.get_num_threads(), max(rate.spread for rate in (bandwidth, *matmuls.values()))
            ),
        )

    def disturbance(self) -> str | None:
        return Load.sampled().trouble

    def synchronize(self) -> None:
        """Nothing to wait for: CPU operators return when they are done."""

    def reset_peak_memory(self) -> bool:
        try:
            # Resets VmHWM to what is resident now (man 5 proc).
            (self.process / "clear_refs").write_text("5", encoding="utf-8")
        except OSError:
            return False
        return self._high_water() is not None

    def peak_memory_bytes(self) -> int:
        high_water = self._high_water()
        return system.peak_memory_bytes() if high_water is None else high_water

    def _high_water(self) -> int | None:
        """Return the most memory that was resident, if the kernel counts it."""
        try:
            status = (self.process / "status").read_text(encoding="utf-8")
        except OSError:
            return None
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def free_memory_bytes(self) -> int:
        return available_memory_bytes()


def instruction_sets(
    *, machine: str | None = None, auxiliary: Callable[[int], int] | None = None, cpuinfo: Path = CPUINFO
) -> tuple[str, ...]:
    """Return the vector and matrix instruction sets that kernels ask for, of this processor or of the given one.

    `machine` is its architecture as `platform.machine()` names it; `auxiliary` reads Linux' auxiliary vector.
    """
    machine = machine or platform.machine()
    # Under emulation (qemu-user, containers of another architecture) /proc/cpuinfo may be the host's.
    if machine == "aarch64" and sys.platform.startswith("linux"):
        return _named(_arm_features(auxiliary or _auxiliary))
    flags = set((_cpuinfo("flags", cpuinfo) or _cpuinfo("Features", cpuinfo) or "").split())
    return _named(flags or _torchs_flags(torch.cpu.get_capabilities(), machine))


def onednn_computes(dtype: str) -> bool:
    """Check whether oneDNN has layers in "bfloat16" or "float16" for this processor.

    PyTorch's own loops take over where it has none. With AVX2 alone convolutions took 11 to 41 times as long as in
    float32, an LSTM 6.6 times, and linear layers of 8 and more rows 2 to 5 times (Zen 4).
    """
    if not torch.backends.mkldnn.is_available():
        return False
    ask = {
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return ask[dtype]()


def _named(flags: Collection[str]) -> tuple[str, ...]:
    """Return instruction sets by one name each, from the names that the kernel or torch has for them."""
    return tuple(dict.fromkeys(name for flag, name in ISA.items() if flag in flags))


def _arm_features(auxiliary: Callable[[int], int]) -> set[str]:
    """Return what Linux says in the auxiliary vector that all cores of an Arm processor have."""
    return {name for name, (entry, bit) in ARM_BITS.items() if auxiliary(entry) >> bit & 1}


def _torchs_flags(capabilities: Mapping[str, object], machine: str) -> set[str]:
    """Return what torch detected, in the kernel's spelling: avx512f for its avx512_f."""
    flags = {key.replace("avx512_f", "avx512f") for key, has in capabilities.items() if has is True}
    return flags | ({"asimd"} if machine in ("arm64", "aarch64") else set())


def _auxiliary(entry: int) -> int:
    """Return an entry of the auxiliary vector, which the system hands to every program."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return int(getauxval(entry))


def available_memory_bytes() -> int:
    """Memory that programs can still have, within the limits of this process."""
    try:
        found = re.search(
            r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:  # no Linux
        found = None
    usable = usable_memory_bytes()
    return min(usable, int(found[1]) * 1024) if found else usable // 2


def usable_memory_bytes(cgroup: Callable[[str, str], list[str]] = cgroup_texts) -> int:
    """Return the memory of the machine, or the smaller limit of a cgroup around this process.

    `cgroup(controller, file)` returns the texts of that file in the cgroups around the process.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        int(text)
        for text in (*cgroup("", "memory.max"), *cgroup("memory", "memory.limit_in_bytes"))
        if text.isdigit()
    ]
    return min([total, *limits])


# ------------------------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class _Rate:
    """Work per second of fast runs, and how many times slow runs took as long."""

    best: float
    spread: float

    @classmethod
    def of(cls, work: float, call: Callable[[], object], budget: float) -> _Rate:
        seconds = timed_runs(call, budget=budget, synchronize=_no_wait)
        fast, slow = seconds[len(seconds) // 4], seconds[3 * len(seconds) // 4]
        return cls(work / fast, slow / fast)


def _disturbed(cores: float, threads: int, spread: float) -> str | None:
    """Return the reason for a disturbance: `threads` threads had `cores` cores, and runs were `spread` apart."""
    if cores < UNDISTURBED_SHARE * threads:
        return f"machine busy (measured on {cores:.1f} of {threads} cores)"
    if spread >= SPREAD:
        return f"machine busy (runs of one measurement are {spread:.1f}x apart)"
    return None


def _read_bandwidth(least_bytes: int) -> _Rate:
    """Bytes per second of summing an array that no cache holds."""
    size = min(max(least_bytes, 4 * _last_level_cache_bytes()), 1024 * MIB, usable_memory_bytes() // 8)
    x = torch.ones(size // 4)
    return _Rate.of(size, x.sum, budget=0.5)


def _matmuls(
    batch_sizes: Sequence[int], int8: Callable[[int], Callable[[], object]] | None = None
) -> dict[str, _Rate]:
    """Operations per second of a linear layer 2048 → 4096, for each dtype that has a kernel.

    `int8` makes the call of the int8 layer for a batch size; it raises where the processor lacks the kernel.
    """
    rates: dict[str, _Rate] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        w_NK = torch.ones(FEATURES_N, FEATURES_K, dtype=dtype)

        def linear(rows: int, w_NK: torch.Tensor = w_NK) -> Callable[[], object]:
            x_MK = torch.ones(rows, FEATURES_K, dtype=w_NK.dtype)
            return lambda: F.linear(x_MK, w_NK)

        rates[str(dtype).removeprefix("torch.")] = _rate(linear, batch_sizes)
    if hasattr(torch.ops.onednn, "qlinear_pointwise"):
        # A build or processor without the kernel refuses by an exception of the operator's own choosing.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            rates["int8"] = _rate(int8 or _int8_linear, batch_sizes)
    return rates


def _int8_linear(rows: int) -> Callable[[], object]:
    """u8 activations times s8 weights through oneDNN, the operator that Inductor's quantized linears call."""
    weight = torch.ops.onednn.qlinear_prepack(torch.ones(FEATURES_N, FEATURES_K, dtype=torch.int8), None)
    x_MK = torch.ones(rows, FEATURES_K, dtype=torch.uint8)
    scales_N, zeros_N = torch.full((FEATURES_N,), 0.01), torch.zeros(FEATURES_N, dtype=torch.int32)
    qlinear = torch.ops.onednn.qlinear_pointwise
    return lambda: qlinear(
        x_MK, 0.01, 128, weight, scales_N, zeros_N, None, 1.0, 0, torch.float32, "none", [], ""
    )


def _rate(make: Callable[[int], Callable[[], object]], batch_sizes: Sequence[int]) -> _Rate:
    """Operations per second: the best over growing batch sizes, until one call is long enough to time."""
    found: list[_Rate] = []
    for rows in batch_sizes:
        work = 2 * rows * FEATURES_K * FEATURES_N
        found.append(_Rate.of(work, make(rows), budget=0.15))
        if work / found[-1].best > LONG_ENOUGH_SECONDS:
            break
    return max(found, key=lambda rate: rate.best)


def _no_wait() -> None:
    return None


# ------------------------------------------------------------------------------------------- what the kernel tells us


def _cpuinfo(key: str, path: Path = CPUINFO) -> str | None:
    """The first value of `key` in /proc/cpuinfo."""
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if colon and name.strip() == key:
                    return value.strip()
    except OSError:
        return None
    return None


def _model_name() -> str:
    return _cpuinfo("model name") or _cpuinfo("Model") or platform.processor() or platform.machine()


def _last_level_cache_bytes() -> int:
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text(encoding="utf-8").strip().removesuffix("K")) * 1024)
    return max(sizes)
