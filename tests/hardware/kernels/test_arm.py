"""The kernels for 64-bit Arm: cross-compiled, and run in qemu-user on processors that lack what a level must not use.

Each level writes bitwise what `portable` writes. The level `bf16` may differ where products of bfloat16 are summed, and
those sums are compared with a model of the instruction. `levels/` is the program; `.ci/nightly arm` runs this file.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchwright.hardware.kernels.cpu import build

HERE = Path(__file__).with_name("levels")
COMPILER = "aarch64-linux-gnu-g++"
QEMU = next((name for name in ("qemu-aarch64", "qemu-aarch64-static") if shutil.which(name)), None)
MISSING = (
    f"no {COMPILER}: `apt-get install g++-aarch64-linux-gnu`"
    if shutil.which(COMPILER) is None
    else "no qemu-aarch64: `apt-get install qemu-user`"
    if QEMU is None
    else None
)
LEAST = {"neon": "cortex-a53", "dotprod": "neoverse-n1", "i8mm": "max", "bf16": "max"}
"""Level → a processor that has it and, where qemu knows such a one, none of the better ones' instructions."""

needs_tools = pytest.mark.skipif(MISSING is not None, reason=f"not run: {MISSING}")


def compiled(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All levels in one program, as the library has them; the operators around them are compiled as well."""
    folder = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "aarch64")
        sets = build.instruction_sets(COMPILER)
    assert [*sets] == [*build.ARM, "portable"]
    kernels = build.compile_commands(COMPILER, sets, folder)
    own = {folder / f"own-{source.stem}.o": source for source in HERE.glob("*.cpp")}
    known = [f"-DTW_HAVE_{name.upper()}" for name in sets]
    rest = [
        [
            COMPILER,
            "-std=c++20",
            "-O1",
            "-ffp-contract=off",
            *known,
            f"-I{build.SOURCES}",
            "-c",
            str(source),
            "-o",
            str(made),
        ]
        for made, source in own.items()
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, [*kernels.values(), *rest]))
    path = folder / "levels"
    objects = [*own, *(made for made in kernels if made.stem != "ops")][::-1]
    compiled([COMPILER, "-static", *map(str, objects), "-o", str(path)])
    return path


def run(program: Path, cpu: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(QEMU), "-cpu", cpu, str(program), *arguments], capture_output=True, text=True, timeout=900
    )


@needs_tools
@pytest.mark.slow  # the compiler takes a minute or two
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", build.ARM)
def test_a_level_computes_what_portable_does(program: Path, level: str) -> None:
    done = run(program, LEAST[level], level)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@needs_tools
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("cpu", "levels"),
    [
        ("cortex-a53", "neon portable"),
        ("cortex-a72", "neon portable"),
        ("a64fx", "neon portable"),  # Armv8.2 without products of bytes
        ("neoverse-n1", "dotprod neon portable"),
        ("max", "bf16 i8mm dotprod neon portable"),
    ],
)
def test_a_processor_has_what_its_system_says(program: Path, cpu: str, levels: str) -> None:
    assert run(program, cpu).stdout.split() == levels.split()


@needs_tools
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_level_that_the_processor_lacks_is_not_run(program: Path) -> None:
    done = run(program, "cortex-a53", "bf16")
    assert (done.returncode, done.stdout) == (2, "bf16 cannot run here\n")
