"""Vision-language models as a workload: calls beside transformers', each side's precision, what an artifact keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_question import write_template

import vlms
from folders import change_json
from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.core.scheme import BF16, W8A8
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder import load_decoder
from torchwright.models.vision.calls import NativeAnswers
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.workload import VisionLanguageWorkload
from torchwright.workloads.detect import kind_of

NEW = 5
FAMILIES = ["Qwen2_5_VL", "Qwen3VL", "Gemma3", "LlavaNext"]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if missing := build.load_fault():
        pytest.skip(f"no kernels: {missing}")


def opened(folder: Path, name: str = "Qwen2_5_VL", **options: Any) -> VisionLanguageWorkload:
    vlms.save(name, folder)
    write_template(folder)
    return VisionLanguageWorkload(folder, new_tokens=NEW, **options)


def native(folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> NativeAnswers:
    loaded = load_decoder(folder, dtype, options.pop("quantize", None))
    loaded.vision = PictureEncoder(folder, dtype, **options)
    return NativeAnswers(loaded)


@pytest.mark.plain("Qwen2_5_VL")
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_native_answers_are_those_of_transformers_and_are_kept(tmp_path: Path, name: str) -> None:
    workload = opened(tmp_path / "model", name)
    assert kind_of(tmp_path / "model") is VisionLanguageWorkload
    model = workload.build()
    for case in (*workload.cases(torch.float32), *workload.calibration(torch.float32)):
        wanted = workload.original_run(model)(case)
        exact = native(tmp_path / "model", torch.float32)(*case.args, **case.kwargs)
        assert wanted.shape == exact.shape == (1, NEW, wanted.shape[-1])
        assert float((exact - wanted).norm() / wanted.norm()) < 1e-4
    packed = native(tmp_path / "model")
    found = packed(*case.args, **case.kwargs)
    assert float((found - wanted).norm() / wanted.norm()) < 0.1
    packed.save(tmp_path)
    again = NativeAnswers.load(tmp_path, tmp_path / "model")
    assert torch.equal(again(*case.args, **case.kwargs), found)


@pytest.mark.slow
@torch.inference_mode()
def test_each_side_keeps_its_own_precision(tmp_path: Path) -> None:
    workload = opened(tmp_path / "model")
    case = workload.cases(torch.float32)[0]
    model = native(tmp_path / "model", quantize="w8a8")
    kept = model.encoder.visual.blocks[1].mlp.gate_up
    model.encoder.visual.blocks[1].mlp.gate_up = PackedLinear(kept.wide_weight(), kept.bias, W8A8)
    found = model(*case.args, **case.kwargs)
    model.save(tmp_path)
    assert json.loads((tmp_path / "vision" / "schemes.json").read_text()) == {
        "visual.blocks.1.mlp.gate_up": "w8a8"
    }
    again = NativeAnswers.load(tmp_path, tmp_path / "model")
    assert torch.equal(again(*case.args, **case.kwargs), found)
    schemes = {name: layer.scheme for name, layer in again.named_modules() if isinstance(layer, PackedLinear)}
    assert {scheme for name, scheme in schemes.items() if name.startswith("decoder.")} == {W8A8}
    assert {name for name, scheme in schemes.items() if name.startswith("encoder.") and scheme != BF16} == {
        "encoder.visual.blocks.1.mlp.gate_up"
    }


@pytest.mark.slow
@torch.inference_mode()
def test_targets_are_what_the_original_answers(tmp_path: Path) -> None:
    workload = opened(tmp_path)
    model: Any = workload.build()
    for case in (workload.cases(torch.float32)[0], *workload.calibration(torch.float32)):
        ids, target = case.args
        wanted = model.generate(
            input_ids=ids,
            mm_token_type_ids=(ids == workload._token).int(),
            **case.kwargs,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
        )
        assert wanted[0, ids.shape[1] :].tolist() == target[0].tolist()


@pytest.mark.slow
@torch.inference_mode()
def test_what_is_lost_is_judged_on_pictures_that_calibrate_nothing(tmp_path: Path) -> None:
    workload = opened(tmp_path)
    run = workload.original_run(workload.build())
    own = workload.observe(run, torch.float32)
    assert len(own) == 6 * NEW
    assert workload.compare(own, own).drop == 0
    unseen = workload.unseen()
    assert unseen is not None
    assert not torch.equal(unseen.observe(run, torch.float32), own)
    model = native(tmp_path, quantize="w4a8")
    worse = workload.compare(
        own, workload.observe(lambda case: model(*case.args, **case.kwargs), torch.bfloat16)
    )
    assert worse.drop > 0


def test_pictures_of_a_folder(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for seed in range(5):
        Image.fromarray(vlms.picture(seed)).save(images / f"{seed}.png")
    workload = opened(tmp_path / "model", images=images)
    assert workload.pictures == 4
    assert len(workload.calibration(torch.float32)) == 1
    assert workload.describe()["images"] == str(images)


@pytest.mark.slow  # `test_contract_engines` damages an artifact of the native engine
@pytest.mark.parametrize("damage", [{"no.such.layer": "w8a8"}, {"visual.merger.mlp.0": "w3"}])
def test_damaged_schemes_are_refused(tmp_path: Path, damage: dict[str, str]) -> None:
    opened(tmp_path / "model")
    native(tmp_path / "model").save(tmp_path)
    change_json(tmp_path / "vision" / "schemes.json", **damage)
    with pytest.raises(ArtifactError, match=r"schemes\.json"):
        NativeAnswers.load(tmp_path, tmp_path / "model")


@pytest.mark.slow
def test_what_it_refuses(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(WorkloadError, match="--new-tokens 0"):
        VisionLanguageWorkload(tmp_path, new_tokens=0)
    with pytest.raises(WorkloadError, match="is no folder"):
        VisionLanguageWorkload(tmp_path, images=tmp_path / "none")


def test_rates() -> None:
    assert VisionLanguageWorkload.rates({"new_tokens": 16}, {"answer": 0.5}) == {"tokens_per_s": 32}
