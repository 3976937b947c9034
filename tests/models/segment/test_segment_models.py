"""The families against transformers' own models and processors, and everything against a plain reading of the paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sams import SIDE, picture, tiny_sam
from transformers import Sam2Model, SamModel
from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

import torchwright as tw
from torchwright.core.errors import ModelError, UnknownName, WorkloadError
from torchwright.models.segment.everything import ALIKE
from torchwright.models.segment.masks import distinct, iou
from torchwright.models.segment.prompts import Prompt

SIZES = [(48, 80), (130, 70), (64, 64), (9, 33)]


def _processor() -> SamImageProcessorPil:
    return SamImageProcessorPil(
        size={"longest_edge": SIDE},
        pad_size={"height": SIDE, "width": SIDE},
        mask_size={"longest_edge": SIDE // 2},
    )


@pytest.mark.plain("(130, 70)", "(9, 33)")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_sam_sees_and_answers_as_in_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    folder, image = tiny_sam(tmp_path), picture(*size)
    height, width = size
    segmenter, theirs = tw.load_segmenter(folder), SamModel.from_pretrained(folder).eval()
    inputs = _processor()(images=image, return_tensors="pt")
    torch.testing.assert_close(segmenter.pixels(image), inputs["pixel_values"], atol=1e-6, rtol=1e-6)
    across, down = inputs["reshaped_input_sizes"][0].tolist()[::-1]
    point = (width * 0.4, height * 0.6)
    scaled = torch.tensor([[[[point[0] * across / width, point[1] * down / height]]]])
    with torch.inference_mode():
        out = theirs(pixel_values=inputs["pixel_values"], input_points=scaled)
    masks = _processor().post_process_masks(
        out.pred_masks, inputs["original_sizes"], inputs["reshaped_input_sizes"], binarize=False
    )[0][0]
    best = int(out.iou_scores[0, 0].argmax())
    (found,) = segmenter.segment(image, points=[point])
    assert found.score == pytest.approx(float(out.iou_scores[0, 0, best]), abs=1e-5)
    assert found.pixels_HW.shape == size
    # Where the logits are within rounding of zero, either side is right.
    clear = masks[best].abs() > 1e-4
    assert (torch.from_numpy(found.pixels_HW) == (masks[best] > 0))[clear].all()


def test_a_sam2_answers_as_in_transformers(tmp_path: Path) -> None:
    from sams import tiny_sam2

    folder, image = tiny_sam2(tmp_path), picture(48, 80)
    segmenter, theirs = tw.load_segmenter(folder), Sam2Model.from_pretrained(folder).eval()
    box = (10.0, 5.0, 60.0, 40.0)
    scaled = torch.tensor([[[10 * SIDE / 80, 5 * SIDE / 48, 60 * SIDE / 80, 40 * SIDE / 48]]])
    with torch.inference_mode():
        out = theirs(pixel_values=segmenter.pixels(image), input_boxes=scaled, multimask_output=False)
    logits = torch.nn.functional.interpolate(out.pred_masks[0], (48, 80), mode="bilinear")[0, 0]
    (found,) = segmenter.segment(image, boxes=[box])
    assert found.score == pytest.approx(float(out.iou_scores), abs=1e-5)
    clear = logits.abs() > 1e-4
    assert (torch.from_numpy(found.pixels_HW) == (logits > 0))[clear].all()


def test_sam2_resizes_as_its_processor_does(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="transformers' processor of SAM 2 needs torchvision")
    from sams import tiny_sam2
    from transformers import Sam2ImageProcessor

    segmenter, image = tw.load_segmenter(tiny_sam2(tmp_path)), picture(150, 70)
    theirs = Sam2ImageProcessor(size={"height": SIDE, "width": SIDE})(images=image, return_tensors="pt")
    torch.testing.assert_close(segmenter.pixels(image), theirs["pixel_values"], atol=0.02, rtol=0)


@pytest.mark.plain("sam-(2000, 8)", "sam2-(8, 2000)")
@pytest.mark.parametrize("size", [(8, 2000), (2000, 8)], ids=str)
def test_a_strip_is_segmented_though_it_is_less_than_a_pixel_of_the_square(
    folder: Path, size: tuple[int, int]
) -> None:
    segmenter, image = tw.load_segmenter(folder), picture(*size)
    (mask,) = segmenter.segment(image, points=[(4.0, 4.0)])
    assert mask.pixels_HW.shape == size


def test_a_prompt_alone_is_the_prompt_among_others(folder: Path) -> None:
    segmenter, image = tw.load_segmenter(folder), picture(60, 90)
    encoded = segmenter.encode(image)
    prompts = [Prompt(points=((x, 30.0),), inside=(True,)) for x in (5.0, 40.0, 85.0)]
    together, scores = segmenter.decode(encoded, prompts, several=True)
    for place, prompt in enumerate(prompts):
        alone, score = segmenter.decode(encoded, [prompt], several=True)
        torch.testing.assert_close(together[place], alone[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(scores[place], score[0], atol=1e-4, rtol=1e-4)


def test_prompts_of_different_sizes_are_decoded_together(folder: Path) -> None:
    segmenter = tw.load_segmenter(folder)
    encoded = segmenter.encode(picture(60, 90))
    prompts = [
        Prompt(points=((5.0, 30.0),), inside=(True,)),
        Prompt(box=(3.0, 4.0, 50.0, 40.0)),
        Prompt(points=((5.0, 30.0), (40.0, 8.0)), inside=(True, False)),
        Prompt(points=((70.0, 10.0),), inside=(True,)),
        Prompt(points=((20.0, 20.0),), inside=(True,), box=(3.0, 4.0, 50.0, 40.0)),
    ]
    for several in (True, False):
        together, scores = segmenter.decode(encoded, prompts, several=several)
        assert len(together) == len(scores) == len(prompts)
        for place, prompt in enumerate(prompts):
            alone, score = segmenter.decode(encoded, [prompt], several=several)
            torch.testing.assert_close(together[place], alone[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(scores[place], score[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(WorkloadError, match="no prompts"):
        segmenter.decode(encoded, [], several=True)


@pytest.mark.plain("sam-3-calls1", "sam-8-calls2", "sam2-3-calls1")
@pytest.mark.parametrize(("together", "calls"), [(1, [1] * 5), (3, [3, 2]), (8, [5])])
def test_pictures_of_different_sizes_are_encoded_together(
    folder: Path, together: int, calls: list[int]
) -> None:
    segmenter, images = tw.load_segmenter(folder), [picture(*size) for size in (*SIZES, (300, 20))]
    ask, seen = segmenter.ask, []

    def watched(**given: object) -> object:
        seen.append(len(given["pixels"]))  # pyright: ignore[reportArgumentType]
        return ask(**given)

    segmenter.ask = watched
    found = list(segmenter.encode_many(images, together=together))
    assert seen == calls
    segmenter.ask = ask
    for image, encoded in zip(images, found, strict=True):
        alone = segmenter.encode(image)
        assert (encoded.height, encoded.width) == image.shape[:2]
        torch.testing.assert_close(encoded.embeddings, alone.embeddings, atol=1e-4, rtol=1e-4)
        (mask,) = [segmenter.mask(encoded, Prompt(points=((4.0, 4.0),), inside=(True,)))]
        assert mask.pixels_HW.shape == image.shape[:2]
    segmenter.at_once = 4  # as of what was compiled for one picture
    seen.clear()
    segmenter.ask = watched
    assert len(list(segmenter.encode_many(images, together=together))) == 5
    assert seen == [1] * 5


def test_everything_is_what_the_paper_says(folder: Path) -> None:
    """Each point by itself, in the picture's size, all kept in memory: slow and plain."""
    segmenter, image = tw.load_segmenter(folder), picture(60, 90)
    encoded = segmenter.encode(image)
    every = []
    for y in range(4):
        for x in range(4):
            point = ((x + 0.5) / 4 * 90, (y + 0.5) / 4 * 60)
            logits, scores = segmenter.decode(
                encoded, [Prompt(points=(point,), inside=(True,))], several=True
            )
            for which in range(3):
                every.append(segmenter.finished(encoded, logits[0, which], float(scores[0, which]), (point,)))
    # Of random models hardly a mask is good: the limits are put where half of them pass.
    score, stable = np.median([mask.score for mask in every]), np.median([mask.stability for mask in every])
    good = [mask for mask in every if mask.score > score and mask.stability >= stable]
    wanted = [good[i] for i in distinct([m.box for m in good], [m.score for m in good], ALIKE)]
    found = segmenter.everything(
        image, grid=4, batch=5, least_score=float(score), least_stability=float(stable)
    )
    assert abs(len(found) - len(wanted)) <= 1  # a median lies on one of them, and batches round otherwise
    pairs = [max((iou(mine.pixels_HW, theirs.pixels_HW) for theirs in wanted), default=0.0) for mine in found]
    assert np.mean([alike > 0.99 for alike in pairs] or [1.0]) >= 0.75
    assert [mask.score for mask in found] == sorted((mask.score for mask in found), reverse=True)


def test_prompts_that_mean_nothing_are_refused(folder: Path) -> None:
    segmenter, image = tw.load_segmenter(folder), picture(60, 90)
    for prompts, said in [
        ({}, "nothing points"),
        ({"outside": [(1, 1)]}, "nothing points"),
        ({"points": [(91, 5)]}, "beside the picture"),
        ({"boxes": [(5, 5, 5, 9)]}, "empty"),
        ({"boxes": [(5, 5, 95, 9)]}, "beside the picture"),
        ({"points": [(float("nan"), 5)]}, "2 finite numbers"),
        ({"points": [(1, 1)] * 65}, "65 points"),
        ({"points": [(1, 1)], "boxes": [(1, 1, 9, 9), (2, 2, 9, 9)]}, "one object"),
    ]:
        with pytest.raises(WorkloadError, match=said):
            segmenter.segment(image, **prompts)
    with pytest.raises(WorkloadError, match="grid of 0"):
        segmenter.everything(image, grid=0)


def test_points_and_a_box_are_one_object(folder: Path) -> None:
    segmenter, image = tw.load_segmenter(folder, torch.bfloat16), picture(60, 90)
    masks = segmenter.segment(
        image, points=[(20, 20), (30, 30)], outside=[(80, 50)], boxes=[(10, 10, 60, 50)]
    )
    assert [mask.pixels_HW.shape for mask in masks] == [(60, 90)]
    assert masks[0].points == ((20.0, 20.0), (30.0, 30.0), (80.0, 50.0))


@pytest.mark.plain("sam2")
def test_bfloat16_leaves_coordinates_alone(folder: Path) -> None:
    image = picture(60, 90)
    wide, narrow = tw.load_segmenter(folder), tw.load_segmenter(folder, torch.bfloat16)
    for name, dtype in (("vision_encoder", torch.bfloat16), ("prompt_encoder", torch.float32)):
        part = narrow.ask.model.get_submodule(name)
        assert {value.dtype for value in part.parameters()} == {dtype}
    encoded = narrow.encode(image)
    one, other = (
        narrow.decode(encoded, [Prompt(points=((x, 30.0),), inside=(True,))], several=True)[0]
        for x in (85, 85.1)
    )
    assert not torch.equal(one, other)  # bfloat16 has nothing between 85 and 85.5
    exact = wide.decode(wide.encode(image), [Prompt(points=((85.0, 30.0),), inside=(True,))], several=True)[0]
    assert (one - exact).norm() < 0.2 * exact.norm()


def test_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UnknownName, match="family of segmentation models 'bert'"):
        tw.load_segmenter(tmp_path)
    with pytest.raises(ModelError, match="float16"):
        tw.load_segmenter(tmp_path, torch.float16)
