"""Diagnosis of this machine: what runs here, peak rates, and reasons for what does not run."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchwright.core import system
from torchwright.core.errors import TorchwrightError
from torchwright.core.paths import UnsafeFolder, cache_folder
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import check_name, default_name, devices, get_device
from torchwright.hardware.devices.base import Ceilings
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.measure.toolchain import compiler_fault
from torchwright.optimization.techniques import techniques

if TYPE_CHECKING:
    from rich.console import RenderableType

LIBRARIES = (
    "torchwright",
    "torch",
    "torchao",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "cloudpickle",
)
OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """The C++ compiler that torch Inductor would take."""

    command: str
    version: str | None
    fault: str | None
    """Why it cannot build an OpenMP program and what would mend that; None where it can."""


@dataclass(frozen=True, kw_only=True)
class Available:
    """Availability on this machine; `reason` says what is missing and which command fixes it, else None."""

    name: str
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All facts that decide what can run here. Plain data: `dataclasses.asdict` gives JSON."""

    platform: str
    device: DeviceFacts
    """The device that was named, else the one taken by default, with its ceilings where nothing disturbed them."""
    device_fault: str | None = None
    """The reason why this machine cannot use that device, with a remedy; techniques below are judged by its kind."""
    ceilings: Ceilings
    """The ceilings as measured, with what disturbed them."""
    devices: tuple[Available, ...]
    threads: int
    """Threads inside one operator (`torch.get_num_threads`)."""
    cpu_capability: str
    """The widest vectors that torch's own kernels use here."""
    openmp: str
    versions: dict[str, str | None]
    compiler: Compiler
    kernels: Available
    """Torchwright's own kernels for CPUs, of which the machine's part is known only once they are built and loaded."""
    cache: str
    cache_fault: str | None
    techniques: tuple[Available, ...]
    notes: tuple[str, ...] = field(default=())


def diagnose(device_name: str | None = None, *, refresh: bool = False) -> Diagnosis:
    """Look at the machine; what was never done here, measuring its ceilings and compiling the kernels, is done now.

    With `refresh` the ceilings are measured again. Raises `UnknownName` for a device that nobody registered; one that
    is not here is a fact of the diagnosis.
    """
    name = check_name(device_name or default_name())
    device, ceilings, fault = _look_at(name, refresh=refresh)
    listed = [other for other, cls in devices if cls.preference >= 0 or other == device_name]
    folder = cache_folder()
    return Diagnosis(
        platform=f"{platform.platform()}, Python {platform.python_version()}",
        device=device,
        device_fault=fault,
        ceilings=ceilings,
        devices=tuple(Available(name=other, reason=devices.get(other).unavailable()) for other in listed),
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        openmp=_openmp(),
        # torch's own word says which build it is; its metadata need not.
        versions={**{name: _version(name) for name in LIBRARIES}, "torch": str(torch.__version__)},
        compiler=_compiler(device),
        kernels=Available(name="kernels", reason=build.load_fault()),
        cache=str(folder),
        cache_fault=_write_fault(folder),
        techniques=tuple(_technique(each, device, here=fault is None) for each in techniques.names()),
        notes=() if fault else tuple(_notes(device, ceilings, torch.get_num_threads(), _openmp_runtimes())),
    )


def _look_at(name: str, *, refresh: bool) -> tuple[DeviceFacts, Ceilings, str | None]:
    """Return a device with its ceilings; of one that is not here only its kind, with the reason."""
    cls = devices.get(name)
    if reason := cls.unavailable():
        fault = f"{reason}: {cls.remedy}" if cls.remedy else reason
        return DeviceFacts(kind=name, name="not here"), Ceilings(), fault
    found = get_device(name)
    found.start()
    ceilings = found.ceilings(refresh=refresh)
    disturbed = ceilings.disturbed is not None
    device = dataclasses.replace(
        found.identify(),
        read_gb_per_s=None if disturbed else ceilings.read_gb_per_s,
        tflops={} if disturbed else dict(ceilings.tflops),
    )
    return device, ceilings, None


def build_kernels(into: Path | None = None) -> Path:
    """Compile the kernels ahead of their first use, unless they are; returns where they are.

    With `into` they are put into that folder, where `TORCHWRIGHT_KERNELS` finds them without a compiler. Raises
    `TorchwrightError` where they cannot be compiled or loaded.
    """
    fault = build.load_fault()
    if fault:
        raise TorchwrightError("the kernels cannot be built here", found=fault)
    try:
        return build.library() if into is None else build.build_ahead(into)
    except (build.BuildError, UnsafeFolder) as error:
        raise TorchwrightError("the kernels cannot be built here", found=str(error)) from error


def render(diagnosis: Diagnosis) -> RenderableType:
    """A diagnosis for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    device = diagnosis.device
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="cyan", no_wrap=True)

    def row(label: str, text: str, fault: str | None = None) -> None:
        facts.add_row(label, Text.assemble(text, (f"  {fault}" if fault else "", "red")))

    row("machine", diagnosis.platform)
    if diagnosis.device_fault is None:
        row(device.kind, f"{device.name}, {device.cores} cores, {device.memory_bytes / 2**30:.1f} GiB")
    else:
        row(device.kind, device.name, diagnosis.device_fault)
    row("instruction sets", " ".join(device.isa) or "none that kernels ask for")
    ceilings = diagnosis.ceilings
    reads = None if ceilings.read_gb_per_s is None else f"{ceilings.read_gb_per_s:.0f} GB/s"
    rates = ", ".join(f"{dtype} {rate:.2f}" for dtype, rate in ceilings.tflops.items())
    row("reads at most", _ceiling(reads, ceilings.disturbed))
    row("multiplies at most", _ceiling(f"{rates} TFLOP/s" if rates else None, ceilings.disturbed))
    row("threads", f"{diagnosis.threads}; {diagnosis.openmp}; torch uses {diagnosis.cpu_capability}")
    row("versions", ", ".join(f"{name} {found or 'missing'}" for name, found in diagnosis.versions.items()))
    row("compiler", diagnosis.compiler.version or diagnosis.compiler.command, diagnosis.compiler.fault)
    row("cache folder", diagnosis.cache, diagnosis.cache_fault)
    for other in (*diagnosis.devices, diagnosis.kernels):
        row(other.name, "usable" if other.reason is None else f"no: {other.reason}")

    table = Table.grid(padding=(0, 2))
    for found in diagnosis.techniques:
        if found.reason is None:
            table.add_row(found.name, Text("available", "green"))
        else:
            table.add_row(found.name, Text.assemble(("no: ", "yellow"), found.reason))
    parts: list[RenderableType] = [facts, Text(), Text("Techniques", "bold"), table]
    if diagnosis.notes:
        parts += [Text(), *(Text(f"Note: {note}", "yellow") for note in diagnosis.notes)]
    return Group(*parts)


def _ceiling(rate: str | None, disturbed: str | None) -> str:
    """A measured rate in words; a disturbed one is a lower bound."""
    if rate is None:
        return f"not measured: {disturbed}" if disturbed else "not measured"
    return f"at least {rate}: {disturbed}" if disturbed else f"{rate}, measured"


def _technique(name: str, device: DeviceFacts, *, here: bool) -> Available:
    try:
        return Available(name=name, reason=techniques.get(name).available(device))
    except TorchwrightError as error:  # registered, but it cannot be imported: the others can still be judged
        return Available(name=name, reason=str(error))
    except (RuntimeError, AssertionError):  # what torch raises for a question to a driver that is not there
        if here:
            raise
        return Available(name=name, reason="what the device can do decides, and the device is not here")


def _compiler(device: DeviceFacts) -> Compiler:
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        command = get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        command = system.cxx()
        return Compiler(
            command=command, version=None, fault=compiler_fault(device) or f"{command} does not run"
        )
    told = subprocess.run(
        [command, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout.splitlines()
    return Compiler(command=command, version=told[0] if told else None, fault=compiler_fault(device))


def _openmp() -> str:
    if not torch.backends.openmp.is_available():
        return "torch is built without OpenMP"
    loaded = _openmp_runtimes()
    return f"OpenMP through {', '.join(loaded)}" if loaded else "OpenMP"


def _openmp_runtimes() -> list[str]:
    """OpenMP runtimes that this process has loaded; the kernel tells on Linux only."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(OPENMP_RUNTIMES))


def _notes(device: DeviceFacts, ceilings: Ceilings, threads: int, runtimes: Sequence[str]) -> list[str]:
    notes: list[str] = []
    if ceilings.disturbed:
        notes.append(
            "the ceilings are not known; `torchwright doctor` measures them when the machine is quiet"
        )
    if len(runtimes) > 1:
        notes.append(
            f"{len(runtimes)} OpenMP runtimes are loaded and fight for the cores: {', '.join(runtimes)}"
        )
    if device.kind == "cpu" and threads > device.cores:
        notes.append(
            f"torch uses {threads} threads on {device.cores} usable cores; "
            f"`export OMP_NUM_THREADS={device.cores}` usually runs faster"
        )
    return notes


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write_fault(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror}); `export TORCHWRIGHT_CACHE=FOLDER` names another"
