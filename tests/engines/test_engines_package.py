"""Packages that call Torchwright's own operators."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from torchwright.engines.package import _register_operators  # pyright: ignore[reportPrivateUsage]
from torchwright.errors import ArtifactError


@pytest.mark.parametrize("calls", ["torchwright::linear_w8a8", "aten::mm"])
def test_kernels_are_needed_only_where_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str
) -> None:
    monkeypatch.setattr("torchwright.kernels.cpu.build.load_fault", lambda: "no C++ compiler was found")
    with zipfile.ZipFile(tmp_path / "0.pt2", "w") as archive:
        archive.writestr("model.wrapper.json", f'{{"nodes": ["{calls}"]}}')
    if calls.startswith("aten"):
        _register_operators(tmp_path / "0.pt2")
        return
    with pytest.raises(ArtifactError, match="no C\\+\\+ compiler"):
        _register_operators(tmp_path / "0.pt2")
