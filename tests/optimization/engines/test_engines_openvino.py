"""OpenVINO's narrower types and its graphs of strangers, where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torchwright as tw
from converted_models import error, needs, prepared
from small_artifacts import INPUT, made, mlp, seal
from torchwright.core.errors import ArtifactError, SlowerCall, UnknownName
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu.threads import torch_threads
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.base import engines
from torchwright.optimization.engines.converted import Infer
from torchwright.optimization.engines.dispatch.spec import CallSpec
from torchwright.optimization.engines.openvino import OPTIONS, PRECISION, OpenVino, read_settings
from torchwright.optimization.engines.openvino_executors import compile_for
from torchwright.optimization.engines.rewrites.openvino_graph import check_ir
from torchwright.optimization.techniques.base import from_step, parse_step
from torchwright.testing.forks import check_in_child
from torchwright.workloads.base import Case
from torchwright.workloads.module import ModuleWorkload

pytestmark = pytest.mark.filterwarnings("ignore")  # in a trial's process nobody sees what libraries say


class Steps(nn.Module):
    """Embeds numbers of steps as diffusion models do."""

    rates: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.logspace(0, -4, 32))
        self.layer = nn.Linear(64, 16)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        angles = steps[:, None].float() * self.rates
        return self.layer(torch.cat([angles.sin(), angles.cos()], 1))


@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_nothing_is_reported_to_the_librarys_makers(tmp_path: Path, precision: str) -> None:
    needs("openvino")
    code = f"""
import sys, types, torch
from openvino_telemetry.utils.sender import TelemetrySender
TelemetrySender.send = lambda *args: sys.exit("it was reported")
sys.path[:0] = {sys.path!r}
from pathlib import Path
from converted_models import prepared
prepared(["openvino:precision={precision}"], torch.nn.Linear(8, 8), torch.randn(2, 8), folder=Path({str(tmp_path)!r}))
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NNCF_CI")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_of_steps_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("openvino")
    model, steps = Steps().eval(), torch.tensor([981, 983, 727, 12])

    def loss() -> float:
        run = prepared(["openvino:precision=bf16"], model, steps)
        return error(run(Case(name="forward", args=(steps,))), model(steps))

    assert loss() < 1e-2
    monkeypatch.setattr("torchwright.optimization.engines.openvino.keep_float32", lambda text, **_: text)
    assert loss() > 1e-1


@pytest.mark.parametrize("tried", [1, 2])
def test_one_thread_runs_a_narrower_type_only_where_it_was_tried(tried: int) -> None:
    """OpenVINO can divide by zero while it compiles for one thread in bfloat16 (openvino#33300)."""
    needs("openvino")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).eval(), torch.randn(32, 64)
    with torch_threads(tried):
        run = prepared(["openvino:precision=bf16"], model, x)
        in_its_type = error(run(Case(name="forward", args=(x,))), model(x))
    with torch_threads(1), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        on_one_thread = error(run(Case(name="forward", args=(x,))), model(x))
    slower = [str(warning.message) for warning in said if warning.category is SlowerCall]
    assert in_its_type > 1e-4
    if tried == 1:
        assert on_one_thread == in_its_type
        assert not slower
    else:
        assert on_one_thread < 1e-5
        assert "in float32" in slower[0]


@pytest.mark.parametrize("kept", ["2025.3.0 on another processor", True, None])
def test_that_another_machine_tried_one_thread_is_not_believed(tmp_path: Path, kept: object) -> None:
    """A file that was moved, or whose options were forged, could end the process of its caller (openvino#33300)."""
    needs("openvino")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).eval(), torch.randn(32, 64)

    def found() -> float:
        run = OpenVino.opened(tmp_path, engine.calls, "cpu")
        return error(run(Case(name="forward", args=(x,))), model(x))

    with torch_threads(1), torch.no_grad():
        engine = prepared(["openvino:precision=bf16"], model, x, folder=tmp_path)
        assert found() > 1e-4  # tried here
        (options,) = tmp_path.rglob(OPTIONS)
        options.write_text(json.dumps(json.loads(options.read_text()) | {"one_thread": kept}))
        with pytest.warns(SlowerCall, match="in float32"):
            assert found() < 1e-5


class Hidden(nn.Module):
    """Attention whose mask is float32's least number, as DeBERTa's is: a query that sees no key sees all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.register_buffer("least", torch.full((16, 16), torch.finfo(torch.float32).min).triu(1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2)
        seen = (mask[:, None] * mask[:, :, None]).bool()
        hidden = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return torch.cat([hidden.softmax(-1) @ v, (scores.tanh() + self.least).softmax(-1) @ v], dim=1)


@pytest.mark.parametrize("options", ["precision=bf16", "precision=bf16,autocast=true", "precision=int8"])
def test_a_narrower_type_has_no_infinity_where_the_model_has_none(options: str) -> None:
    needs("openvino")
    model, x, mask = Hidden().eval(), torch.randn(2, 16, 32), torch.ones(2, 16, dtype=torch.long)
    mask[1, 9:] = 0
    found = prepared([f"openvino:{options}"], model, x, mask)(Case(name="forward", args=(x, mask)))
    assert error(found, model(x, mask)) < 0.1  # NaN is not


class Deep(nn.Module):
    """Adds to what it is given, layer by layer, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            for _ in range(24)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 30.0  # a direction that all share, as in trained models
        for layer in self.layers:
            x = x + layer(x)
        return x - 30.0


def test_by_autocast_what_is_added_up_is_not_rounded() -> None:
    needs("openvino")
    model, x = Deep().eval(), torch.randn(6, 64)

    def loss(step: str) -> float:
        return error(prepared([step], model, x)(Case(name="forward", args=(x,))), model(x))

    plain, kept = map(loss, ("openvino:precision=bf16", "openvino:precision=bf16,autocast=true"))
    assert 1e-4 < kept < 1e-2 < plain


RELEASED = """
import gc, signal
import torch
from converted_models import prepared
from torchwright.workloads.base import Case
x = torch.randn(2, 4)
runs = [prepared(["openvino"], torch.nn.Linear(4, 4).eval(), x) for _ in range(2)]
for run in runs:
    run(Case(name="forward", args=(x,)))
del run
while runs:
    del runs[0]
    gc.collect()
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_is_one_after_models_were_released() -> None:
    """A Core of OpenVINO's that goes before a younger one leaves that a stack for signals that is gone."""
    needs("openvino")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RELEASED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr


@pytest.mark.parametrize("bias", [False, True])
def test_by_autocast_layers_may_stay_in_float32(bias: bool) -> None:
    """The more of them the less is lost, also where OpenVINO makes one operator of a product and its bias."""
    needs("openvino")
    layers = (nn.Conv1d(6, 6, 3, padding=1), nn.Linear(64, 96, bias), nn.GELU(), nn.Linear(96, 64, bias))
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 6, 64)

    def loss(*skip: str) -> float:
        step = f"openvino:precision=bf16,autocast=true,skip={'+'.join(skip)}"
        return error(prepared([step], model, x)(Case(name="forward", args=(x,))), model(x))

    none, some, all_of_them = loss(), loss("0", "1"), loss("0", "1", "3")
    assert all_of_them < 1e-6 < 1e-4 < some < none
    with pytest.raises(UnknownName, match="unknown layer in openvino:skip '2'"):
        loss("2")


@pytest.mark.parametrize(("room", "widened"), [(100.0, True), (100.0, False), (-1.0, True)])
def test_what_answers_other_sizes_is_within_the_budget_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: float, widened: bool
) -> None:
    """Of bfloat16 that loses more where sizes are free, they have float32, or else pieces of the example's size; and
    float32 where there is no time to judge it."""
    needs("openvino:precision=bf16")

    class Lossier(OpenVino):
        def widen_others(self) -> bool:
            return widened and super().widen_others()

        @classmethod
        def reader(cls, file: Path, spec: CallSpec) -> Callable[[int], Infer]:
            start = super().reader(file, spec)
            if not spec.sizes or read_settings(file / OPTIONS, others=True)[PRECISION] == "f32":
                return start
            return lambda threads: lambda arrays: [1.2 * result for result in start(threads)(arrays)]

    monkeypatch.setattr("torchwright.optimization.proof.forms.DOUBTFUL", 0.0)
    monkeypatch.setattr("torchwright.optimization.proof.forms._room", lambda search: room)
    with engines.adding({"openvino": Lossier}):
        path = made(tmp_path, mlp(), ["openvino:precision=bf16"])
    recipe, manifest = artifact.open_artifact(path)
    assert [bool(call.sizes) for call in manifest.calls] == ([False, True] if widened else [False])
    how = "rounded less" if widened else "not answered by a call of their own"
    how = how if room > 0 else "no time was left to judge them, rounded less"
    (note,) = (note for note in recipe.notes if note.startswith("other sizes"))
    assert note.startswith(f"other sizes: {how}")
    model = tw.load(path, trust=True).model
    for rows, least, most in ((4, 1e-4, 2e-2), (9, 0.0, 1e-5) if widened else (9, 1e-4, 2e-2)):
        x = torch.randn(rows, 16)
        assert least <= error(model(x), mlp()(x)) <= most


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_no_layer_is_left_alone_where_all_is_one_type(precision: str) -> None:
    target = make_target(ModuleWorkload(mlp(), (INPUT,)), get_device("cpu").identify())
    technique = from_step(parse_step(f"openvino:precision={precision},skip=0"))
    assert str(technique.refuse(target)).startswith("skip is for int8 and autocast")


@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_autocast_is_for_half_precision(precision: str) -> None:
    target = make_target(ModuleWorkload(mlp(), (INPUT,)), get_device("cpu").identify())
    technique = from_step(parse_step(f"openvino:precision={precision},autocast=true"))
    assert str(technique.refuse(target)).startswith("autocast is for bf16 and f16")


LAYER = '<layer id="0" name="c" type="Const" version="{0}"><data offset="{1}" size="{2}" /></layer>'


@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        (LAYER.format("opset1", 0, 8), None),
        (LAYER.format("extension", 0, 8), "not OpenVINO's own"),
        (LAYER.format("opset1", 4, 8), "a constant at 4 of 8 bytes"),
        (LAYER.format("opset1", -8, 8), "a constant at -8"),
        ("<a>" * 200 + "</a>" * 200, "deeper than"),
        ("<!-- a comment -->", "declarations"),
    ],
)
def test_an_ir_of_a_stranger_is_held_against_rules(layer: str, fault: str | None) -> None:
    text = f'<?xml version="1.0"?><net><layers>{layer}</layers></net>'.encode()
    if fault is None:
        check_ir(text, 8)
        return
    with pytest.raises(ValueError, match=fault):
        check_ir(text, 8)


def test_a_forged_graph_is_told(tmp_path: Path) -> None:
    needs("openvino")
    path = made(tmp_path, mlp(), ["openvino"])
    shutil.copytree(path, tmp_path / "copy")
    graph = tmp_path / "copy" / "openvino" / "call-0" / "graph.xml"
    graph.write_text(graph.read_text().replace('version="opset1"', 'version="extension"', 1))
    seal(tmp_path / "copy")
    with pytest.raises(ArtifactError, match="not OpenVINO's own"):
        tw.load(tmp_path / "copy", trust=True)


@pytest.mark.parametrize("others", [["bf16"], {"a": 1}, "fp9", None, 3])
def test_a_forged_precision_of_other_sizes_is_told(tmp_path: Path, others: object) -> None:
    (tmp_path / OPTIONS).write_text(json.dumps({"precision": "bf16", "hint": "LATENCY", "others": others}))
    assert read_settings(tmp_path / OPTIONS)[PRECISION] == "bf16"
    with pytest.raises(ArtifactError, match="is damaged"):
        read_settings(tmp_path / OPTIONS, others=True)


def test_a_child_of_fork_does_not_wait_for_executors_of_released_models() -> None:
    """Two in use at once and both released: OpenVINO gives their threads, which the child lacks, to the next model."""
    needs("openvino")
    from openvino import Model, opset13

    class Owner:
        pass

    def answers(owner: Owner) -> bool:
        given = opset13.parameter([-1, 4], np.float32)
        model = Model([opset13.add(given, np.float32(1))], [given])
        compiled = compile_for(owner, model, {"INFERENCE_NUM_THREADS": 2, "PERFORMANCE_HINT": "LATENCY"})
        return bool((compiled(np.ones((2, 4), np.float32))[0] == 2).all())

    owners = [Owner(), Owner()]
    assert all(map(answers, owners))
    owners.clear()

    def child() -> None:
        assert all(map(answers, (first, second)))

    first, second = Owner(), Owner()
    check_in_child(child)
    assert answers(first), "the parent goes on"
