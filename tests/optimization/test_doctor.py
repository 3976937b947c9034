from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from factories import make_device
from torchwright.cli import main
from torchwright.core.paths import cache_folder
from torchwright.hardware.devices import devices
from torchwright.hardware.devices.base import Ceilings
from torchwright.hardware.devices.cpu import CPU
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization import doctor
from torchwright.optimization.doctor import Available, Compiler, Diagnosis, diagnose, render
from torchwright.optimization.techniques import techniques

SHARED = cache_folder()
"""The cache of all tests."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is measured or compiled, and nothing of this user's is read or written but the compiled kernels."""
    build.load_fault()
    monkeypatch.setattr(build, "ready", lambda: True)
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))
    CPU().keep(Ceilings(read_gb_per_s=40.0, tflops={"bfloat16": 0.9}))


def make_diagnosis(**overrides: Any) -> Diagnosis:
    fields: dict[str, Any] = {
        "platform": "Linux, Python 3.11",
        "device": make_device(),
        "ceilings": Ceilings(read_gb_per_s=40.0, tflops={"bfloat16": 0.9}),
        "devices": (Available(name="cpu", reason=None), Available(name="cuda", reason="no card")),
        "threads": 2,
        "cpu_capability": "AVX512",
        "openmp": "OpenMP",
        "versions": {"torch": "2.13.0", "torchao": None},
        "compiler": Compiler(command="g++", version="g++ 12.2", fault=None),
        "kernels": Available(name="kernels", reason="torch's headers want another compiler"),
        "cache": "/cache",
        "cache_fault": None,
        "techniques": (
            Available(name="dtype", reason=None),
            Available(name="graphs", reason="no CUDA: use [a card]"),
        ),
    }
    return Diagnosis(**fields | overrides)


def text_of(diagnosis: Diagnosis) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(render(diagnosis))
    return file.getvalue()


def test_the_machine_is_diagnosed_and_is_json():
    found = diagnose("cpu")
    data = json.loads(json.dumps(dataclasses.asdict(found)))
    assert data["device"]["read_gb_per_s"] == 40.0
    assert data["versions"]["torch"] == torch.__version__
    assert {row["name"] for row in data["devices"]} >= {"cpu", "cuda"}
    assert {row["name"] for row in data["techniques"]} == set(techniques.names())
    assert data["cache_fault"] is None
    assert "OpenMP" in data["openmp"]


class Faster(CPU):
    def measure(self) -> Ceilings:
        return Ceilings(read_gb_per_s=50.0)


def test_refresh_is_passed_on():
    with devices.adding({"cpu": Faster}):
        assert diagnose("cpu").device.read_gb_per_s == 40.0
        assert diagnose("cpu", refresh=True).device.read_gb_per_s == 50.0


def test_the_text_says_everything():
    text = text_of(make_diagnosis(notes=("the machine was busy",)))
    for part in (
        "AVX512",
        "g++ 12.2",
        "/cache",
        "torch 2.13.0",
        "torchao missing",
        "no: no card",
        "no: torch's headers want another compiler",
        "Note: the machine",
    ):
        assert part in text
    for row in make_diagnosis().techniques:
        assert row.name in text
        assert (row.reason or "available") in text


def test_faults_stand_beside_what_they_are_about():
    broken = Compiler(
        command="g++", version=None, fault="no C++ compiler (g++) was found: apt-get install g++"
    )
    text = text_of(make_diagnosis(compiler=broken, cache_fault="cannot be written"))
    assert "apt-get install g++" in text
    assert "cannot be written" in text


def test_the_compiler_is_the_one_that_inductor_takes():
    compiler = diagnose("cpu").compiler
    if compiler.fault is None:
        assert compiler.version
    else:
        assert "g++" in compiler.fault or "CXX" in compiler.fault


def test_a_machine_without_a_compiler_is_told_how_to_get_one(monkeypatch):
    from torch._inductor import config, cpp_builder

    from torchwright.hardware.measure import toolchain

    cpp_builder.cpp_compiler_search.cache_clear()
    toolchain._cpu_fault.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with config.patch({"cpp.cxx": (None, "g++")}):
        found = doctor._compiler(CPU().identify())
    cpp_builder.cpp_compiler_search.cache_clear()
    toolchain._cpu_fault.cache_clear()
    assert found.version is None
    assert "apt-get install g++" in str(found.fault)


def test_a_cache_folder_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    fault = doctor._write_fault(tmp_path / "file" / "below")
    assert fault is not None
    assert "TORCHWRIGHT_CACHE" in fault


def test_a_technique_that_cannot_be_imported_does_not_stop_the_others():
    with techniques.adding({"mine": "no_such_module:Mine"}):
        found = {each.name: each.reason for each in diagnose("cpu").techniques}
    assert "the technique 'mine' is registered as no_such_module:Mine but cannot be imported" in found["mine"]
    assert found["dtype"] is None


BUSY = "machine busy (load 20 on 2 cores)"


@pytest.mark.parametrize(
    ("ceilings", "reads", "multiplies"),
    [
        (Ceilings(disturbed=BUSY), f"not measured: {BUSY}", f"not measured: {BUSY}"),
        (
            Ceilings(read_gb_per_s=3.0, tflops={"float32": 0.004}, disturbed=BUSY),
            f"at least 3 GB/s: {BUSY}",
            f"at least float32 0.00 TFLOP/s: {BUSY}",
        ),
        (
            Ceilings(read_gb_per_s=40.0, tflops={"float32": 0.9}),
            "40 GB/s, measured",
            "0.90 TFLOP/s, measured",
        ),
    ],
)
def test_ceilings_of_a_busy_machine_are_no_limits(ceilings: Ceilings, reads: str, multiplies: str) -> None:
    text = text_of(make_diagnosis(ceilings=ceilings))
    assert reads in text
    assert multiplies in text


class Busy(CPU):
    low = Ceilings(read_gb_per_s=3.0, tflops={"float32": 0.004}, disturbed=BUSY)

    def measure(self) -> Ceilings:
        return self.low


def test_disturbed_ceilings_are_not_those_of_the_device() -> None:
    with devices.adding({"cpu": Busy}):
        found = diagnose("cpu", refresh=True)
    assert found.ceilings == Busy.low
    assert (found.device.read_gb_per_s, found.device.tflops) == (None, {})


def test_what_slows_everything_down_is_noted():
    busy = Ceilings(read_gb_per_s=1.0, disturbed="machine busy")
    device = dataclasses.replace(CPU().identify(), cores=2)
    notes = doctor._notes(device, busy, threads=64, runtimes=["/a/libgomp.so.1", "/b/libiomp5.so"])
    assert len(notes) == 3
    assert "when the machine is quiet" in notes[0]
    assert "2 OpenMP runtimes" in notes[1]
    assert "OMP_NUM_THREADS=2" in notes[2]
    assert doctor._version("no-such-package-anywhere") is None


@pytest.fixture
def without_kernels_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`without_kernels_for("no compiler")`: the kernels could not be built, for that reason."""
    return lambda reason: monkeypatch.setattr(build, "_outcome", [reason])


NATIVE = (
    "native", "packed_convolution", "packed_recurrent", "int8_dynamic", "dense_attention",
    "w8a8", "w4a8", "w4a16", "kv8",
)  # fmt: skip


def test_what_runs_on_the_kernels_is_available_where_they_can_be_built(without_kernels_for):
    found = {row.name: row.reason for row in diagnose("cpu").techniques}
    assert [found[name] for name in NATIVE] == [build.load_fault()] * len(NATIVE)
    without_kernels_for("the C++ compiler failed: no std::bit_width")
    diagnosis = diagnose("cpu")
    found = {row.name: row.reason for row in diagnosis.techniques}
    assert {diagnosis.kernels.reason, *(found[name] for name in NATIVE)} == {build.load_fault()}
    assert found["dtype"] is None


@pytest.mark.slow
def test_the_kernels_are_built_ahead(capsys, monkeypatch, tmp_path):
    if build.load_fault():
        pytest.skip(f"no kernels: {build.load_fault()}")
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(SHARED))  # the library of all tests is there
    path = build.build_ahead(tmp_path / "ahead")
    monkeypatch.setenv(build.AHEAD, str(path.parent))
    assert main(["doctor", "--build"]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")
    assert main(["doctor", "--build", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kernels": str(path)}


def test_kernels_that_cannot_be_built_ahead_are_a_fault(capsys, without_kernels_for):
    without_kernels_for("no C++ compiler was found (g++)")
    assert main(["doctor", "--build"]) == 2
    assert "cannot be built here. Found: no C++ compiler was found (g++)" in capsys.readouterr().err
    assert main(["doctor", "--build", "--refresh"]) == 2
    assert "--refresh" in capsys.readouterr().err


def test_the_verb_prints_text_and_json(capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["kind"] == "cpu"
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "Techniques" in capsys.readouterr().out
