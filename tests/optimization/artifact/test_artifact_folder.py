"""Artifacts: whole or not there, checked to the last byte, no code from strangers, no pickle."""

from __future__ import annotations

import errno
import json
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchwright as tw
from in_process import own_cache, trials_in_process
from small_artifacts import INPUT, copied, edit, made, mlp, seal
from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.tree import read_tree, write_tree
from torchwright.optimization.engines.compiled.program import read_programs
from torchwright.optimization.trial.client import Context, TrialProcess
from torchwright.optimization.trial.travel import pack
from torchwright.workloads.module import ModuleWorkload


class Branching(nn.Module):
    """Takes a path that depends on its data, which torch.export does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0.5 else self.linear(x) * 2


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("eager"), mlp(), ["dtype"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Precompiled headers pay for themselves from the third package on.
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(quick):
        # One package, for the example's size alone.
        patch.setattr("torchwright.optimization.proof.forms._room", lambda search: 0.0)
        return made(tmp_path_factory.mktemp("compiled"), mlp(), ["compile"])


@pytest.fixture(scope="module")
def unexportable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return made(tmp_path_factory.mktemp("branching"), Branching(), ["dtype"])


@pytest.fixture(autouse=True)
def _the_same_user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key and the cache lie beside the artifact that a test uses."""
    for name in ("eager", "compiled", "unexportable"):
        if name in request.fixturenames:
            cache = request.getfixturevalue(name).parent / "cache"
            own_cache(monkeypatch, cache)


# -------------------------------------------------------------------------------------------- round trips


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch 2.11 unpacks packages in /tmp, whatever TMPDIR says"
)
def test_what_a_trial_unpacks_goes_with_its_folder(compiled: Path, tmp_path: Path):
    """A trial is killed, and then removes nothing itself."""
    context = Context(
        workload=pack(ModuleWorkload(mlp(), (INPUT,)), tmp_path),
        device="cpu",
        threads=1,
        seed=0,
        scratch=tmp_path,
        deadline=time.monotonic() + 60,
    )
    with TrialProcess(context) as process:
        process.ask("load_artifact", path=str(compiled), trust=True)
        assert list(tmp_path.glob("aotinductor_*"))


def test_graphs_without_compiled_code_run_as_the_recipe_says(eager: Path):
    loaded = tw.load(eager)
    assert loaded.how == "graphs, uncompiled"
    assert loaded.notices == []
    assert [step.name for step in loaded.recipe.steps] == ["dtype"]
    torch.testing.assert_close(loaded.model(INPUT), mlp()(INPUT), rtol=0.05, atol=0.02)
    assert loaded.model(INPUT).dtype == torch.float32


def test_code_that_was_compiled_for_another_number_of_threads_says_so(compiled: Path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        (notice,) = tw.load(compiled).notices
    finally:
        torch.set_num_threads(before)
    assert f"compiled for {before} threads, and this process has {before + 1}" in notice


def test_a_compiled_artifact_runs_its_own_code(compiled: Path):
    loaded = tw.load(compiled)
    assert loaded.how == "ahead-of-time package"
    assert loaded.notices == []
    torch.testing.assert_close(loaded.model(INPUT), mlp()(INPUT), rtol=1e-3, atol=1e-4)
    strict = tw.load(compiled, on_new_shape="error").model
    with pytest.raises(tw.TorchwrightError, match=r"compiled for other calls.*float32\[\w+, 16\]"):
        strict(INPUT.double())


def test_a_model_that_does_not_export_needs_its_module_and_replays_on_it(unexportable: Path):
    with pytest.raises(
        ArtifactError, match=r"for a module of your own. Found: Branching.*model=fresh_module"
    ):
        tw.load(unexportable)
    torch.manual_seed(0)
    fresh = Branching()
    loaded = tw.load(unexportable, model=fresh)
    assert loaded.how == "the recipe on the caller's model"
    torch.testing.assert_close(loaded.model(INPUT), fresh.eval()(INPUT), rtol=0.05, atol=0.02)
    assert fresh.linear.weight.dtype == torch.float32  # the caller's model is not touched


def test_another_model_than_the_recipes_own_fails_the_self_test(unexportable: Path):
    torch.manual_seed(1)
    with pytest.raises(ArtifactError, match="fails its self-test"):
        tw.load(unexportable, model=Branching())


# ------------------------------------------------------------------------------------- damaged and foreign


def files_of(kind: str) -> list[str]:
    common = ["recipe.json", "programs.json", "programs.safetensors", "selftest.json", "selftest.safetensors"]
    return [*common, "report.html", *(["native/package-0.pt2"] if kind == "compiled" else [])]


@pytest.mark.parametrize("name", files_of("compiled"))
def test_a_flipped_byte_is_found_and_named(compiled: Path, tmp_path: Path, name: str):
    path = copied(compiled, tmp_path)
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=r"is damaged") as found:
        tw.load(path)
    assert name in str(found.value) or name == "recipe.json"


def test_a_flipped_byte_in_the_manifest_is_found(eager: Path, tmp_path: Path):
    path = copied(eager, tmp_path)
    manifest = path / artifact.MANIFEST
    manifest.write_text(manifest.read_text().replace('"engine": "eager"', '"engine": "jit"'))
    assert not artifact.is_own(path)
    digest = json.loads(manifest.read_text())["files"]["recipe.json"]
    manifest.write_text(manifest.read_text().replace(digest, digest[::-1]))
    with pytest.raises(ArtifactError, match=r"recipe.json has changed"):
        tw.load(path)


@pytest.mark.parametrize("name", files_of("eager"))
def test_a_missing_file_is_named(eager: Path, tmp_path: Path, name: str):
    path = copied(eager, tmp_path)
    (path / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        tw.load(path)


def test_a_file_that_does_not_belong_is_named(eager: Path, tmp_path: Path):
    path = copied(eager, tmp_path)
    (path / "extra.py").write_text("1")
    with pytest.raises(ArtifactError, match=r"extra.py does not belong to it"):
        tw.load(path)


@pytest.mark.parametrize("name", ["recipe.json", "manifest.json"])
def test_truncated_json_is_said_in_words(eager: Path, tmp_path: Path, name: str):
    path = copied(eager, tmp_path)
    text = (path / name).read_text()
    (path / name).write_text(text[: len(text) // 2])
    with pytest.raises(ArtifactError, match="is damaged"):
        tw.load(path)


@pytest.mark.parametrize("name", ["recipe.json", "manifest.json"])
@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '{"format": "x"}'])
def test_json_of_another_shape_is_said_in_words(eager: Path, tmp_path: Path, name: str, content: str):
    path = copied(eager, tmp_path)
    (path / name).write_text(content)
    with pytest.raises(ArtifactError, match="is damaged"):
        tw.load(path)


@pytest.mark.parametrize("name", ["recipe.json", "manifest.json"])
def test_a_newer_format_asks_for_a_newer_version(eager: Path, tmp_path: Path, name: str):
    path = copied(eager, tmp_path)
    edit(path / name, lambda data: data.update(format=99))
    with pytest.raises(ArtifactError, match=r"newer Torchwright.*format 99.*pip install -U"):
        tw.load(path)


def test_an_unknown_field_is_refused_by_name(eager: Path, tmp_path: Path):
    path = copied(eager, tmp_path)
    edit(path / "recipe.json", lambda data: data["budget"].update(surprise=1))
    with pytest.raises(ArtifactError, match=r"budget.surprise"):
        tw.load(path)


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("a file")])
def test_what_is_no_artifact_is_said_in_words(tmp_path: Path, make: Callable[[Path], Any]):
    make(tmp_path / "x")
    with pytest.raises(ArtifactError, match=r"no artifact at|is not an artifact"):
        tw.load(tmp_path / "x")


@pytest.mark.slow
def test_strangers_code_is_left_aside_and_the_graphs_compiled_afresh(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as stranger:
        stranger.setattr("torchwright.optimization.artifact.folder._key", lambda: b"another user's")
        trusted = tw.load(compiled, trust=True)
        assert (trusted.how, trusted.notices) == ("ahead-of-time package", [])
        loaded = tw.load(compiled)
    assert loaded.how == "recompiled graphs"
    assert len(loaded.notices) == 1
    assert "not built by this user" in loaded.notices[0]
    torch.testing.assert_close(loaded.model(INPUT), mlp()(INPUT), rtol=1e-3, atol=1e-4)

    # On another machine the same happens, whoever made it; the code compiled above is in the cache now.
    monkeypatch.setattr(
        "torchwright.optimization.artifact.folder.same_machine", lambda then, here: "torch: 1.0 then, 9.0 now"
    )
    loaded = tw.load(compiled, trust=True)
    assert loaded.how == "recompiled graphs"
    assert loaded.notices == ["compiled code left aside: torch: 1.0 then, 9.0 now; compiling afresh"]


def test_without_a_compiler_foreign_code_runs_uncompiled_with_a_notice(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own_cache(monkeypatch, tmp_path / "another user's")
    monkeypatch.setattr(
        "torchwright.hardware.measure.toolchain.compiler_fault", lambda device: "there is no C++ compiler"
    )
    loaded = tw.load(compiled)
    assert loaded.how == "graphs, uncompiled"
    assert loaded.notices[1] == "running uncompiled: there is no C++ compiler"
    torch.testing.assert_close(loaded.model(INPUT), mlp()(INPUT), rtol=1e-3, atol=1e-4)


def test_fingerprints_differ_by_what_compiled_code_depends_on(eager: Path):
    import dataclasses

    recipe, _ = artifact.open_artifact(eager)
    here = recipe.fingerprint
    assert artifact.same_machine(here, here) is None
    older = dataclasses.replace(here, torch="1.0")
    assert artifact.same_machine(older, here) == f"torch: 1.0 then, {here.torch} now"
    bare = dataclasses.replace(here, device=dataclasses.replace(here.device, isa=()))
    assert "0 features then" in (artifact.same_machine(bare, here) or "")
    libraries = dataclasses.replace(here, libraries={}, python="3.99")
    assert artifact.same_machine(libraries, here) is None


def test_an_answer_that_is_off_is_an_error(eager: Path, tmp_path: Path):
    path = copied(eager, tmp_path)
    kept = read_tree(path / "selftest")
    write_tree(path / "selftest", {**kept, "output": [kept["output"][0] + 10]})
    seal(path)
    with pytest.raises(ArtifactError, match=r"fails its self-test.*off by"):
        tw.load(path)


class Odd(nn.Module):
    """Complex and random outputs, and arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, xs: list[torch.Tensor], scale: float | None = None, flag: bool = True) -> Any:
        y = sum(self.linear(x) for x in xs)
        return torch.fft.rfft(y if flag and scale is None else -y), y + torch.rand_like(y), None


class Sequences:
    """A class that no file keeps: neither a tuple nor a dataclass."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors


class Packed(nn.Module):
    """Takes a class of its own and gives another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8)

    def forward(self, x: Sequences) -> torch.Tensor:
        return self.lstm(nn.utils.rnn.pack_sequence(x.tensors))[0].data


@pytest.mark.plain("list")
@pytest.mark.parametrize(
    "inputs", [{"xs": [INPUT, INPUT], "scale": None, "flag": False}, ([INPUT],)], ids=["constants", "list"]
)
def test_odd_inputs_and_outputs_are_kept(inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trials_in_process(monkeypatch, 2.0)
    torch.manual_seed(0)
    model = Odd().eval()
    result = tw.optimize(model, inputs, techniques=["dtype"], max_drop=0.05, time_budget=60)
    loaded = tw.load(result.save(tmp_path / "out"))
    call = (lambda f: f(**inputs)) if isinstance(inputs, dict) else (lambda f: f(*inputs))
    torch.testing.assert_close(call(loaded.model)[0], call(model)[0], rtol=0.1, atol=0.1)


def test_inputs_that_no_file_keeps_leave_the_self_test_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trials_in_process(monkeypatch, 2.0)
    torch.manual_seed(0)
    model, inputs = Packed(), (Sequences([torch.randn(5, 4), torch.randn(3, 4)]),)
    result = tw.optimize(model, inputs, techniques=["dtype"], max_drop=0.05, time_budget=60)
    assert result.model(*inputs).shape == (8, 8)
    with pytest.warns(UserWarning, match="holds no model"):
        path = result.save(tmp_path / "out")
    assert not list(path.glob("selftest*"))
    assert tw.load(path, model=model).model(*inputs).shape == (8, 8)


# ------------------------------------------------------------------------------------------------ hostile


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch owned')",
        "(lambda: 1)()",
        "s0.__class__",
        "Symbol('__import__')",
        "[x for x in (1,)]",
        "Max(1, open('f'))",
        "'" + "a" * 2000 + "'",
    ],
)
def test_a_shape_that_is_code_is_refused(eager: Path, tmp_path: Path, text: str):
    path = copied(eager, tmp_path)

    def hostile(graphs: Any) -> None:
        graph = graphs["forward"]["graph"]["graph_module"]["graph"]
        values = graph["tensor_values"]
        first = next(iter(values.values()))
        first["sizes"][0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 4}}}

    edit(path / "programs.json", hostile)
    with pytest.raises(ArtifactError, match=r"cannot be read.*a shape expression that is not one"):
        tw.load(path)
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "target", ["torch.hub.load", "torch.load", "os.system", "_operator.call", "builtins.eval"]
)
def test_a_graph_that_calls_anything_but_operators_is_refused(eager: Path, tmp_path: Path, target: str):
    path = copied(eager, tmp_path)

    def hostile(graphs: Any) -> None:
        for node in graphs["forward"]["graph"]["graph_module"]["graph"]["nodes"]:
            node["target"] = target

    edit(path / "programs.json", hostile)
    with pytest.raises(ArtifactError):
        tw.load(path)


@pytest.mark.parametrize("content", ["{", "[]", '{"forward": 3}', '{"forward": {"graph": {}}}', "[" * 100000])
def test_graphs_of_another_shape_are_said_in_words(eager: Path, tmp_path: Path, content: str):
    path = copied(eager, tmp_path)
    (path / "programs.json").write_text(content)
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_programs(path)


def test_nothing_is_unpickled_while_loading(eager: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    cache = compiled.parent / "cache"
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    tw.load(eager)
    own_cache(monkeypatch, cache)
    assert tw.load(compiled).how == "ahead-of-time package"


def test_nothing_in_an_artifact_is_a_pickle(eager: Path, compiled: Path, unexportable: Path):
    for folder in (eager, compiled, unexportable):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} <= {".json", ".safetensors", ".html", ".pt2", ""}
        for path in files:
            data = path.read_bytes()
            if path.suffix == ".safetensors":
                length = int.from_bytes(data[:8], "little")
                assert isinstance(json.loads(data[8 : 8 + length]), dict)
            elif path.suffix == ".json":
                json.loads(data)
            elif path.suffix == ".pt2":
                assert path.parent.name == artifact.NATIVE
                names = zipfile.ZipFile(path).namelist()
                assert not [name for name in names if name.endswith((".pkl", ".pt", ".pickle"))]
            else:
                data.decode()


# -------------------------------------------------------------------------------------- whole or not there


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_that_is_no_artifact_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(ArtifactError, match=r"exists and is not an artifact.*-o"),
        artifact.writing(tmp_path / "mine"),
    ):
        pass
    (tmp_path / "file").write_text("a file")
    with (
        pytest.raises(ArtifactError, match="exists and is not an artifact"),
        artifact.writing(tmp_path / "file"),
    ):
        pass
    assert leftovers(tmp_path) == ["file", "mine"]
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_a_place_where_nothing_can_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("keep me")
    for place in (tmp_path / "file" / "out", Path("/proc/none")):
        with pytest.raises(WorkloadError, match="nothing can be written"), artifact.writing(place):
            raise AssertionError("nothing is written")
    assert (tmp_path / "file").read_text() == "keep me"


def test_an_empty_folder_and_an_old_artifact_are_replaced(tmp_path: Path, eager: Path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "copy"):
        if name == "copy":
            copied(eager, tmp_path)
        with artifact.writing(tmp_path / name) as folder:
            (folder / "recipe.json").write_text("new")
        assert leftovers(tmp_path / name) == ["recipe.json"]
    assert leftovers(tmp_path) == ["copy", "empty"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [False, True])
def test_a_full_disk_or_an_interrupt_leaves_nothing_new(
    tmp_path: Path, eager: Path, error: BaseException, before: bool
):
    path = copied(eager, tmp_path) if before else tmp_path / "copy"
    with pytest.raises(type(error)), artifact.writing(path) as folder:  # noqa: PT012
        (folder / "recipe.json").write_text("half")
        raise error
    assert leftovers(tmp_path) == (["copy"] if before else [])
    if before:
        assert tw.load(path).how == "graphs, uncompiled"


def test_a_disk_that_fills_up_while_saving_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trials_in_process(monkeypatch, 2.0)
    monkeypatch.setattr("torchwright.optimization.artifact.folder.finish", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        tw.optimize(mlp(), INPUT, techniques=[], time_budget=60)
    assert leftovers(tmp_path) == []


@pytest.fixture
def killed_writer() -> Callable[[Path], None]:
    """A process that writes an artifact and is killed, -9, in the middle of it."""
    code = """
import sys, time, pathlib
from torchwright.optimization.artifact.folder import writing
with writing(pathlib.Path(sys.argv[1])) as folder:
    (folder / "recipe.json").write_text("half")
    print("writing", flush=True)
    time.sleep(1000)
"""

    def run(path: Path) -> None:
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "writing\n"
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL

    return run


@pytest.mark.parametrize("before", [False, True])
def test_a_kill_in_the_middle_leaves_nothing_or_the_whole_old_artifact(
    tmp_path: Path, eager: Path, killed_writer: Callable[[Path], None], before: bool
):
    path = copied(eager, tmp_path) if before else tmp_path / "copy"
    killed_writer(path)
    assert [name for name in leftovers(tmp_path) if not name.startswith(".")] == (["copy"] if before else [])
    if before:
        assert tw.load(path).how == "graphs, uncompiled"


def test_the_signing_key_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own_cache(monkeypatch, tmp_path / "new" / "cache")
    (tmp_path / "file").write_text("x")
    first = artifact.sign(tmp_path / "file")
    assert first == artifact.sign(tmp_path / "file")
    key = tmp_path / "new" / "cache" / "signing.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert leftovers(key.parent) == ["signing.key"]
