"""Whether generated C++ can be compiled here."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from torchwright.devices import devices
from torchwright.facts import DeviceFacts

NEXT = "`apt-get install g++`, or set CXX to a C++20 compiler with OpenMP"


def compiler_fault(device: DeviceFacts) -> str | None:
    """Why Inductor cannot build code for `device`, with what mends it; None when it can."""
    if device.kind == "cpu":
        return _cpu_fault(os.environ.get("CXX", "g++"))
    return devices.get(device.kind).uncompiled


@functools.cache
def _cpu_fault(compiler: str) -> str | None:
    path = shutil.which(compiler)
    if path is None:
        return f"no C++ compiler ({compiler}) was found: {NEXT}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() > 0 ? 0 : 1; }\n")
        result = subprocess.run(
            [path, "-std=c++20", "-fopenmp", str(source), "-o", str(Path(folder, "probe"))],
            capture_output=True,
            text=True,
        )
    if result.returncode:
        return f"{path} cannot compile a two-line OpenMP program ({result.stderr.strip().splitlines()[-1]}): {NEXT}"
    return None
