"""Code for a level of the processor's family: no instruction of a higher one, and it runs where there is none."""

from __future__ import annotations

import platform
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from export_models import small

from torchwright.cli import main
from torchwright.core.errors import WorkloadError
from torchwright.exporter.export import export
from torchwright.exporter.subject import make_subject
from torchwright.exporter.targets.aoti import MODEL, Aoti
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload

BEYOND = re.compile(r"%zmm|%[xy]mm(?:1[6-9]|2\d|3[01])|%k[0-7]|%tmm")
"""Registers of AVX-512 and AMX."""
X86 = platform.machine() == "x86_64"


def beyond(package: Path, folder: Path) -> int:
    """Lines of the package's code with a register that x86-64-v3 has not."""
    with zipfile.ZipFile(package) as archive:
        (library,) = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extract(library, folder)
    listing = subprocess.run(
        ["objdump", "-d", str(folder / library)], capture_output=True, text=True, check=True
    ).stdout
    assert len(listing) > 10_000
    return sum(bool(BEYOND.search(line)) for line in listing.splitlines())


@pytest.mark.slow
@pytest.mark.skipif(not X86 or shutil.which("objdump") is None, reason="needs x86-64 and objdump")
def test_code_for_a_level_has_no_instruction_of_a_higher_one(tmp_path: Path) -> None:
    counts = {}
    for march in (None, "x86-64-v3"):
        folder = tmp_path / str(march)
        folder.mkdir()
        made = make_subject(ModuleWorkload(*small()), march=march)
        written = Aoti.write(made, "fp32", folder)
        assert any("x86-64-v3" in note for note in written.notes) == (march is not None)
        counts[march] = beyond(folder / MODEL, folder)
        found = Aoti.open(folder, made.graph.spec, 1)(tensors_of(made.case))
        assert relative_error(made.answer(made.case), found).value < 1e-4
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        assert counts[None] > 0  # that they would be seen
    assert counts["x86-64-v3"] == 0


LOAD = """
import sys, torch
loader = torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", False, 1, -1)
print(loader.boxed_run([torch.ones(3, 4, 16)])[0].sum().item())
"""


@pytest.mark.slow
@pytest.mark.skipif(not X86 or shutil.which("qemu-x86_64") is None, reason="needs x86-64 and qemu-user")
def test_it_runs_on_a_processor_of_the_level(tmp_path: Path) -> None:
    codes = {}
    for march in (None, "x86-64-v3"):
        folder = tmp_path / str(march)
        folder.mkdir()
        Aoti.write(make_subject(ModuleWorkload(*small()), march=march), "fp32", folder)
        command = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", LOAD, str(folder / MODEL)]
        codes[march] = subprocess.run(command, capture_output=True, timeout=250, check=False).returncode
    assert codes["x86-64-v3"] == 0
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        assert codes[None] == -signal.SIGILL  # that it would be seen


def test_levels_that_a_target_has_not_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkloadError, match=r"nothing for 'x86-64-v9'.*x86-64-v3"):
        export(*small(), to="aoti", march="x86-64-v9")
    with pytest.raises(WorkloadError, match="aoti"):
        export(*small(), to="pt2", march="x86-64-v3")
    assert main(["export", "export_models:small", "--to", "pt2", "--max-context", "64", "--quiet"]) == 2
    assert "holds no cache" in capsys.readouterr().err
