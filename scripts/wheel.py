"""Make a wheel with compiled kernels, so that an installation needs no compiler.

    python scripts/wheel.py [--libraries DIR] [--out DIR]       from the root, with the extra `wheel` installed

The wheel has the library for the torch of this environment, with the variants of all instruction sets that the compiler
knows, and the sources: with another torch they are compiled on first use, as from a checkout. `--libraries` adds those
that `torchwright doctor --build --into DIR` wrote in environments with other versions of torch. auditwheel names the
oldest glibc that the wheel runs on; torch's own libraries are left out. The wheel is for the processor family that
makes it: x86-64, or 64-bit Arm.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torchwright.core import system
from torchwright.hardware.kernels.cpu import build

ROOT = Path(__file__).parents[1]
TREE = ("pyproject.toml", "README.md", "LICENSE", "src")
LEFT_OUT = ("libtorch*", "libc10*", "libgomp.so.1")
"""Libraries that `import torch` has loaded already: a second OpenMP would start threads of its own."""
BESIDE = "$ORIGIN/../../../../../torch/lib"
"""torch's libraries, seen from the library in site-packages; the linker wrote where this machine has them."""
SETUP = """
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class PlatformWheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"bdist_wheel": PlatformWheel}, distclass=Binary)
"""
"""For setuptools: any Python can use the library, on one platform."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", type=Path, help="libraries for other versions of torch")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    how = parser.parse_args()
    if fault := system.only_linux("auditwheel"):
        parser.error(fault)
    if not build.SOURCES.is_relative_to(ROOT):
        parser.error(
            f"torchwright is installed from {build.SOURCES}: run `pip install -e .` in this checkout first"
        )
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "source"
        copy_tree(tree)
        prebuilt = tree / build.PACKAGED.relative_to(ROOT)
        add_libraries(prebuilt, how.libraries)
        print("\n".join(f"with {path.name}" for path in sorted(prebuilt.iterdir())))
        made = make(tree, Path(scratch) / "made")
        how.out.mkdir(parents=True, exist_ok=True)
        repair = [sys.executable, "-m", "auditwheel", "repair", str(made), "--wheel-dir", str(how.out)]
        subprocess.run([*repair, *(f"--exclude={name}" for name in LEFT_OUT)], check=True)
    return 0


def copy_tree(tree: Path) -> None:
    """Copy what a wheel is made of: an interrupted run leaves nothing in the checkout."""
    tree.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    (tree / "setup.py").write_text(SETUP, encoding="utf-8")


def add_libraries(prebuilt: Path, others: Path | None) -> None:
    """Put this torch's library and `others` into the tree. Raises `BuildError` where one cannot be compiled."""
    own = build.build_ahead(prebuilt)
    sources = own.name.partition("-torch-")[0]
    for path in sorted(others.iterdir()) if others is not None else ():
        if not path.name.startswith(sources):
            sys.exit(f"{path} is no library of these sources ({sources}-torch-…): write it again")
        shutil.copy(path, prebuilt / path.name)
    for path in prebuilt.iterdir():
        subprocess.run(["patchelf", "--set-rpath", BESIDE, str(path)], check=True)
        path.chmod(0o644)


def make(tree: Path, out: Path) -> Path:
    """Make the wheel of the tree with the setuptools of this environment: no network is needed."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(tree)], check=True)
    (made,) = out.glob("*.whl")
    return made


if __name__ == "__main__":
    sys.exit(main())
