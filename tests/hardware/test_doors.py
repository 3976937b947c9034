"""Devices that nobody has run here: each says in words why it is not there, and stand-ins show the rest."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchwright.cli import main
from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import default_name, devices, get_device
from torchwright.hardware.devices.accelerator import Accelerator
from torchwright.hardware.devices.cuda import CUDA
from torchwright.hardware.devices.mps import MPS
from torchwright.optimization import doctor
from torchwright.optimization.doctor import Available
from torchwright.optimization.techniques.base import techniques
from torchwright.optimization.techniques.dtype import Dtype
from torchwright.serve import folder
from torchwright.testing.test_devices import TestDevice as DeviceContract

DOORS = ("xpu", "mps", "npu", "hpu", "hip")
GIB = 1 << 30


def module(available: bool = True, **functions: Any) -> Any:
    """A stand-in of `torch.xpu`, with the functions that an accelerator asks for."""
    answers: dict[str, Any] = {
        "is_available": available,
        "get_device_name": "a stand-in",
        "mem_get_info": (3 * GIB, 4 * GIB),
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 5,
    }
    found = types.ModuleType("stand-in")
    for name, answer in answers.items():
        setattr(found, name, functions.get(name, lambda answer=answer: answer))
    return found


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch without any of them."""
    monkeypatch.setattr(torch.version, "xpu", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    for name in ("torch_npu", "habana_frameworks", "habana_frameworks.torch"):
        monkeypatch.setitem(sys.modules, name, None)  # which cannot be imported


# Without the device


@pytest.mark.parametrize(
    ("name", "found", "next_step"),
    [
        ("xpu", "is built without XPU", "PyTorch for XPU"),
        ("mps", "is built without Metal", "Apple computer"),
        ("npu", "torch_npu", "CANN"),
        ("hpu", "habana_frameworks.torch", "Gaudi"),
        ("hip", "PyTorch calls AMD's cards cuda", "--device cuda"),
    ],
)
def test_a_device_that_is_not_here_is_refused_in_words(
    bare: None, name: str, found: str, next_step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(TorchwrightError, match=f"the device '{name}' was asked for") as refused:
        get_device(name)
    assert found in str(refused.value.found)
    assert next_step in str(refused.value.next)
    assert "cpu" in str(refused.value.allowed)
    assert main(["optimize", "--device", name, "-o", str(tmp_path / "out")]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert found in text
    assert "Traceback" not in text


def test_a_package_that_is_not_installed_is_named(bare: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch_npu")
    assert devices.get("npu").unavailable() == ("torch_npu, which brings 'npu' to PyTorch, is not installed")
    monkeypatch.delitem(sys.modules, "habana_frameworks")
    monkeypatch.delitem(sys.modules, "habana_frameworks.torch")
    assert "which brings 'hpu' to PyTorch, is not installed" in str(devices.get("hpu").unavailable())


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise OSError('libascendcl.so: cannot open shared object file')", "OSError: libascendcl.so"),
        ("import torch_npu_missing_part", "No module named 'torch_npu_missing_part'"),
        ("raise SyntaxError('one\\ntwo')", "SyntaxError: one"),
        ("", "has no device 'npu'"),
        ("import torch; torch.npu = STAND_IN(False)", "but no device or driver answers"),
        ("import torch; torch.npu = STAND_IN()", None),
    ],
)
def test_a_package_says_why_it_brings_no_device(
    code: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "npu", None, raising=False)
    monkeypatch.delattr(torch, "npu")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    head = "from test_doors import module as STAND_IN\n" if "STAND_IN" in code else ""
    (tmp_path / "torch_npu.py").write_text(head + code)
    monkeypatch.setitem(sys.modules, "test_doors", sys.modules[__name__])
    try:
        found = devices.get("npu").unavailable()
    finally:
        sys.modules.pop("torch_npu", None)
    assert found is None if says is None else says in str(found)
    assert found is None or "\n" not in found


def test_a_card_of_amd_is_called_cuda(cuda_build: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    assert "for ROCm 7.1.0 calls AMD's cards cuda" in str(devices.get("hip").unavailable())
    cuda_build(False)
    assert "is built for ROCm 7.1.0, but no card" in str(CUDA.unavailable())
    card = SimpleNamespace(
        name="AMD Instinct", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304, total_memory=GIB
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    assert CUDA().identify().isa == ("gfx942",)
    monkeypatch.setattr(torch.version, "hip", None)
    assert CUDA().identify().isa == ("sm_94",)


# With a stand-in


def test_a_device_that_is_here_is_taken_by_its_name_alone(monkeypatch: pytest.MonkeyPatch):
    before = default_name()
    monkeypatch.setattr(torch.version, "xpu", "20260000")
    monkeypatch.setattr(torch, "xpu", module())
    device = get_device("xpu")
    assert default_name() == before
    assert device.identify() == DeviceFacts(kind="xpu", name="a stand-in", memory_bytes=4 * GIB)
    monkeypatch.setattr(torch, "xpu", module(available=False))
    assert "is built for 'xpu', but no device or driver answers" in str(devices.get("xpu").unavailable())


class OnCPU(Accelerator):
    """An accelerator whose tensors lie on the CPU, and that is measured in a moment."""

    name = "cpu"
    read_bytes = 1 << 20
    square = 64

    @classmethod
    def module(cls) -> Any:
        return module()


def test_an_accelerator_keeps_the_contract_of_devices():
    contract, device = DeviceContract(), OnCPU()
    contract.test_it_says_what_it_is(device)
    contract.test_its_identity_is_plain_data(device)
    contract.test_ceilings_are_positive(device)
    contract.test_memory_is_counted(device)
    assert set(device.measure().tflops) == {"float32", "bfloat16", "float16"}


def test_a_type_that_a_backend_lacks_has_no_rate(monkeypatch: pytest.MonkeyPatch):
    ones = torch.ones

    def without_bf16(*sizes: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        if dtype == torch.bfloat16:
            raise TypeError("no bfloat16 here")
        return ones(*sizes, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "ones", without_bf16)
    assert set(OnCPU().measure().tflops) == {"float32", "float16"}


class MetalOnCPU(MPS):
    """Metal's counters, with tensors on the CPU."""

    name = "cpu"
    read_bytes = 1 << 20
    square = 64

    @classmethod
    def module(cls) -> Any:
        return SimpleNamespace(
            recommended_max_memory=lambda: 4 * GIB,
            driver_allocated_memory=lambda: GIB,
            synchronize=lambda: None,
        )


def test_the_apple_gpu_counts_what_metal_holds():
    """Its arithmetic, on the CPU: no Apple computer is at hand, and nothing here says that it runs on one."""
    device = MetalOnCPU()
    assert device.identify().memory_bytes == 4 * GIB
    assert device.free_memory_bytes() == 3 * GIB
    assert device.peak_memory_bytes() == GIB
    assert device.reset_peak_memory() is False
    assert (device.measure().read_gb_per_s or 0) > 0


# What runs there


@pytest.mark.parametrize("name", DOORS)
def test_every_technique_runs_or_says_why_not(name: str):
    facts = DeviceFacts(kind=name, name="a stand-in")
    reasons = {each: techniques.get(each).available(facts) for each in techniques.names()}
    assert reasons["dtype"] is None
    for each, reason in reasons.items():
        assert reason is None or len(reason.split()) > 2, each
    for each in ("native", "torchao", "cuda_graphs", "sparse24"):
        assert name in str(reasons[each]), each


@pytest.mark.parametrize("name", ["xpu", "npu"])
def test_doctor_says_what_would_run_on_a_device_that_is_not_here(
    bare: None, name: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["doctor", "--device", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["kind"] == name
    assert devices.get(name).remedy in found["device_fault"]
    by_name = {each["name"]: each["reason"] for each in found["techniques"]}
    assert by_name["dtype"] is None
    assert name in by_name["native"]
    assert by_name["compile"] == devices.get(name).uncompiled
    assert main(["doctor", "--device", name]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "not here" in text
    assert main(["doctor", "--device", name, "--build"]) == 2


class AsksTheCard(Dtype):
    """A technique that asks the driver."""

    name = "asks-the-card"

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        raise AssertionError("Torch not compiled with CUDA enabled")


def test_a_technique_that_asks_a_missing_card_is_left_open():
    missing = DeviceFacts(kind="cuda", name="not here")
    with techniques.adding({"asks-the-card": AsksTheCard}):
        assert doctor._technique("asks-the-card", missing, here=False) == Available(
            name="asks-the-card", reason="what the device can do decides, and the device is not here"
        )
        with pytest.raises(AssertionError):
            doctor._technique("asks-the-card", missing, here=True)


@pytest.mark.parametrize(("kind", "served"), [("cpu", True), ("cuda", True), ("xpu", False), (3, True)])
def test_an_artifact_of_another_device_is_not_served(tmp_path: Path, kind: Any, served: bool):
    recipe = {"workload": {"kind": "language"}, "fingerprint": {"device": {"kind": kind}}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "manifest.json").write_text(json.dumps({"served_as": "writer", "engine": "eager"}))
    if served:  # what is not a name is for loading to refuse
        assert folder.find(str(tmp_path)).artifact == tmp_path
        return
    with pytest.raises(ArtifactError, match="cannot be served") as refused:
        folder.find(str(tmp_path))
    assert "an artifact for the device 'xpu'" in str(refused.value)
    assert "optimize again with --device cpu" in str(refused.value)
