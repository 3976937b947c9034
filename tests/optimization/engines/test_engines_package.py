"""Packages that call Torchwright's own operators."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_calls import call_of
from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines import conversion
from torchwright.optimization.engines.aot import Aot
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled import packaging
from torchwright.optimization.engines.compiled.package import Package, _register_operators  # pyright: ignore[reportPrivateUsage]
from torchwright.optimization.engines.dispatch.spec import CallSpec
from torchwright.optimization.techniques.base import conversion_of, parse_step
from torchwright.testing.forks import check_in_child
from torchwright.testing.models import ConvNet
from torchwright.workloads.module import ModuleWorkload


@pytest.mark.parametrize("calls", ["torchwright::linear_w8a8", "aten::mm"])
def test_kernels_are_needed_only_where_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str
) -> None:
    monkeypatch.setattr(
        "torchwright.hardware.kernels.cpu.build.load_fault", lambda: "no C++ compiler was found"
    )
    with zipfile.ZipFile(tmp_path / "0.pt2", "w") as archive:
        archive.writestr("model.wrapper.json", f'{{"nodes": ["{calls}"]}}')
    if calls.startswith("aten"):
        _register_operators(tmp_path / "0.pt2")
        return
    with pytest.raises(ArtifactError, match="no C\\+\\+ compiler"):
        _register_operators(tmp_path / "0.pt2")


def test_a_setting_of_the_process_shares_what_was_compiled() -> None:
    names = {
        text: conversion_of([parse_step(step) for step in text.split()])
        for text in (
            "compile",
            "compile allocator",
            "dtype compile",
            "compile:freezing=false",
            "threads:count=1 compile",
            "channels_last compile",
            "dtype compile max_autotune",
            "allocator",
            "compile:engine=jit",
        )
    }
    assert names.pop("compile allocator") == names["compile"] is not None
    assert names.pop("allocator") is names.pop("compile:engine=jit") is None
    assert len(set(names.values())) == len(names)


@pytest.mark.slow
def test_compiled_once_a_model_is_there_for_other_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = ModuleWorkload(ConvNet().eval(), torch.randn(4, 3, 16, 16))
    compiled: list[Path] = []
    real: Callable[..., list[CallSpec]] = packaging.build_packages
    monkeypatch.setattr(
        packaging, "build_packages", lambda target, folder: [compiled.append(folder), real(target, folder)][1]
    )
    targets: list[Any] = []
    for steps in ("compile", "allocator compile"):
        target = make_target(workload, get_device("cpu").identify())
        target.conversion = tmp_path / "shared" / "name"
        apply_steps(target, [parse_step(step) for step in steps.split()])
        folder = tmp_path / steps
        folder.mkdir()
        calls = Aot.prepare(target, folder).calls
        targets.append(target)
        (case,) = workload.cases(torch.float32)
        with torch.no_grad():
            found, wanted = Aot.opened(folder, calls, "cpu")(case), workload.model(*case.args)
        assert torch.allclose(found, wanted, atol=1e-5)
        shutil.rmtree(folder)  # as the first trial is thrown away once the second is kept
    assert compiled == [tmp_path / "compile"]
    first, second = targets
    assert second.spared == first.converted > 0.0 == first.spared == second.converted


def test_a_full_disk_keeps_nothing_for_other_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = SimpleNamespace(conversion=tmp_path / "shared", converted=0.0, spared=0.0)
    folder = tmp_path / "made"
    folder.mkdir()

    def make() -> tuple[CallSpec, ...]:
        (folder / "0.pt2").write_bytes(bytes(1000))
        return ()

    for free, left in ((3999, False), (4000, True)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        conversion.shared(target, folder, make)
        assert target.conversion.is_dir() is left


@pytest.mark.slow
def test_a_loader_that_was_called_during_a_fork_is_refused_in_the_child(tmp_path: Path) -> None:
    """Its lock is held by a thread that the child does not have."""
    model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
    package = call_of(model, (x,), to=tmp_path / "0.pt2")
    assert isinstance(package, Package)

    def check() -> None:
        with pytest.raises(TorchwrightError, match="cannot run in this process"):
            package.run([x])

    with package._one_at_a_time:
        check_in_child(check)
    with torch.inference_mode():
        torch.testing.assert_close(package.run([x]), model(x))
