"""Artifacts of strangers: none runs code, opens what is not its own, or fails in other words than ours."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from factories import make_recipe
from folders import causal, save
from language_artifacts import fixed_artifact
from mutations import mutate
from small_artifacts import copied, edit, seal
from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.optimization import api
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.load import load

pytestmark = pytest.mark.usefixtures("elsewhere")


# ------------------------------------------------------------------------------------------------ recipes


def test_a_factory_is_not_imported_without_trust(
    eager: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "owned_factory.py").write_text(
        "import pathlib, torch\n"
        f"pathlib.Path({str(tmp_path / 'owned')!r}).touch()\n"
        "def make():\n    return torch.nn.Linear(16, 8), torch.ones(4, 16)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    copy = copied(eager, tmp_path)
    for name in ("programs.json", "programs.safetensors", "selftest.json", "selftest.safetensors"):
        (copy / name).unlink()

    def hostile(recipe: Any) -> None:
        recipe["workload"] |= {"kind": "module", "model": "owned_factory:make", "metric": None}

    edit(copy / "recipe.json", hostile)
    with pytest.raises(ArtifactError, match="trust"):
        load(copy)
    with pytest.raises(ArtifactError, match="trust"):
        api.verify(copy)
    assert not (tmp_path / "owned").exists()
    assert "owned_factory" not in sys.modules


@pytest.mark.parametrize("change", [{"eval_text": "/etc/hostname"}, {"model": "/etc"}])
def test_nothing_that_a_recipe_names_is_opened_without_trust(tmp_path: Path, change: dict[str, str]):
    path = fixed_artifact(save(causal(head_dim=16), tmp_path / "model"), tmp_path / "artifact")
    (path / "signature").unlink()
    edit(path / "recipe.json", lambda recipe: recipe["workload"].update(change))
    if "model" in change:
        shutil.rmtree(path / "model")
        seal(path)
    with pytest.raises(ArtifactError, match=r"to open .*trust"):
        api.verify(path)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("encoder", "layout", {"shapes": [[1, 8]], "pad": 0, "prompt": "", "cut": None, "part": "../../etc"}),
        ("encoder", "layout", {"shapes": [], "pad": 0, "prompt": "", "cut": None, "part": "."}),
        ("encoder", "layout", {"shapes": [[1, "8"]]}),
        ("encoder", "layout", 5),
        ("language", "geometry", {}),
        ("language", "geometry", {"layers": 2**40}),
        ("encoder", "layout", None),
        ("forward", "layout", {"shapes": [[1, 8]]}),
        ("image", "batch", 2**40),
        ("language", "batch", "1"),
        ("encoder", "tokens", 0),
    ],
)
def test_a_workload_of_odd_numbers_is_damaged(eager: Path, tmp_path: Path, kind: str, field: str, value: Any):
    copy = copied(eager, tmp_path)
    edit(copy / "recipe.json", lambda recipe: recipe["workload"].update({"kind": kind, field: value}))
    with pytest.raises(ArtifactError, match=r"is damaged.*workload"):
        load(copy)


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        *(
            pytest.param(f"{name}.json", marks=pytest.mark.slow)
            for name in ("recipe", "programs", "selftest")
        ),
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100000,
        b'{"a":' * 100000,
        b"\xff\xfe",
        b"",
        b"\x00",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b"9" * 10000,
        b'"\\ud800"',
        b'"' + b"a" * 10**6,
        b'{"format": 1e999}',
        b'{"format": true}',
    ],
    ids=lambda value: repr(value)[:20],
)
def test_odd_bytes_are_damage_and_found_at_once(eager: Path, tmp_path: Path, name: str, content: bytes):
    copy = copied(eager, tmp_path)
    (copy / name).write_bytes(content)
    if name != "manifest.json":
        seal(copy)
    start = time.process_time()
    with pytest.raises(ArtifactError, match=r"is damaged|cannot be read"):
        load(copy)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"0" * 63, b"0" * 65, b"G" * 64, b"0" * 64 + b"\n\n"])
def test_a_signature_that_cannot_be_one_is_damage(eager: Path, tmp_path: Path, content: bytes):
    copy = copied(eager, tmp_path)
    (copy / "signature").write_bytes(content)
    assert not artifact.is_own(copy)
    with pytest.raises(ArtifactError, match="the signature is not one"):
        load(copy)


def test_without_a_signature_an_artifact_is_whole_and_nobodys_own(eager: Path, tmp_path: Path):
    copy = copied(eager, tmp_path)
    (copy / "signature").unlink()
    assert load(copy).how == "graphs, uncompiled"
    assert not artifact.is_own(copy)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../b", "a\\b", "", ".", "a//b", "a\nb", "\ud800"]
)
def test_a_file_name_that_leads_out_is_damage(eager: Path, tmp_path: Path, name: str):
    copy = copied(eager, tmp_path)
    edit(copy / "manifest.json", lambda manifest: manifest["files"].update({name: "0" * 64}))
    with pytest.raises(ArtifactError, match="is damaged"):
        load(copy)


def test_a_file_whose_name_is_no_text_is_named_all_the_same(eager: Path, tmp_path: Path):
    copy = copied(eager, tmp_path)
    Path(os.fsdecode(os.fsencode(copy) + b"/\xff\xfe")).write_text("x")
    with pytest.raises(ArtifactError, match=r"\\xff\\xfe does not belong to it") as caught:
        load(copy)
    str(caught.value).encode()


@pytest.mark.parametrize("folder", [False, True])
def test_a_link_that_leads_out_is_damage(eager: Path, tmp_path: Path, folder: bool):
    copy = copied(eager, tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "tokenizer.json").write_text("{}")
    (copy / "model").symlink_to(tmp_path / "outside" / ("" if folder else "tokenizer.json"))
    seal(copy)
    with pytest.raises(ArtifactError, match="model leads out of it"):
        load(copy)


def test_a_link_within_is_a_file(eager: Path, tmp_path: Path):
    copy = copied(eager, tmp_path)
    (copy / "programs.safetensors").rename(copy / "report2.html")
    (copy / "programs.safetensors").symlink_to("report2.html")
    seal(copy)
    assert load(copy).how == "graphs, uncompiled"


# ------------------------------------------------------------------------------------------ key and folder


def test_where_no_key_can_be_kept_the_artifact_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    with artifact.writing(tmp_path / "out") as folder:
        notice = artifact.finish(folder, make_recipe(), {"engine": "eager", "dtype": "float32"})
    assert notice is not None
    assert "not signed" in notice
    artifact.open_artifact(tmp_path / "out")
    assert not (tmp_path / "out" / "signature").exists()
    assert not artifact.is_own(tmp_path / "out")


def test_a_signed_artifact_is_nobodys_own_where_the_key_cannot_be_read(
    eager: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("x")
    for cache in (tmp_path / "file" / "cache", tmp_path / "odd"):
        monkeypatch.setenv("TORCHWRIGHT_CACHE", str(cache))
        if cache.name == "odd":
            (cache / "signing.key").mkdir(parents=True)
        assert not artifact.is_own(eager)
        assert load(eager).how == "graphs, uncompiled"


def test_two_processes_agree_on_the_key(tmp_path: Path):
    code = "from torchwright.optimization.artifact.folder import _key; print(_key().hex())"
    command = [sys.executable, "-c", code]
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(
            lambda _: subprocess.run(command, check=True, capture_output=True, text=True), range(4)
        )
    assert len({process.stdout for process in done}) == 1


def test_a_key_that_was_never_finished_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(artifact, "KEY_SECONDS", 0.05)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "signing.key").write_bytes(b"half")
    (tmp_path / "file").write_text("x")
    assert artifact.sign(tmp_path / "file") is None


def test_only_a_whole_artifact_is_replaced(eager: Path, tmp_path: Path):
    """A folder that happens to hold a recipe.json is somebody's work."""
    extra, changed, bare = (tmp_path / name for name in ("extra", "changed", "bare"))
    for copy in (extra, changed):
        shutil.copytree(eager, copy)
    bare.mkdir()
    (extra / "thesis.tex").write_text("years of work")
    with (changed / "report.html").open("a") as file:
        file.write("notes of mine")
    (bare / "recipe.json").write_text("{}")
    for path, found in (
        (extra, "thesis.tex"),
        (changed, "report.html has changed"),
        (bare, "no manifest.json"),
    ):
        before = sorted(path.rglob("*"))
        with (
            pytest.raises(ArtifactError, match=rf"exists and is not an artifact.*{found}.*-o"),
            artifact.writing(path),
        ):
            pass
        assert sorted(path.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "changed", "extra", "here"]


# ---------------------------------------------------------------------------------------------- mutations


class Watch:
    """What this process does to files and other programs while a block runs, by Python's audit events."""

    def __init__(self, allowed: Path) -> None:
        self.allowed, self.on = str(allowed), False
        self.seen: list[tuple[str, str]] = []
        sys.addaudithook(self._event)  # for ever: there is no way to remove one

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *error: object) -> None:
        self.on = False

    def _event(self, name: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if name in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"):
            self.seen.append((name, str(arguments)[:200]))
        writes = name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or name in ("os.remove", "os.rename", "os.mkdir", "shutil.rmtree"):
            where = str(arguments[0])
            if not where.startswith((self.allowed, "/dev/", "/proc/")):
                self.seen.append((name, where))


def mutated(
    sources: list[Path], count: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    (tmp_path / "work").mkdir()
    for source in sources:
        load(source)  # imports what loading imports
    watch = Watch(tmp_path)
    # Graphs of a forged engine would be compiled, which takes seconds each, and is no fault.
    monkeypatch.setattr(
        "torchwright.hardware.measure.toolchain.compiler_fault", lambda device: "there is none here"
    )
    for index in range(count):
        source = chance.choice(sources)
        copy = Path(shutil.copytree(source, tmp_path / "work" / "artifact"))
        # Half a character of a mutated name would be too much for what carries a failure to the terminal.
        what = ascii(f"{index} of seed {seed}, {source.parent.name}: {mutate(copy, chance)}")
        start = time.process_time()
        try:
            with watch:
                load(copy)
        except TorchwrightError as error:
            str(error).encode()
        except Exception as error:
            raise AssertionError(f"{what} is told as {type(error).__name__}: {str(error)!a}") from None
        assert time.process_time() - start < 10, what
        assert not watch.seen, what
        shutil.rmtree(copy)


def test_a_file_with_anything_wrong_in_it_loads_or_is_told_in_words(
    eager: Path, free: Path, native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mutated([eager, free, free, native], 16, 0, tmp_path, monkeypatch)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_thousands_of_files_with_anything_wrong_in_them(
    eager: Path, free: Path, native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    mutated([eager, free, free, native], 1000, seed, tmp_path, monkeypatch)
