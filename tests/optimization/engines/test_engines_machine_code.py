"""Machine code of torch.compile in a file: found again in another cache, and nothing else is put there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import clear_caches

from torchwright.core.errors import ArtifactError
from torchwright.optimization.engines.compiled.machine_code import keep_machine_code, restore_machine_code
from torchwright.optimization.engines.compiled.program import ignore_library_warnings

INPUT = torch.linspace(-1, 1, 32 * 16).reshape(32, 16)


def compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The output of a frozen layer, compiled with nothing in memory and `cache` as Inductor's folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    torch.compiler.reset()
    clear_caches()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU()).eval()
    with torch.inference_mode(), config.patch(freezing=True), ignore_library_warnings():
        return torch.compile(model)(INPUT)


def objects(cache: Path) -> dict[str, int]:
    """Name → when it was written."""
    return {str(file.relative_to(cache)): file.stat().st_mtime_ns for file in cache.glob("??/*.so")}


@pytest.mark.slow
def test_another_cache_has_nothing_left_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(tmp_path / "a", monkeypatch)
    assert keep_machine_code(tmp_path / "code.zip")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "b"))
    restore_machine_code(tmp_path / "code.zip")
    restored = objects(tmp_path / "b")
    assert restored.keys() == objects(tmp_path / "a").keys()
    assert any(name.endswith(".main.so") for name in restored)
    assert torch.equal(compiled(tmp_path / "b", monkeypatch), first)
    assert objects(tmp_path / "b") == restored


def test_a_process_that_compiled_nothing_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    assert not keep_machine_code(tmp_path / "code.zip")
    assert not (tmp_path / "code.zip").exists()


@pytest.mark.parametrize("name", ["../x.so", "ab/../../x.so", "ab/x.py", "/ab/x.so", "ab/cd/x.so"])
def test_other_files_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("ab/good.main.so", b"")
        archive.writestr(name, b"")
    with pytest.raises(ArtifactError, match="what no compiler put there"):
        restore_machine_code(tmp_path / "code.zip")
    assert objects(tmp_path / "cache") == {}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "code.zip").write_bytes(b"PK")
    with pytest.raises(ArtifactError, match=r"code.zip cannot be read"):
        restore_machine_code(tmp_path / "code.zip")
