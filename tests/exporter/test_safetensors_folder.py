"""Folders of safetensors: integers as others read them, the bundled model in each precision, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_models import small

import torchwright as tw
from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.targets.compressed import LinearFormat, packed
from torchwright.exporter.targets.onnx_file import Onnx
from torchwright.exporter.targets.pt2 import Pt2
from torchwright.exporter.targets.safetensors_folder import AUTO, SafetensorsFolder
from torchwright.exporter.verification.reference import EXAMPLE, calls_of
from torchwright.hardware.devices import get_device
from torchwright.hub.checkpoint import Checkpoint
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.detect import from_target
from torchwright.workloads.huggingface import load_model
from torchwright.workloads.module import ModuleWorkload

BUNDLED = Path(__file__).parents[2] / "src/torchwright/workloads/bundled"


@pytest.fixture(scope="module")
def bundled() -> Subject:
    return make_subject(from_target(None))


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_formats_own_library(bits: int) -> None:
    theirs = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 24))
    assert torch.equal(packed(codes, bits), theirs.pack_to_int32(codes.to(torch.int8), bits))


@pytest.mark.parametrize("layout", [LinearFormat(bits=8, inputs=True), LinearFormat(bits=4, group=32)])
def test_weights_are_off_by_half_a_step_or_by_what_is_cut(layout: LinearFormat) -> None:
    weight = torch.randn(6, 64, dtype=torch.float64).float()
    weight[0, :32] = 0
    parts = layout.tensors(weight)
    scale = parts["weight_scale"].float().repeat_interleave(layout.group or 64, 1)
    end = 2 ** (layout.bits - 1)
    codes = (weight / scale).round().clamp(-end, end - 1)
    if layout.bits == 8:
        assert torch.equal(parts["weight"].float(), codes)
        # The scale is a bfloat16 number: its end may lie 1/256 lower than the largest weight.
        assert bool(((codes * scale - weight).abs() <= scale * (0.5 + 127 / 256 + 1e-3)).all())
    plain = weight.abs().unflatten(1, (-1, layout.group or 64)).amax(-1, keepdim=True) / (end - 1)
    plain = plain.clamp_min(1e-30).expand(-1, -1, layout.group or 64).flatten(1).to(torch.bfloat16).float()
    nearest = (weight / plain).round().clamp(-end, end - 1) * plain
    assert (codes * scale - weight).norm() <= (nearest - weight).norm() * 1.0001
    assert bool((codes[0, :32] == 0).all())


@pytest.mark.slow  # the contract writes and reads a smaller model
@pytest.mark.parametrize(("precision", "allowed"), [("bf16", 0.0), ("w8a8", 0.02), ("w4a16", 0.2)])
def test_the_bundled_model_comes_back(
    precision: str, allowed: float, bundled: Subject, tmp_path: Path
) -> None:
    written = SafetensorsFolder.write(bundled, precision, tmp_path)
    assert written.operators[f"linear layers in {precision}"] == 42
    wanted = dict(
        Checkpoint(BUNDLED, json.loads((BUNDLED / "config.json").read_text())).tensors(torch.float32)
    )
    found = SafetensorsFolder.weights(tmp_path)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert relative_error([wanted[name]], [tensor]).value <= allowed, name
    call = next(call for call in calls_of(bundled) if call.name == EXAMPLE)
    ours = load_model(tmp_path, AUTO)
    with torch.no_grad():
        outputs = [ours(input_ids=call.tensors[0], use_cache=False).logits]
    assert relative_error(call.outputs, outputs).value <= max(1e-5, SafetensorsFolder.tolerances[precision])


@pytest.mark.plain("w4a16")
@pytest.mark.parametrize("precision", ["w8a8", "w4a16"])
def test_transformers_loads_it_quantized(precision: str, bundled: Subject, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    SafetensorsFolder.write(bundled, precision, tmp_path)
    call = next(call for call in calls_of(bundled) if call.name == EXAMPLE)
    outputs = SafetensorsFolder.open(tmp_path, bundled.graph.spec, 1)(call.tensors)
    assert relative_error(call.outputs, outputs).value <= SafetensorsFolder.tolerances[precision]


@pytest.mark.slow
def test_a_recipes_format_travels_with_its_groups_and_what_it_skips(bundled: Subject, tmp_path: Path) -> None:
    skip = ("decoder.layers.0.attention.qkv", "decoder.layers.5.mlp.down", "decoder.head")
    step = Step(name="w4a16", options={"group_size": 64, "skip": skip})
    native = Step(name="native")
    target = make_target(from_target(None), get_device("cpu").identify())
    apply_steps(target, [native])
    assert set(skip) <= {name for name, _ in target.model.named_modules()}  # as a recipe calls them
    assert SafetensorsFolder.format_of([native]) is None
    found = SafetensorsFolder.format_of([native, step])
    assert found is not None
    assert found.precision == "w4a16"
    with_format = replace(bundled, format=found)
    written = SafetensorsFolder.write(with_format, found.precision, tmp_path)
    assert written.operators["linear layers in w4a16"] == 42 - 4
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    attention = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert sorted(config["ignore"]) == sorted(["lm_head", *attention, "model.layers.5.mlp.down_proj"])
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert SafetensorsFolder.weights(tmp_path)


def test_a_layer_that_is_none_of_the_folders_is_refused(bundled: Subject, tmp_path: Path) -> None:
    step = Step(name="w8a8", options={"skip": ("decoder.layers.0.router",)})
    with_format = replace(bundled, format=SafetensorsFolder.format_of([step]))
    with pytest.raises(RefusedTechnique, match=r"'decoder\.layers\.0\.router', which is no layer of"):
        SafetensorsFolder.write(with_format, "w8a8", tmp_path)


def test_a_format_whose_skip_list_cannot_be_kept_stays_behind() -> None:
    assert Onnx.format_of([Step(name="int8_static")]) is not None
    assert Onnx.format_of([Step(name="int8_static", options={"skip": ("fc",)})]) is None
    assert Pt2.format_of([Step(name="int8_static")]) is None


def test_a_module_comes_from_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RefusedTechnique, match="comes from none"):
        SafetensorsFolder.write(make_subject(ModuleWorkload(*small())), "bf16", tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_verifier_says_that_it_holds(tmp_path: Path) -> None:
    made = tw.export("bundled", to="safetensors", precision="w4a16", out=tmp_path / "out")
    assert made.report["verdict"] == "holds", made.report
    assert made.report["parting"] is None
