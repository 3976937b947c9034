"""Run tests/hardware/kernels on kernels that are compiled otherwise than for use (gcc).

    python scripts/kernel_builds.py sanitize|tiles [arguments of pytest]

`sanitize`: with AddressSanitizer and UndefinedBehaviorSanitizer, for every instruction set that the machine has. Memory
that a kernel touches outside of its tensors, and C++ whose meaning is undefined, end the run with the place in the
source. `tiles`: the AMX kernels on any machine with AVX-512, on tiles emulated in C++
(tests/hardware/kernels/amx_emulated.h), in the place of the AVX-512 ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from torchwright.hardware.kernels.cpu import build

ROOT = Path(__file__).parents[1]
SANITIZE = (
    *("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"),
    *("-O1", "-g", "-fno-omit-frame-pointer"),
)
"""The last -O counts. `vptr` wants type information that torch does not export."""
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")
"""They must come before Python's own libraries; libstdc++ with them, for exceptions to be found."""
TILES = ("-include", str(ROOT / "tests" / "hardware" / "kernels" / "amx_emulated.h"))


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in ("sanitize", "tiles"):
        print(__doc__)
        return 2
    kind, arguments = sys.argv[1], sys.argv[2:] or ["-q", str(ROOT / "tests" / "hardware" / "kernels")]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHWRIGHT_CACHE"] = cache
        compiler = build.find_compiler()
        path = build.place(compiler, build.instruction_sets(compiler))
        path.parent.mkdir(parents=True)
        compile_to(path, compiler, kind)
        environment = {**os.environ, **(sanitized(compiler) if kind == "sanitize" else {})}
        if kind == "tiles":
            arguments += ["-k", "avx512 or not (amx or avx2 or portable)"]
        # What a dying process writes is not to be captured.
        tests = [sys.executable, "-m", "pytest", "-n0", "-m", "not slow", "--capture=sys", "--timeout=1800"]
        code = subprocess.run([*tests, *arguments], cwd=ROOT, env=environment).returncode
        if [*path.parent.glob("*.so")] != [path]:
            print("the sources changed meanwhile, and the tests compiled other kernels than these: run again")
            return 1
        return code


def compile_to(path: Path, compiler: str, kind: str) -> None:
    """Compile and link as `build` does, in another way."""
    with tempfile.TemporaryDirectory() as scratch:
        commands = build.compile_commands(compiler, build.instruction_sets(compiler), Path(scratch))
        link = build.link_command(compiler, list(commands), path)
        for target, command in commands.items():
            print(f"compiling {target.stem}", flush=True)
            more = SANITIZE if kind == "sanitize" else TILES if target.stem == "avx512" else ()
            subprocess.run([*command, *more], check=True)
        subprocess.run([*link, *(SANITIZE if kind == "sanitize" else ())], check=True)


def sanitized(compiler: str) -> dict[str, str]:
    """The environment in which Python can load a library with sanitizers."""
    runtimes = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in RUNTIMES
    ]
    return {
        "LD_PRELOAD": " ".join(done.stdout.strip() for done in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


if __name__ == "__main__":
    raise SystemExit(main())
