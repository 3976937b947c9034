"""torch's compiler caches: below the user's own cache folder, never where a neighbour can put code first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchwright.core.paths import UnsafeFolder
from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches

PROGRAM = """
import os, sys
import torch
if sys.argv[1] == "imported":  # the user compiled something before: torch has chosen its own folder
    import torch._dynamo, torch._inductor.codecache
    assert "torchinductor_" in os.environ["TORCHINDUCTOR_CACHE_DIR"]
from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
folder = use_private_caches()
import torch._inductor.codecache as codecache
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.runtime_utils import default_cache_dir
print(folder, cache_dir(), default_cache_dir(), codecache._HEADER_DIR, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["fresh", "imported"])
def test_torch_compiles_below_the_users_cache(tmp_path: Path, when: str) -> None:
    """Every place that torch keeps code in, precompiled headers too, with torch's own folder a neighbour's."""
    shared = tmp_path / "tmp"
    shared.mkdir(mode=0o777)
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(shared), "TORCHWRIGHT_CACHE": str(tmp_path / "cache"), "USER": "victim"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, when],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    private = str(tmp_path / "cache" / "inductor")
    assert ran.stdout.split() == [private, private, private, f"{private}/precompiled_headers"]


VICTIM = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh()).eval()
if sys.argv[1] == "ours":
    from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
    use_private_caches()
with torch.no_grad():
    torch.compile(model)(torch.ones(32, 16))
"""
PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void ran() { if (FILE* file = fopen(MARKER, "w")) fclose(file); }
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a neighbour's folder")
def test_a_neighbours_planted_library_is_never_loaded(tmp_path: Path) -> None:
    """A neighbour makes torch's default folder first, with a library under every name that torch looks up there."""
    theirs = tmp_path / "tmp" / "torchinductor_victim"
    theirs.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {
        "TMPDIR": str(tmp_path / "tmp"),
        "TORCHWRIGHT_CACHE": str(tmp_path / "cache"),
        **dict.fromkeys(("LOGNAME", "USER"), "victim"),
    }

    def run(how: str) -> None:
        words = [sys.executable, "-W", "ignore", "-c", VICTIM, how]
        subprocess.run(words, env=environment, capture_output=True, timeout=240, check=False)

    run("torch")  # the neighbour learns the names by compiling the same
    marker, source, library = tmp_path / "ran", tmp_path / "planted.cpp", tmp_path / "planted.so"
    source.write_text(PLANTED.replace("MARKER", f'"{marker}"'))
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    names = list(theirs.glob("??/*.main.so"))
    assert names
    for name in names:
        name.unlink()
        shutil.copy(library, name)
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, 54321, 54321)
    run("ours")
    assert not marker.exists()
    run("torch")
    assert marker.exists()  # so the plant would have worked


def test_a_chosen_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert use_private_caches() == tmp_path / "mine"


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_chosen_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv(variable, str(tmp_path / "open"))
    with pytest.raises(UnsafeFolder, match="others may write"):
        use_private_caches()


def test_a_cache_that_cannot_be_written_is_replaced_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = use_private_caches()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert use_private_caches() == folder
    assert [record.message for record in caplog.records if "not kept for the next time" in record.message]
    folder.rmdir()
