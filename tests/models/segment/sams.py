"""Tiny SAM folders whose random masks mean something, and transformers' own model beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Sam2Config, Sam2Model, SamConfig, SamModel
from transformers.models.sam2.configuration_sam2 import Sam2HieraDetConfig

SIDE = 64


def tiny_sam(folder: Path) -> Path:
    """A SAM of two layers over squares of 64 pixels."""
    vision = {
        "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 64,
        "num_pos_feats": 8,
    }  # fmt: skip
    prompt = {
        "hidden_size": 16, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4,
        "image_embedding_size": SIDE // 8,
    }  # fmt: skip
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=_decoder())
    return _saved(SamModel(config), folder)


def tiny_sam2(folder: Path) -> Path:
    """A SAM 2 with a Hiera of four blocks over squares of 64 pixels."""
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
    config = Sam2Config(
        vision_config=vision,
        prompt_encoder_config=prompt,
        mask_decoder_config={**_decoder(), "hidden_size": 32, "iou_head_hidden_dim": 32},
    )
    return _saved(Sam2Model(config), folder)


def picture(height: int, width: int) -> np.ndarray:
    """Coloured blocks with noise, (H, W, 3) uint8."""
    random = np.random.default_rng()
    blocks = random.integers(0, 200, (height // 16 + 1, width // 16 + 1, 3)).repeat(16, 0).repeat(16, 1)
    return (blocks[:height, :width] + random.integers(0, 55, (height, width, 3))).astype(np.uint8)


def _decoder() -> dict[str, Any]:
    return {
        "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    }  # fmt: skip


def _saved(model: Any, folder: Path) -> Path:
    """Weights wide enough that masks have both sides, where transformers' own initial ones are all but zero."""
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(std=value[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return folder
