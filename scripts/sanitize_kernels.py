"""Run tests/kernels on kernels compiled with AddressSanitizer and UndefinedBehaviorSanitizer (gcc).

    python scripts/sanitize_kernels.py [arguments of pytest]

Every instruction set that the compiler knows is compiled, and every one that the machine has is tested. Memory that a
kernel touches outside of its tensors, and C++ whose meaning is undefined, end the run with the place in the source.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from torchwright.kernels import build

ROOT = Path(__file__).parents[1]
SANITIZE = (
    *("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"),
    *("-O1", "-g", "-fno-omit-frame-pointer"),
)
"""The last -O counts. `vptr` wants type information that torch does not export."""
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")
"""They must come before Python's own libraries; libstdc++ with them, for exceptions to be found."""


def main() -> int:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHWRIGHT_CACHE"] = cache
        compiler = build.find_compiler()
        path = build.place(compiler, build.instruction_sets(compiler))
        path.parent.mkdir(parents=True)
        compile_to(path, compiler)
        runtimes = [
            subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
            for name in RUNTIMES
        ]
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(done.stdout.strip() for done in runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        # What a dying process writes is not to be captured.
        tests = [sys.executable, "-m", "pytest", "-n0", "-m", "not slow", "--capture=sys", "--timeout=1800"]
        arguments = sys.argv[1:] or ["-q", str(ROOT / "tests" / "kernels")]
        code = subprocess.run([*tests, *arguments], cwd=ROOT, env=environment).returncode
        if [*path.parent.glob("*.so")] != [path]:
            print(
                "the sources changed meanwhile, and the tests compiled kernels without sanitizers: run again"
            )
            return 1
        return code


def compile_to(path: Path, compiler: str) -> None:
    """Compile and link as `build` does, with the sanitizers."""
    with tempfile.TemporaryDirectory() as scratch:
        commands = build.compile_commands(compiler, build.instruction_sets(compiler), Path(scratch))
        for target, command in commands.items():
            print(f"compiling {target.stem}", flush=True)
            subprocess.run([*command, *SANITIZE], check=True)
        subprocess.run([*build.link_command(compiler, list(commands), path), *SANITIZE], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
