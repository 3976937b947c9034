"""Loading a native artifact: its weights are read while their checksums are compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import torchwright as tw
from folders import causal, save
from language_artifacts import native_artifact
from torchwright.core.errors import ArtifactError
from torchwright.models.decoder.native import NativeModel
from torchwright.models.decoder.packed import FORMS, TENSORS
from torchwright.optimization.artifact.load import quota_notice


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    return native_artifact(save(causal(head_dim=16), folder / "model"), folder / "artifact")


def damaged(artifact: Path, name: str, place: int, to: Path) -> Path:
    """A copy with one bit of a file turned."""
    copy = Path(shutil.copytree(artifact, to / "copy"))
    data = bytearray((copy / name).read_bytes())
    data[place] ^= 1
    (copy / name).write_bytes(data)
    return copy


def test_it_answers(written: Path) -> None:
    loaded = tw.load(written)
    assert loaded.how == "native decoder"
    assert len(loaded.model.generate([3, 4], max_new_tokens=2, stop=[])) == 2


@pytest.mark.parametrize(
    ("name", "place"), [(TENSORS, -1), (TENSORS, 3), (FORMS, 0), ("model/tokenizer.json", 5)]
)
def test_damage_is_told_as_damage(written: Path, tmp_path: Path, name: str, place: int) -> None:
    """A value among weights, which reads like any other; a header, forms and a tokenizer, which cannot be read."""
    with pytest.raises(ArtifactError, match=rf"is damaged.*{name} has changed since it was written"):
        tw.load(damaged(written, name, place, tmp_path))


def test_what_fails_in_whole_files_is_told_as_it_is(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*paths: Path) -> NativeModel:
        raise ArtifactError("the decoder cannot be read")

    monkeypatch.setattr(NativeModel, "load", fail)
    with pytest.raises(ArtifactError, match="the decoder cannot be read"):
        tw.load(written)


def test_threads_beyond_a_cpu_quota_are_pointed_out() -> None:
    assert quota_notice(2, None) is quota_notice(2, 2.0) is None
    assert "2 threads share a CPU quota of 0.5 cores" in (quota_notice(2, 0.5) or "")
    assert "OMP_NUM_THREADS=3 " in (quota_notice(8, 3.5) or "")
