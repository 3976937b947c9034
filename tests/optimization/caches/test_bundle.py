"""Bundles of compiled code: nothing is compiled with one, each miss has its reason, no stranger's pickle is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torchwright.cli import main
from torchwright.core.errors import ArtifactError
from torchwright.optimization.artifact.sealed import digests, seal
from torchwright.optimization.caches import Bundle, pack, unpack
from torchwright.optimization.caches.bundle import BUNDLE
from torchwright.optimization.caches.place import BuildEnvironment, differences
from torchwright.optimization.caches.why import Compiled, compile_calls, counting, explain
from torchwright.optimization.engines.jit import CODE, GRAPHS
from torchwright.workloads.module import ModuleWorkload

PLACE = BuildEnvironment(
    torch="2.13.0",
    python="3.11.7",
    system="Linux x86_64",
    isa=("avx2", "avx512f"),
    threads=2,
    compiler="g++ 12",
    libraries="/opt/torch",
    flags={"freezing": "False", "max_autotune": "False"},
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x) * 2).relu().sum(-1)


def workload(rows: int) -> ModuleWorkload:
    return ModuleWorkload(Net().eval(), (torch.randn(rows, 8),))


@pytest.fixture
def _clean() -> Iterator[None]:
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield
    torch._dynamo.reset()


def made_up(folder: Path, place: BuildEnvironment = PLACE, calls: tuple[str, ...] = ()) -> Path:
    """A bundle that nobody's code is in."""
    folder.mkdir()
    (folder / GRAPHS).write_bytes(b"no pickle")
    bundle = Bundle(made_by="nobody", calls=calls, place=place, files=digests(folder / BUNDLE))
    (folder / BUNDLE).write_text(json.dumps(asdict(bundle)))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("_clean")
def test_with_a_bundle_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Compiled] = []
    calls = compile_calls(workload(3), torch.float32, lambda call, made: heard.append(made))
    assert calls == ["forward: float32[3, 8]"]
    assert heard[0].missed == 1
    assert heard[0].objects > 0
    bundle = pack(tmp_path / "bundle", calls=calls)
    pack(tmp_path / "bundle", calls=calls)  # takes the place of the one that was there
    assert {GRAPHS, CODE} <= set(bundle.files)
    assert explain(tmp_path / "bundle", workload(3), torch.float32) == []
    (missed,) = explain(tmp_path / "bundle", workload(5), torch.float32)
    assert missed.call == "forward: float32[5, 8]"
    assert missed.compiled.missed == 1
    assert any("shapes or types" in reason and "[3, 8]" in reason for reason in missed.reasons)
    with torch._inductor.config.patch(max_fusion_size=7):
        (missed,) = explain(tmp_path / "bundle", workload(3), torch.float32)
    assert missed.reasons == ("the flag max_fusion_size: 64 there, 7 here",)
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "another-user"))
    with pytest.raises(ArtifactError, match="was not packed by this user"):
        explain(tmp_path / "bundle", workload(3), torch.float32)
    assert explain(tmp_path / "bundle", workload(3), torch.float32, trust=True) == []
    assert (tmp_path / "another-user" / "kernels").is_dir() == (tmp_path / "bundle" / "kernels").is_dir()


def test_pickles_of_others_are_refused_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("torchwright.optimization.caches.bundle.restore_compiled", read.append)
    folder = made_up(tmp_path / "bundle")
    with pytest.raises(ArtifactError, match=r"pickles \(cache\.bin\).*--trust"):
        unpack(folder)
    assert main(["cache", "unpack", str(folder)]) == 2
    assert "pickles" in capsys.readouterr().err
    assert read == []
    seal(folder / BUNDLE)
    unpack(folder)
    (folder / GRAPHS).write_bytes(b"another")
    with pytest.raises(ArtifactError, match=r"not as it was packed.*cache\.bin"):
        unpack(folder)
    assert read == [folder]
    unpack(folder, trust=True)
    assert read == [folder, folder]
    with pytest.raises(ArtifactError, match="no bundle"):
        unpack(tmp_path)
    (folder / BUNDLE).write_text('{"format": 1, "calls": [7]}')
    with pytest.raises(ArtifactError):
        unpack(folder, trust=True)


@pytest.mark.filterwarnings("ignore")
def test_graphs_that_torch_cannot_read_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "user"))
    folder = made_up(tmp_path / "bundle")
    assert main(["cache", "unpack", str(folder), "--trust"]) == 2
    assert "torch cannot read its graphs (cache.bin)" in capsys.readouterr().err


def test_what_is_otherwise_is_said() -> None:
    assert differences(PLACE, PLACE) == []
    here = replace(
        PLACE,
        torch="2.14.0",
        isa=("avx2", "amx_int8"),
        compiler="clang 19",
        libraries="/srv/torch",
        flags={"freezing": "True", "max_autotune": "False"},
    )
    assert differences(PLACE, here) == [
        "torch: 2.13.0 there, 2.14.0 here",
        "the processor's instructions: avx512f there, not here",
        "the processor's instructions: amx_int8 here, not there",
        "the C++ compiler: g++ 12 there, clang 19 here",
        "where torch lies: /opt/torch there, /srv/torch here",
        "the flag freezing: False there, True here",
    ]


def test_a_bundle_takes_the_place_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="exists and is not"):
        pack(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_nothing_is_counted_where_nothing_is_compiled() -> None:
    with counting() as count:
        torch.randn(3).sum()
    assert count() == Compiled()
    assert not count().anything
