"""Segmentation as a workload: its metric against a plain reading, a search, and its artifact in a new process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sams import SIDE, picture, tiny_sam, tiny_sam2
from torch.utils import _pytree as pytree
from transformers import SamConfig, SamModel

import torchwright as tw
from torchwright.cli import main
from torchwright.core.errors import WorkloadError
from torchwright.core.records import Quality, Step
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu import build
from torchwright.models.segment.beside import OPTIMIZED_ALONE, ORIGINAL_ALONE
from torchwright.models.segment.judge import mask_quality, overlap, packed
from torchwright.models.segment.masks import iou
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.base import engines
from torchwright.optimization.engines.compiled.program import export, read_programs, write_programs
from torchwright.optimization.techniques.grid_attention import GridAttention
from torchwright.optimization.techniques.shared.wrapping import worst_error
from torchwright.report.pictures import MOST_ROWS
from torchwright.workloads.base import Case
from torchwright.workloads.detect import from_target

RUN = """
import sys, numpy as np, torchwright as tw
from torchwright.models.vision.picture import read_picture
model = tw.load(sys.argv[1]).model
found = model.segment(sys.argv[2], points=[(30, 20)])
found += model.segment(sys.argv[2], boxes=[(10, 5, 60, 50)])
found += model.segment(sys.argv[2], points=[(30, 20), (40, 30)], outside=[(80, 50)])
found += model.everything(sys.argv[2], grid=3)[:1]
np.savez(sys.argv[3], *(mask.pixels_HW for mask in found))
"""


def logits() -> torch.Tensor:
    return torch.randn(5, 3, 16, 16) + torch.randn(5, 3, 1, 1)


def seen(pictures: list[torch.Tensor]) -> dict[str, object]:
    """What `observe` gives of mask logits."""
    return {
        "masks": [packed(each) for each in pictures],
        "scores": [each.mean((2, 3)) for each in pictures],
        "largest": 1.0,
    }


def test_overlap_is_intersection_over_union() -> None:
    one, other = logits(), logits()
    one[0, 0], other[0, 0] = -1, -1  # both empty
    found = overlap(packed(one), packed(other))
    for place in np.ndindex(5, 3):
        assert float(found[place]) == iou((one[place] > 0).numpy(), (other[place] > 0).numpy())


def test_the_interval_is_about_the_mean_and_narrows_with_more_pictures() -> None:
    def judged(count: int) -> Quality:
        before = [torch.randn(20, 3, 16, 16) for _ in range(count)]
        after = [each + 0.3 * torch.randn(each.shape) for each in before]
        return mask_quality(seen(before), seen(after))

    few, many = judged(2), judged(30)
    for quality in (few, many):
        assert quality.drop_low is not None
        assert 0 < quality.drop_low < quality.drop < quality.drop_high < 1
        assert quality.value == pytest.approx(1 - quality.drop)
        assert quality.extras["worst_tenth"] < quality.value
    assert many.drop_high - many.drop < few.drop_high - few.drop


def test_masks_that_rounding_decides_are_no_reference(tmp_path: Path) -> None:
    """transformers' own first weights give logits of 1e-20."""
    tiny_sam(tmp_path)
    SamModel(SamConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    workload = from_target(str(tmp_path), points="2x2")
    model = workload.build()
    found = workload.observe(lambda case: model(*case.args, **case.kwargs), torch.float32)
    if found["largest"] < 1e-6:
        with pytest.raises(WorkloadError, match="the original's masks mean nothing"):
            workload.compare(found, found)
    with pytest.raises(WorkloadError, match="a candidate are not numbers"):
        workload.compare({**found, "largest": 1.0}, {**found, "largest": float("nan")})


@pytest.mark.parametrize("points", ["3", "3x4", "0x0", "129x129", "axb", "3x3x3"])
def test_a_grid_that_is_none_is_refused(tmp_path: Path, points: str) -> None:
    with pytest.raises(WorkloadError, match="points="):
        from_target(str(tiny_sam(tmp_path)), points=points)


def test_pictures_of_the_user(tmp_path: Path) -> None:
    folder, images = tiny_sam(tmp_path / "sam"), tmp_path / "images"
    images.mkdir()
    (images / "notes.txt").write_text("no picture")
    for number in range(2):
        Image.fromarray(picture(40, 60)).save(images / f"{number}.png")
    with pytest.raises(WorkloadError, match="holds 2 pictures"):
        from_target(str(folder), images=str(images))
    for number in range(2, 10):
        Image.fromarray(picture(40 + number, 60)).save(images / f"{number}.png")
    workload = from_target(str(folder), images=str(images), points="2x2")
    asked = list[Case]()
    model = workload.build()

    def run(case: Case) -> object:
        asked.append(case)
        return model(*case.args, **case.kwargs)

    with torch.inference_mode():
        judged = _pixels(workload, run, asked)
        other = workload.unseen()
        assert other is not None
        kept = _pixels(other, run, asked)
    calibrated = [
        case.kwargs["pixels"] for case in workload.calibration(torch.float32) if case.name == "encode"
    ]
    groups = [judged, kept, calibrated]
    assert [len(group) for group in groups] == [4, 4, 2]
    every = torch.cat([tensor for group in groups for tensor in group])
    assert len(every.flatten(1).unique(dim=0)) == 10, "no picture is in two of them"


def test_the_report_shows_the_masks_that_changed_the_most_first(tmp_path: Path) -> None:
    workload = from_target(str(tiny_sam(tmp_path)), points="2x2")
    model = workload.build()
    before = workload.observe(lambda case: model(*case.args, **case.kwargs), torch.float32)
    after = {**before, "masks": [masks.clone() for masks in before["masks"]]}
    after["masks"][0][1, 2] ^= 0b1000  # an eighth of its pixels
    after["masks"][1][2, 0] ^= 0xFF
    rows = workload.side_by_side(before, after)
    assert [row.title for row in rows[:2]] == [
        "picture 1, the point 3 of 4, mask 1 of 3",
        "picture 0, the point 2 of 4, mask 3 of 3",
    ]
    assert "IoU 0.000" in rows[0].said
    assert all("IoU 1.000" in row.said for row in rows[2:])
    assert len(rows) == min(len(before["masks"]), MOST_ROWS)
    _, _, changed = (np.array(Image.open(io.BytesIO(shown.png))) for shown in rows[0].pictures)
    coloured = [(changed == colour).all(-1).mean() for colour in (ORIGINAL_ALONE, OPTIMIZED_ALONE)]
    assert sum(coloured) == 1.0, "no pixel has the same side in both"
    _, _, same = (np.array(Image.open(io.BytesIO(shown.png))) for shown in rows[2].pictures)
    assert not np.ptp(same, axis=-1).any(), "grey, with no colour in it"


def _pixels(workload: Any, run: Any, asked: list[Case]) -> list[torch.Tensor]:
    asked.clear()
    workload.observe(run, torch.float32)
    return [case.kwargs["pixels"] for case in asked if case.name == "encode"]


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_sam, pytest.param(tiny_sam2, marks=pytest.mark.slow)])
def test_its_graphs_are_read_without_trust_and_take_any_prompt(tmp_path: Path, make: Any) -> None:
    """With the encoder on our kernel, masks by products, and 8-bit layers, as an artifact keeps them."""
    if missing := build.load_fault():
        pytest.skip(f"no kernels: {missing}")
    folder = make(tmp_path)
    workload = from_target(str(folder), points="3x3")
    target = make_target(workload, get_device("cpu").identify())
    target.properties.add("compiled")
    names = ["mask_decoder", "dtype", "int8_dynamic", *(["grid_attention"] if make is tiny_sam else [])]
    apply_steps(target, [Step(name=name, options={}) for name in names])
    if make is tiny_sam2:
        assert "no attention of the model" in str(GridAttention().refuse(target))
    cases = workload.cases(target.compute_dtype)
    write_programs(tmp_path, export(target.model, cases))
    graphs = {name: program.module() for name, program in read_programs(tmp_path).items()}
    several = {
        "points": torch.rand(1, 1, 5, 2) * SIDE,
        "labels": torch.tensor([[[1, 0, 2, 3, -1]]], dtype=torch.int32),
    }
    cases.append(Case(name="prompt", kwargs=cases[-1].kwargs | several))
    with torch.no_grad():
        for case in cases:
            wanted = pytree.tree_leaves(target.model(*case.args, **case.kwargs))
            found = pytree.tree_leaves(graphs[case.name](*case.args, **case.kwargs))
            assert worst_error(wanted, found) < 5e-2


@pytest.mark.filterwarnings("ignore")  # in a trial's process nobody sees what libraries say
@pytest.mark.plain("tiny_sam-openvino")
@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("make", [tiny_sam, tiny_sam2])
def test_converted_calls_take_any_number_of_marks(tmp_path: Path, make: Any, name: str) -> None:
    """One of three calls has free sizes; they are converted once for all folders."""
    if reason := engines.get(name).unavailable():
        pytest.skip(reason)
    workload = from_target(str(make(tmp_path / "model")), points="3x3")
    target = make_target(workload, get_device("cpu").identify())
    target.conversion = tmp_path / "shared"
    apply_steps(target, [Step(name=name, options={})])
    folders = [tmp_path / word for word in ("first", "again")]
    for folder in folders:
        folder.mkdir()
    first, again = (engines.get(name).prepare(target, folder).calls for folder in folders)
    assert first == again
    assert [call.name for call in first if call.sizes] == ["prompt, other sizes"]
    cases = workload.cases(target.compute_dtype)
    for marks in (3, 7):
        others = {
            "points": torch.rand(1, 1, marks, 2) * SIDE,
            "labels": torch.randint(-1, 4, (1, 1, marks), dtype=torch.int32),
        }
        cases.append(Case(name="prompt", kwargs=cases[2].kwargs | others))
    opened = engines.get(name).opened(folders[1], again, "cpu")
    with torch.no_grad():
        for case in cases:
            wanted = pytree.tree_leaves(target.model(*case.args, **case.kwargs))
            assert worst_error(wanted, pytree.tree_leaves(opened(case))) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_sam, tiny_sam2])
def test_an_artifact_segments_in_another_process(
    tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step, in bfloat16: its masks are those of the bfloat16 model, of points, boxes, and several points."""
    folder, out, cat = make(tmp_path / "model"), str(tmp_path / "out"), tmp_path / "cat.png"
    Image.fromarray(picture(60, 90)).save(cat)
    words = ["optimize", str(folder), "--points", "3x3", "--max-drop", "0.9", "-o", out, "--quiet", "--json"]
    words += ["--with", "dtype:dtype=bfloat16", "--without", "compile", "--time-budget", "60s"]
    assert main(words) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["workload"]["kind"] == "segment"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, out, str(cat), str(tmp_path / "masks.npz")], check=True
    )
    found = np.load(tmp_path / "masks.npz")
    assert [mask.shape for mask in found.values()][:3] == [(60, 90)] * 3
    exact = tw.load_segmenter(folder)
    wanted = exact.segment(cat, points=[(30, 20)]) + exact.segment(cat, boxes=[(10, 5, 60, 50)])
    wanted += exact.segment(cat, points=[(30, 20), (40, 30)], outside=[(80, 50)])
    alike = [iou(found[f"arr_{number}"], mask.pixels_HW) for number, mask in enumerate(wanted)]
    assert np.median(alike) > 0.7
    assert (
        main(["segment", str(cat), "--model", out, "--box", "10,5,60,50", "-o", str(tmp_path / "masks")]) == 0
    )
    assert (tmp_path / "masks" / "cat" / "000.png").is_file()
