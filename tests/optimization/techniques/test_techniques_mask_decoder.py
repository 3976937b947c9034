"""SAM's mask decoder by fewer products, against transformers' own model in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Sam2Config, Sam2Model, SamConfig, SamHQConfig, SamHQModel, SamModel
from transformers.models.sam2.configuration_sam2 import Sam2HieraDetConfig

from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.mask_decoder import (
    MaskDecoder,
    MasksByProducts,
    PlacesAsk,
    TokensAsk,
)
from torchwright.workloads.module import ModuleWorkload

SIDE = 64
ERROR = 1e-5
"""Relative (Frobenius): sums in another order."""
LEAST = 0.3
"""Errors of smaller numbers are taken of this."""
HALF = 2.0
"""In bfloat16 it may be off by so many times as much as transformers' decoder in bfloat16."""
DECODER = {
    "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "iou_head_hidden_dim": 16,
}  # fmt: skip
PROMPT = {
    "hidden_size": 16, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4,
    "image_embedding_size": SIDE // 8,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": 8, "window_size": 3, "global_attn_indexes": [0], "mlp_dim": 64, "num_pos_feats": 8,
}  # fmt: skip


def sam() -> nn.Module:
    config = SamConfig(vision_config=VISION, prompt_encoder_config=PROMPT, mask_decoder_config=DECODER)
    return SamModel(config)


def sam_hq() -> nn.Module:
    decoder = {**DECODER, "vit_dim": 32}
    config = SamHQConfig(vision_config=VISION, prompt_encoder_config=PROMPT, mask_decoder_config=decoder)
    return SamHQModel(config)


def sam2() -> nn.Module:
    backbone = Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, image_size=[SIDE, SIDE], blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[4, 4, 4, 2], global_attention_blocks=[3],
        window_positional_embedding_background_size=[4, 4],
    )  # fmt: skip
    vision = {
        "backbone_config": backbone, "backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    }  # fmt: skip
    prompt = {"hidden_size": 32, "image_size": SIDE, "patch_size": 16, "mask_input_channels": 4}
    decoder = {**DECODER, "hidden_size": 32, "iou_head_hidden_dim": 32}
    config = Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    return Sam2Model(config)


def random(make: Any) -> nn.Module:
    """Weights and biases wide enough that each of them shows in the masks."""
    model = make().eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(std=value[0].numel() ** -0.5 if value.dim() > 1 else 0.5)
    return model


class Answers(nn.Module):
    """`count` prompts of several marks on each of some pictures: the masks and their scores."""

    def __init__(self, model: nn.Module, several: bool) -> None:
        super().__init__()
        self.model, self.several = model, several

    def forward(self, pixels: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> Any:
        found = self.model(
            pixel_values=pixels, input_points=points, input_labels=labels, multimask_output=self.several
        )
        return found.pred_masks, found.iou_scores


def inputs(pictures: int, prompts: int, marks: int) -> tuple[torch.Tensor, ...]:
    points = torch.rand(pictures, prompts, marks, 2) * SIDE
    labels = torch.randint(0, 2, points.shape[:3])
    return torch.randn(pictures, 3, SIDE, SIDE), points, labels


def target_of(model: nn.Module, *given: torch.Tensor) -> Any:
    return make_target(ModuleWorkload(model, given), get_device("cpu").identify())


@pytest.mark.plain("sam-(1, 1, 9)-three masks", "sam-(2, 3, 2)-one mask")
@pytest.mark.parametrize("several", [True, False], ids=["three masks", "one mask"])
@pytest.mark.parametrize("shape", [(1, 5, 1), (1, 1, 9), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("make", [sam, sam_hq, sam2])
def test_it_computes_what_the_decoder_did(make: Any, shape: tuple[int, int, int], several: bool) -> None:
    model, given = Answers(random(make), several), inputs(*shape)
    target = target_of(model, *given)
    apply_steps(target, [MaskDecoder().step()])
    kinds = [type(module) for module in target.model.modules()]
    assert (kinds.count(TokensAsk), kinds.count(PlacesAsk)) == (3, 2)
    assert kinds.count(MasksByProducts) == (make is sam)
    assert (target.coverage[-1].changed, target.coverage[-1].total) == (5, 5)
    with torch.no_grad():
        wanted = called(model, given, torch.float64)
        assert max(errors(called(target.model, given, torch.float32), wanted)) <= ERROR
        found, own = (errors(called(each, given, torch.bfloat16), wanted) for each in (target.model, model))
    assert max(found) <= HALF * max(*own, 0.05)  # of one prompt a score is one number


def called(model: nn.Module, given: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Any:
    pixels, points, labels = given
    return copy.deepcopy(model).to(dtype)(pixels.to(dtype), points.to(dtype), labels)


def errors(found: Any, wanted: Any) -> list[float]:
    assert [a.shape for a in found] == [b.shape for b in wanted]
    # A single score near nothing is as exact as others are.
    sizes = [max(float(b.norm()), LEAST * b.numel() ** 0.5) for b in wanted]
    return [float((a.double() - b).norm()) / size for a, b, size in zip(found, wanted, sizes, strict=True)]


def test_what_a_prompt_resembles_is_added_to_its_scores() -> None:
    """`attention_similarity`, which PerSAM gives."""
    model, given = random(sam), inputs(1, 4, 2)
    target = target_of(Answers(model, True), *given)
    apply_steps(target, [MaskDecoder().step()])
    # Wide enough that each token looks elsewhere, whatever the weights.
    similar = 10 * torch.randn(4, 1, 1, (SIDE // 8) ** 2)
    pixels, points, labels = given
    with torch.no_grad():
        wanted, found, without = (
            each(
                pixel_values=pixels, input_points=points, input_labels=labels, attention_similarity=mask
            ).pred_masks
            for each, mask in ((model, similar), (target.model.model, similar), (target.model.model, None))
        )
    assert float((found - wanted).norm() / wanted.norm()) <= ERROR
    assert float((without - wanted).norm() / wanted.norm()) > 10 * ERROR


def test_what_it_refuses() -> None:
    assert "no mask decoder" in str(MaskDecoder().refuse(target_of(nn.Linear(4, 4), torch.randn(1, 4))))
    model, given = random(sam), inputs(1, 2, 1)
    decoder: Any = model.mask_decoder
    for attention in (layer for layer in decoder.modules() if type(layer).__name__ == "SamAttention"):
        attention.register_forward_hook(lambda *_: None)
    assert "a hook" in str(MaskDecoder().refuse(target_of(Answers(model, True), *given)))
    model = random(sam)
    attention = model.get_submodule("mask_decoder.transformer.layers.0.cross_attn_token_to_image")
    attention.k_proj = nn.Linear(16, 8, bias=False)
    target = target_of(Answers(model, True), *given)
    apply_steps(target, [MaskDecoder().step()])
    assert list(target.coverage[-1].skipped) == [
        "model.mask_decoder.transformer.layers.0.cross_attn_token_to_image"
    ]
    with torch.no_grad():
        wanted, found = Answers(model, True)(*given)[0], target.model(*given)[0]
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-5


@pytest.mark.parametrize("name", ["", "upscale_conv2", "activation"])
def test_a_hook_on_what_would_not_be_called_is_called(name: str) -> None:
    model, given, called = random(sam), inputs(1, 2, 1), list[None]()
    model.get_submodule(f"mask_decoder.{name}".rstrip(".")).register_forward_hook(
        lambda *_: called.append(None)
    )
    target = target_of(Answers(model, True), *given)
    apply_steps(target, [MaskDecoder().step()])
    with torch.no_grad():
        wanted, before, found = Answers(model, True)(*given)[0], len(called), target.model(*given)[0]
    assert len(called) == 2 * before
    assert float((found - wanted).norm() / wanted.norm()) <= ERROR


def test_eight_bits_leave_the_picture_to_it() -> None:
    """`int8_dynamic` after it changes layers of tokens alone, and the masks stay near."""
    model, given = Answers(random(sam), True), inputs(1, 3, 1)
    target = target_of(model, *given)
    target.properties.add("compiled")
    apply_steps(
        target, [MaskDecoder().step(), *(Step(name=name, options={}) for name in ("dtype", "int8_dynamic"))]
    )
    assert sum(isinstance(module, TokensAsk) for module in target.model.modules()) == 3
    with torch.no_grad():
        wanted, found = model(*given)[0], target.model(*given)[0]
    assert float((found - wanted).norm() / wanted.norm()) <= 0.2
