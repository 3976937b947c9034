"""Engines of other libraries, where these are installed; what refuses a stranger's file is tried everywhere."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import in_process
import torchwright as tw
from converted_models import error, needs, prepared
from masked_attention import Attention, causal
from small_artifacts import INPUT, made, mlp, seal
from torchwright.core.errors import ArtifactError, RefusedTechnique, WorkloadError
from torchwright.hardware.devices import get_device
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.engines import converted
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.base import engines
from torchwright.optimization.engines.describe import describe_target
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.optimization.engines.rewrites.attention_graph import attention_as_in_pytorch
from torchwright.optimization.techniques.base import conversion_of, from_step, parse_step
from torchwright.testing.models import ConvNet
from torchwright.workloads.base import Case
from torchwright.workloads.module import ModuleWorkload

OTHERS = ("openvino", "onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")  # in a trial's process nobody sees what libraries say


def changed(name: str, **methods: Any) -> AbstractContextManager[None]:
    """Register an engine with other methods in place of `name`."""
    return engines.adding({name: type("Changed", (engines.get(name),), methods)})


@pytest.mark.parametrize(
    ("step", "least", "most"),
    [
        ("openvino", 0.0, 1e-5),
        ("openvino:precision=bf16", 1e-4, 2e-2),
        ("openvino:precision=bf16,autocast=true", 1e-4, 2e-2),
        ("openvino:precision=int8", 1e-3, 5e-2),
        ("onnxruntime", 0.0, 1e-5),
    ],
)
def test_an_artifact_answers_other_batches_without_its_model(
    tmp_path: Path, step: str, least: float, most: float
) -> None:
    name = step.partition(":")[0]
    needs(step)
    path = made(tmp_path, mlp(), [step])
    recipe, manifest = artifact.open_artifact(path)
    assert (manifest.engine, manifest.way, recipe.runs_as) == (name, "native", engines.get(name).how)
    assert manifest.takes.batched == (0,)
    loaded = tw.load(path, trust=True)
    for rows in (1, 4, 9):
        x = INPUT.repeat(3, 1)[:rows]
        assert least <= error(loaded.model(x), mlp()(x)) <= most


@pytest.mark.parametrize("name", OTHERS)
def test_a_strangers_graph_is_read_with_trust_alone(tmp_path: Path, name: str) -> None:
    needs(name)
    path = made(tmp_path, mlp(), [name])
    assert not artifact.is_own(path)
    unread = changed(name, _opened=lambda *_: pytest.fail("it was read"))
    with unread, pytest.raises(ArtifactError, match="not built by this user"):
        tw.load(path)
    assert tw.load(path, trust=True).how == engines.get(name).how


@pytest.mark.slow
def test_with_trust_a_graph_is_opened_in_the_callers_process_and_by_bench_in_a_child(tmp_path: Path) -> None:
    """ONNX Runtime is replaced by a package that crashes, as it may over a forged graph."""
    needs("onnxruntime")
    path = made(tmp_path, mlp(), ["onnxruntime"])
    crashing = tmp_path / "crashing" / "onnxruntime"
    crashing.mkdir(parents=True)
    (crashing / "__init__.py").write_text("import os\nos.abort()\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(crashing.parent), *sys.path])}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        words = (sys.executable, "-W", "ignore", *words)
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    load = "import sys, torch, torchwright as tw\ntw.load(sys.argv[1], trust=True).model(torch.ones(4, 16))"
    assert run("-c", load, str(path)).returncode == -signal.SIGABRT
    asked = run("-m", "torchwright", "bench", str(path), "--trust")
    assert asked.returncode == 2, asked.stderr
    assert "crashed (SIGABRT)" in asked.stderr
    assert "Traceback" not in asked.stderr


@pytest.mark.parametrize(
    ("count", "words"), [(0, "fails on this call"), (2, "other results than the call")], ids=["none", "two"]
)
def test_a_graph_that_fails_when_it_runs_is_told(tmp_path: Path, count: int, words: str) -> None:
    """The library takes a file with another number of results, and the call shows it."""
    needs("onnxruntime")
    import onnx  # pyright: ignore[reportMissingImports]

    path = made(tmp_path, mlp(), ["onnxruntime"])
    shutil.copytree(path, tmp_path / "copy")
    file = tmp_path / "copy" / "onnxruntime" / "call-0"
    model = onnx.load_model_from_string(file.read_bytes())
    outputs = list(model.graph.output) * count
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    file.write_bytes(model.SerializeToString())
    seal(tmp_path / "copy")
    with pytest.raises(ArtifactError, match=words):
        tw.load(tmp_path / "copy", trust=True).model(INPUT)


def test_an_ir_without_results_is_told(tmp_path: Path) -> None:
    """Found by forged graphs: OpenVINO runs it, and answers nothing."""
    needs("openvino")
    path = made(tmp_path, mlp(), ["openvino"])
    shutil.copytree(path, tmp_path / "copy")
    for file in (tmp_path / "copy").rglob("graph.xml"):
        graph = ElementTree.parse(file)
        layers, edges = graph.find("layers"), graph.find("edges")
        assert layers is not None
        assert edges is not None
        for result in [layer for layer in layers if layer.get("type") == "Result"]:
            layers.remove(result)
            for edge in [edge for edge in edges if edge.get("to-layer") == result.get("id")]:
                edges.remove(edge)
        graph.write(file)
    seal(tmp_path / "copy")
    with pytest.raises(ArtifactError):
        tw.load(tmp_path / "copy", trust=True).model(INPUT)


@pytest.mark.parametrize("name", OTHERS)
def test_a_recipe_is_replayed_on_the_callers_module(tmp_path: Path, name: str) -> None:
    needs(name)
    path, other = made(tmp_path, mlp(), [name]), mlp()
    assert tw.load(path, model=other).how == "the recipe on the caller's model"
    torch.testing.assert_close(tw.load(path, model=other).model(INPUT), other(INPUT), rtol=1e-4, atol=1e-5)


class Named(nn.Module):
    """Asked for one of its parts by a word, as a pipeline's components are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, part: str, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(part)(x)


@pytest.mark.parametrize("name", OTHERS)
def test_a_word_among_the_inputs_is_none_of_the_graphs(name: str) -> None:
    needs(name)
    model, x = Named().eval(), torch.randn(3, 8)
    target = make_target(ModuleWorkload(model, ("down", x)), get_device("cpu").identify())
    from_step(parse_step(name)).apply(target)
    run = engines.get(name).prepare(target, None)
    (case,) = target.workload.cases(torch.float32)
    assert error(run(case), model.down(x)) < 1e-5


class Turned(nn.Module):
    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.layer(x).reshape(-1, 8, 2))
        return torch.view_as_real(pairs * self.turns).flatten(1)


@pytest.mark.parametrize("name", OTHERS)
def test_complex_numbers_reach_it_as_pairs(name: str) -> None:
    needs(name)
    torch.manual_seed(0)
    model, x = Turned().eval(), torch.randn(3, 16)
    engine = prepared(["whole_graph", name], model, x)
    for rows in (3, 5):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            wanted = model.double()(x.double())
        assert error(engine(Case("other", (x,))).double(), wanted) < 1e-5
        model.float()


@pytest.mark.parametrize("name", OTHERS)
def test_a_squeeze_of_a_wider_dimension_changes_nothing(name: str) -> None:
    """As in PyTorch; pipelines of diffusers squeeze what is mostly one."""
    needs(name)

    class Squeezes(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.squeeze(1) + 1, x[:, :1].squeeze(1) * 2

    x = torch.randn(2, 3, 4)
    found = prepared([name], Squeezes(), x)(Case("forward", args=(x,), kwargs={}))
    for one, wanted in zip(found, Squeezes()(x), strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("rows", [1, 4])
def test_layers_that_are_left_alone_stay_in_float(tmp_path: Path, rows: int) -> None:
    needs("openvino")
    torch.manual_seed(0)
    model, x = ConvNet().eval(), torch.randn(rows, 3, 16, 16)
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]

    def quantized(skip: str) -> int:
        folder = tmp_path / (skip or "all")
        folder.mkdir()
        prepared([f"openvino:precision=int8{skip and ',skip='}{skip}"], model, x, folder=folder)
        return len(re.findall('element_type="[iu]8"', (folder / "call-0" / "graph.xml").read_text()))

    assert (quantized(""), quantized(names[1]), quantized("+".join(names))) == (3, 2, 0)


PRECISIONS = ("bf16", "int8", "f32", "int8,skip=0")


def test_what_one_precision_converted_serves_the_others(tmp_path: Path) -> None:
    needs("openvino")
    steps = [f"openvino:precision={precision}" for precision in PRECISIONS]
    assert len({conversion_of([parse_step(step)]) for step in steps}) == 1
    engine: Any = engines.get("openvino")
    found: list[int] = []
    convert = lambda *arguments: [found.append(1), engine.convert(*arguments)]
    files: dict[str, str] = {}
    for shared in (tmp_path / "shared", None):
        found.clear()
        for step in steps:
            folder = tmp_path / f"{step}-{shared is None}"
            folder.mkdir()
            with changed("openvino", convert=convert):
                prepared([step], mlp(), INPUT, folder=folder, conversion=shared)
            call = folder / "call-0"
            assert {file.name for file in call.iterdir()} == {"graph.xml", "graph.bin", "options.json"}
            text = "".join((call / name).read_text() for name in ("graph.xml", "options.json"))
            text = re.sub(r"(Constant|Convert|Result)_[0-9]+", r"\1", text)  # counted over the process
            assert files.setdefault(step, text) == text  # as if nothing had been there
        assert len(found) == (1 if shared else len(steps))
    assert len(set(files.values())) == len(steps)


@pytest.mark.parametrize("name", OTHERS)
def test_bench_takes_another_number_of_rows(tmp_path: Path, name: str) -> None:
    needs(name)
    path = made(tmp_path, mlp(), [name])
    assert tw.bench(str(path), batch=3, trust=True)["batch"] == 3


def test_a_conversion_that_answers_other_rows_wrongly_leaves_one_for_the_calls_own(tmp_path: Path) -> None:
    needs("openvino")
    shared, there = tmp_path / "shared", {"convert": lambda *_: pytest.fail("it was there")}
    for name, methods in (("one", {}), ("two", there)):
        (tmp_path / name).mkdir()
        with changed("openvino", _checked=lambda *_: None, **methods):
            calls = prepared(["openvino"], mlp(), INPUT, folder=tmp_path / name, conversion=shared).calls
        assert [call.sizes for call in calls] == [{}]
    texts = [(folder / "call-0" / "graph.xml").read_text() for folder in (tmp_path / "one", shared)]
    assert texts[0] == texts[1]


class Tokens(nn.Module):
    """Attention with a mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.embedding, self.layers = (
            nn.Embedding(50, 32),
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(ids) * 1.0, src_key_padding_mask=mask)


class Squeezes(nn.Module):
    """One row has another shape than one of several, which torch.export does not see: it supposes two at least."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze()


@pytest.mark.parametrize("name", OTHERS)
def test_one_row_is_answered_where_it_is_another_graph(name: str, tmp_path: Path) -> None:
    """A batch of one was refused: "this model was compiled for other calls"."""
    needs(name)
    model = Squeezes().eval()
    path = made(tmp_path, model, [name])
    loaded = tw.load(path, trust=True)
    for rows in (1, 2, 4, 9):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(loaded.model(x), model(x), rtol=1e-5, atol=1e-6)


def _tokens(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(3, length, dtype=torch.bool)
    mask[1, length - 1 :] = True
    return torch.randint(0, 50, (3, length)), mask


@pytest.mark.parametrize("name", OTHERS)
def test_sizes_that_a_call_leaves_free_are_free_in_a_converted_graph(name: str, tmp_path: Path) -> None:
    needs(name)
    length, model, example = torch.export.Dim("length", min=2, max=64), Tokens().eval(), _tokens(12)
    workload = ModuleWorkload(model, example, dynamic=({1: length}, {1: length}))
    target = make_target(workload, get_device("cpu").identify())
    from_step(parse_step(name)).apply(target)
    engine = engines.get(name).prepare(target, tmp_path)
    assert len(engine.calls) == 2  # at the example's sizes, and at any
    opened = engines.get(name).opened(tmp_path, engine.calls, "cpu")
    for tokens in (12, 5, 40):
        inputs = _tokens(tokens)
        with torch.no_grad():
            assert error(opened(Case(name="forward", args=inputs)), model(*inputs)) < 1e-5
    with pytest.raises(WorkloadError, match="compiled for other calls"):
        opened(Case(name="forward", args=_tokens(65)))


@pytest.mark.parametrize("name", OTHERS)
def test_a_conversion_that_answers_other_sizes_wrongly_has_the_examples_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(name)
    length, model, example = torch.export.Dim("length", min=2, max=64), Tokens().eval(), _tokens(12)
    workload = ModuleWorkload(model, example, dynamic=({1: length}, {1: length}))
    target = make_target(workload, get_device("cpu").identify())
    from_step(parse_step(name)).apply(target)
    real = converted._error  # pyright: ignore[reportPrivateUsage]
    wrong = lambda *asked: float("inf") if tensors_of(asked[2])[0].shape[1] != 12 else real(*asked)
    monkeypatch.setattr(converted, "_error", wrong)
    engine = engines.get(name).prepare(target, tmp_path)
    assert [call.sizes for call in engine.calls] == [{}]
    opened = engines.get(name).opened(tmp_path, engine.calls, "cpu")
    with torch.no_grad():
        assert error(opened(Case(name="forward", args=example)), model(*example)) < 1e-5


def test_recipes_that_change_the_model_convert_it_themselves() -> None:
    plain, folded = parse_step("openvino:precision=bf16"), parse_step("fold_batchnorm")
    assert conversion_of([plain]) != conversion_of([folded, plain]) != conversion_of([])
    assert conversion_of([]) is conversion_of([folded]) is conversion_of([parse_step("onnxruntime")]) is None


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("heads", "scale", "added"), [(1, 0.3, False), (2, None, True), (2, 0.25, False)])
def test_attention_is_pytorchs_where_a_query_sees_no_key_and_of_one_head(
    name: str, heads: int, scale: float | None, added: bool, tmp_path: Path
) -> None:
    """Left padding under a causal mask: OpenVINO gave NaN, ONNX Runtime an average."""
    needs(name)
    model, x = Attention(heads, scale, added).eval(), torch.randn(4, 8, 16)
    engine = prepared([name], model, x, causal(), folder=tmp_path)
    opened = engines.get(name).opened(tmp_path, engine.calls, "cpu")
    for seen in (causal(), causal(padding=3)):
        with torch.no_grad():
            assert error(opened(Case(name="forward", args=(x, seen))), model(x, seen)) < 1e-5


def test_a_constant_mask_costs_no_operator() -> None:
    class Windows(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x, causal())

    for added in (True, False):
        program = torch.export.export(Windows(2, None, added).eval(), (torch.randn(4, 8, 16),), strict=False)
        before = len(program.graph.nodes)
        attention_as_in_pytorch(program)
        assert len(program.graph.nodes) == before


@pytest.mark.parametrize("name", OTHERS)
def test_it_has_the_threads_that_pytorch_has(name: str) -> None:
    needs(name)
    engine = prepared([name], mlp(), INPUT)
    (call, *_) = engine.dispatcher.calls
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            engine(Case(name="forward", args=(INPUT,)))
            assert count in call._by_threads
    finally:
        torch.set_num_threads(before)


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x @ x.T)


@pytest.mark.parametrize("name", OTHERS)
def test_an_operator_that_it_does_not_know_is_named(name: str, tmp_path: Path) -> None:
    needs(name)
    with pytest.raises(RefusedTechnique, match="linalg_eig") as refused:
        prepared([name], Unknown(), INPUT, folder=tmp_path)
    assert refused.value.summary.endswith("cannot take this model")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Filling(nn.Module):
    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:1].copy_(x)
        return cache.sum(0)


@pytest.mark.parametrize(
    ("model", "inputs", "refused"),
    [
        (Counting(), (torch.ones(1, 4),), True),
        (Filling(), (torch.ones(1, 4), torch.zeros(3, 4)), True),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), (torch.ones(1, 4),), False),
    ],
)
def test_a_model_that_writes_in_place_is_refused_before_any_trial(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchwright.optimization.techniques.shared.engine.uninstalled", lambda *_: None)
    target = make_target(ModuleWorkload(model.eval(), inputs), get_device("cpu").identify())
    said = {reason for _, reason in describe_target(target, ["onnxruntime"]).variants}
    assert [str(reason).startswith("the model changes its inputs or buffers") for reason in said] == [refused]


def test_without_its_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in OTHERS:
        assert f"pip install 'torchwright[{name}]'" in str(engines.get(name).unavailable())
        device = get_device("cpu").identify()
        assert f"pip install 'torchwright[{name}]'" in str(from_step(parse_step(name)).available(device))


def test_an_operator_of_another_library_is_told(tmp_path: Path) -> None:
    needs("onnxruntime")
    import onnx  # pyright: ignore[reportMissingImports]

    path = made(tmp_path, mlp(), ["onnxruntime"])
    shutil.copytree(path, tmp_path / "copy")
    file = tmp_path / "copy" / "onnxruntime" / "call-0"
    model = onnx.load_model_from_string(file.read_bytes())
    model.graph.node[0].domain = "com.microsoft.evil"
    file.write_bytes(model.SerializeToString())
    seal(tmp_path / "copy")
    with pytest.raises(ArtifactError, match=r"an operator of 'com\.microsoft\.evil'"):
        tw.load(tmp_path / "copy", trust=True)


def test_a_file_that_names_another_is_told(tmp_path: Path) -> None:
    needs("onnxruntime")
    import onnx  # pyright: ignore[reportMissingImports]

    path = made(tmp_path, mlp(), ["onnxruntime"])
    shutil.copytree(path, tmp_path / "copy")
    file = tmp_path / "copy" / "onnxruntime" / "call-0"
    model = onnx.load_model_from_string(file.read_bytes())
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="/etc/passwd")
    file.write_bytes(model.SerializeToString())
    seal(tmp_path / "copy")
    with pytest.raises(ArtifactError, match="weights in another file"):
        tw.load(tmp_path / "copy", trust=True)


def test_a_child_of_fork_ends() -> None:
    """OpenVINO's destructors wait for threads of the parent's at the interpreter's end.

    ONNX Runtime 1.32 has a destructor that does so once it is imported, and nobody can help that.
    """
    needs("openvino")
    script = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
import torch
from converted_models import prepared
from torchwright.workloads.base import Case
model, x = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()).eval(), torch.randn(256, 512)
engine = prepared([sys.argv[1]], model, x)
engine(Case("forward", (x,)))
for call in (True, False):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        if call:
            torch.testing.assert_close(engine(Case("forward", (x,))), model(x), rtol=1e-3, atol=1e-3)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, call
"""
    tests = str(Path(in_process.__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, "openvino", tests], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
