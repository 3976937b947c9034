"""The check whether generated C++ can be compiled here."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from torchwright.core import system
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import devices


def compiler_fault(device: DeviceFacts) -> str | None:
    """Why Inductor cannot build code for `device`, with what mends it; None when it can."""
    if device.kind == "cpu":
        return _cpu_fault(system.cxx())
    return devices.get(device.kind).uncompiled


@functools.cache
def _cpu_fault(compiler: str) -> str | None:
    path = shutil.which(compiler)
    if path is None:
        return f"no C++ compiler ({compiler}) was found: {system.cxx_remedy()}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(
            "#include <omp.h>\nint main() { return omp_get_max_threads() > 0 ? 0 : 1; }\n", encoding="utf-8"
        )
        result = subprocess.run(
            system.program_command(path, source, Path(folder, "probe.exe")),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    if result.returncode:
        # Microsoft's compiler prints its errors to standard output.
        lines = (result.stderr or result.stdout).strip().splitlines()
        said = next((line for line in lines if "error" in line), "".join(lines[-1:]))
        return f"{path} cannot compile a two-line OpenMP program ({said}): {system.cxx_remedy()}"
    return None
