"""Compiles one kept graph in a process of its own.

`python -m torchwright.optimization.engines.compiled.compile_package FOLDER NAME INDEX PARENT`, which ends with the
process PARENT.

The Inductor settings come as JSON on standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchwright.core.process.orphans import die_with_parent


def start(folder: Path, name: str, index: int, inductor: dict[str, Any]) -> subprocess.Popen[str]:
    """Compile graph `name` of `folder` into its package number `index`, concurrently with this process's other work."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torchwright.optimization.engines.compiled.compile_package"),
            *(str(folder), name, str(index), str(os.getpid())),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(inductor))
    process.stdin.close()
    return process


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a compilation; raises `RuntimeError` with its last line when it failed."""
    assert process.stderr is not None
    errors = process.stderr.read()
    if process.wait():
        lines = [line for line in errors.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"compilation ended with exit code {process.returncode}")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[4]))

    from torchwright.optimization.engines.compiled.program import compile_program, read_programs
    from torchwright.optimization.engines.dispatch.spec import package_file

    folder, name, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    settings = json.loads(sys.stdin.read())
    compile_program(
        read_programs(folder, trust=True, names=(name,))[name], folder / package_file(index), settings
    )
