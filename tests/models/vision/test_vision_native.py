"""A vision encoder on our kernels: transformers' own modules are the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vlms
from torchwright.core.errors import ModelError, UnknownName
from torchwright.core.scheme import BF16, W8A8
from torchwright.hardware.kernels import reference
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.vision import encoder as module
from torchwright.models.vision import native
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.native import Attention, GatedMLP, Norm, OntoKernels, Patches
from torchwright.models.vision.reader import PictureReader
from torchwright.models.vision.record import Picture, picture_of

SIZES = [(60, 90), (28, 28), (100, 40), (112, 112), (84, 56)]
"""Heights and widths; with windows of 56 pixels some are whole, and others are cut."""
EXPECTED = {
    "Qwen2VL": {Patches, Attention},
    "Qwen2_5_VL": {Patches, Attention, GatedMLP, Norm},
    "Qwen3VL": {Patches, Attention},
    "Qwen3_5": {Patches, Attention},
}
"""Which layers besides linear ones are replaced."""
COSINE = {"none": 0.999, "w8a8": 0.98}
"""Cosine of embeddings of tiny random layers, whose rounding in 8 bits averages over few features."""


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def plain(folder: Path, picture: Picture, dtype: torch.dtype = torch.bfloat16) -> Any:
    """transformers' own embeddings of a picture."""
    found = PictureEncoder(folder, dtype)
    found._model = module.vision_part(folder, dtype)
    return found.embed(picture)


@pytest.mark.plain("Qwen2VL")
@pytest.mark.parametrize("name", vlms.named_hosts())
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    vlms.save(name, tmp_path)
    reader = PictureReader(tmp_path)
    encoders = {kind: PictureEncoder(tmp_path, torch.bfloat16, quantize=kind) for kind in ("none", "w8a8")}
    for seed, size in enumerate(SIZES):
        picture = reader.read(vlms.picture(seed, *size)).picture
        wanted = plain(tmp_path, picture)
        for kind, found in encoders.items():
            got = found.embed(picture)
            assert module._cosine(wanted, got) >= COSINE[kind]
            assert got.rows_NE.dtype == torch.bfloat16
    for kind, scheme in {"none": BF16, "w8a8": W8A8}.items():
        model = encoders[kind]._model
        kinds = {type(layer) for layer in model.modules()}
        assert EXPECTED.get(name, set()) <= kinds
        assert not any(type(layer) is torch.nn.Linear for layer in model.modules())
        assert {layer.scheme for layer in model.modules() if isinstance(layer, PackedLinear)} == {scheme}
        assert f"our kernels in {scheme}" in (encoders[kind].runs_as or "")


@pytest.mark.plain("Qwen2_5_VL-none")
@pytest.mark.parametrize("kind", ["none", "w8a8"])
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "LlavaNext"])
def test_a_picture_has_the_same_bits_beside_others(name: str, kind: str, tmp_path: Path) -> None:
    """Whatever came before it, and beside pictures of NaN."""
    vlms.save(name, tmp_path)
    reader = PictureReader(tmp_path)
    pictures = [reader.read(vlms.picture(seed, *size)).picture for seed, size in enumerate(SIZES)]
    found = PictureEncoder(tmp_path, torch.bfloat16, quantize=kind)
    alone = [
        PictureEncoder(tmp_path, torch.bfloat16, quantize=kind).embed(one).rows_NE for one in pictures[:2]
    ]
    for picture in reversed(pictures):
        found.embed(picture)
    for picture, rows in zip(pictures, alone, strict=False):
        assert torch.equal(found.embed(picture).rows_NE, rows)
        arrays = {key: array.numpy().copy() for key, array in picture.arrays.items()}
        arrays["pixel_values"][:] = np.nan
        assert found.embed(picture_of(arrays, picture.tokens)).rows_NE.isnan().any()
        assert torch.equal(found.embed(picture).rows_NE, rows)


@pytest.mark.plain("Qwen2VL")
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen2VL"])
def test_pictures_in_one_call_do_not_touch_each_other(name: str, tmp_path: Path) -> None:
    """The layers take rows of several pictures: bitwise as alone, and a picture of NaN stays by itself."""
    vlms.save(name, tmp_path)
    reader = PictureReader(tmp_path)
    found = PictureEncoder(tmp_path, torch.bfloat16)
    found.load()
    pictures = [reader.read(vlms.picture(seed, *size)).picture for seed, size in enumerate(SIZES)]
    alone = [found.embed(picture).rows_NE for picture in pictures]
    pixels = [torch.from_numpy(one.arrays["pixel_values"].numpy().copy()) for one in pictures]
    grids = torch.cat([torch.from_numpy(one.arrays["image_grid_thw"].numpy().copy()) for one in pictures])
    with torch.inference_mode():
        for broken in (None, 2):
            given = [torch.full_like(one, torch.nan) if n == broken else one for n, one in enumerate(pixels)]
            got = found._model.get_image_features(torch.cat(given), grids, return_dict=True).pooler_output
            for number, (rows, wanted) in enumerate(zip(got, alone, strict=True)):
                if number == broken:
                    assert rows.isnan().all()
                else:
                    assert torch.equal(rows, wanted)


def test_a_sequence_too_long_for_the_kernel_goes_through_sdpa() -> None:
    torch.manual_seed(0)
    lengths, heads, size = [40, 90, 3], 2, 24
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    qkv = torch.randn(133, 3 * heads * size).bfloat16()
    angles = torch.randn(133, size // 2)
    arguments = (angles.cos(), angles.sin(), starts, heads, 0.2)
    wanted = reference.varlen_attention(qkv.double(), *arguments)
    short = native.varlen_attention(qkv, *arguments)
    long = native.varlen_attention(qkv, *arguments, longest=64)
    assert error(short, wanted) < 8e-3
    assert error(long, wanted) < 8e-3
    assert torch.equal(short[:40], long[:40])
    assert torch.equal(short[130:], long[130:])


def test_a_layer_that_computes_another_thing_stays(tmp_path: Path) -> None:
    """A class with the parts of a known one, and other arithmetic, is found by its results."""
    vlms.save("Qwen2_5_VL", tmp_path)
    model = module.vision_part(tmp_path, torch.bfloat16)
    kind = type(model.visual.merger.ln_q)

    class Plus(kind):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 1

    model.visual.merger.ln_q.__class__ = Plus
    onto = OntoKernels(None)
    onto.replace(model)
    assert type(model.visual.merger.ln_q) is Plus
    assert list(onto.kept) == ["Plus"]
    assert "differ" in onto.kept["Plus"]


def test_an_encoder_that_disagrees_runs_on_transformers(
    tmp_path: Path,
) -> None:
    vlms.save("Qwen2_5_VL", tmp_path)
    picture = PictureReader(tmp_path).read(vlms.picture(0)).picture
    wanted = plain(tmp_path, picture).rows_NE
    with pytest.raises(ModelError, match=r"w8a8: its embeddings have a cosine of 0\.9"):
        PictureEncoder(tmp_path, torch.bfloat16, quantize="w8a8", least_cosine=1.5).load()
    found = PictureEncoder(tmp_path, torch.bfloat16, rounded=True, least_cosine=1.5)
    assert torch.equal(found.embed(picture).rows_NE, wanted)
    assert found.runs_as is not None
    assert found.runs_as.startswith("transformers' modules; w8a8: its embeddings have a cosine of 0.9")
    assert "; bf16: its embeddings" in found.runs_as


def test_what_is_asked_and_what_is_chosen(tmp_path: Path) -> None:
    vlms.save("Qwen2_5_VL", tmp_path)
    with pytest.raises(UnknownName, match="unknown quantization of a vision encoder 'w4a8'"):
        PictureEncoder(tmp_path, torch.bfloat16, quantize="w4a8")
    chosen = {}
    for rounded in (False, True):
        found = PictureEncoder(tmp_path, torch.bfloat16, rounded=rounded)
        found.load()
        chosen[rounded] = (found.runs_as or "").split(",")[0]
    assert chosen == {False: "our kernels in bf16", True: "our kernels in w8a8"}
    wide = PictureEncoder(tmp_path, torch.float32)
    wide.load()
    assert wide.runs_as == "transformers' modules"
