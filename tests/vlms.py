"""Tiny vision-language models with random weights, each with a processor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

from folders import VOCABULARY as FOLDER_VOCABULARY
from folders import byte_tokenizer
from torchwright.models.vision.reader import still

MARKS = [
    "<image>",
    "<image_soft_token>",
    "<start_of_image>",
    "<end_of_image>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<video>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)),
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_PATCH|>",
    "TILE",
    "TILE_GLOBAL",
    "<|image|>",
    "<|video|>",
    "<|audio|>",
]
NAMES = {
    "PaddleOCRVL": {"image_token": "<|image_pad|>"},
    "Gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "Gemma4": {
        "image_token": "<|image|>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "audio_token": "<|audio|>",
        "boa_token": "<img>",
        "eoa_token": "</img>",
    },
    "InternVL": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
}
"""Names under which a processor asks its tokenizer for special tokens."""
FIRST = FOLDER_VOCABULARY
"""The tokens of `byte_tokenizer` come before."""
VOCABULARY = FIRST + len(MARKS)
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "fullatt_block_indexes": [1],
    "window_size": 56,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
PLAIN = {key: value for key, value in TEXT.items() if key != "head_dim"}
DELTA = TEXT | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": SECTIONS | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
}


def mark(text: str) -> int:
    return FIRST + MARKS.index(text)


PAD = {
    "image_token_id": mark("<|image_pad|>"),
    "video_token_id": mark("<|video_pad|>"),
    "vision_start_token_id": mark("<|vision_start|>"),
    "vision_end_token_id": mark("<|vision_end|>"),
}
PIXELS = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16}
QWEN3_PIXELS = {"size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}, "patch_size": 16}
IMAGE = {"image_token_index": mark("<image>")}
CLIP_SIZE = {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28}}
Spec = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
HOSTS: dict[str, Spec] = {
    "Qwen2VL": (
        {"text_config": PLAIN | {"rope_parameters": SECTIONS}, "vision_config": QWEN | {"hidden_size": 64}}
        | PAD,
        PIXELS,
        {},
    ),
    "Qwen2_5_VL": (
        {"text_config": PLAIN | {"rope_parameters": SECTIONS}, "vision_config": QWEN} | PAD,
        PIXELS,
        {},
    ),
    "Qwen3VL": (
        {
            "text_config": TEXT | {"rope_parameters": SECTIONS},
            "vision_config": QWEN | {"patch_size": 16, "deepstack_visual_indexes": [0, 2]},
        }
        | PAD,
        QWEN3_PIXELS,
        {},
    ),
    "Qwen3_5": (
        {"text_config": DELTA, "vision_config": QWEN | {"patch_size": 16}} | PAD,
        QWEN3_PIXELS,
        {},
    ),
    "Gemma3": (
        {
            "text_config": TEXT | {"model_type": "gemma3_text", "sliding_window": 8},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": mark("<image_soft_token>"),
            "boi_token_index": mark("<start_of_image>"),
            "eoi_token_index": mark("<end_of_image>"),
        },
        {"size": {"height": 28, "width": 28}},
        {"image_seq_length": 4},
    ),
    "Idefics3": (
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "idefics3_vision"},
            "image_token_id": mark("<image>"),
            "scale_factor": 2,
        },
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        {"image_seq_len": 1},
    ),
    "Llava": (
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
        }
        | IMAGE,
        CLIP_SIZE,
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "LlavaNext": (
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": 8},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        }
        | IMAGE,
        CLIP_SIZE | {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "LlavaOnevision": (
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
            "video_token_index": mark("<video>"),
        }
        | IMAGE,
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        {
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
    ),
    "Mistral3": (
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": VISION | {"model_type": "pixtral", "image_size": 112},
            "image_token_index": mark("[IMG]"),
            "spatial_merge_size": 2,
        },
        {"size": {"longest_edge": 112}, "patch_size": {"height": 28, "width": 28}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "InternVL": (
        {
            "text_config": TEXT | {"model_type": "qwen3"},
            "vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
            "image_token_id": mark("<IMG_CONTEXT>"),
        },
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 1},
    ),
    "SmolVLM": (
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "smolvlm_vision"},
            "image_token_id": mark("<image>"),
            "scale_factor": 2,
        },
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        {"image_seq_len": 1},
    ),
    "Lfm2Vl": (
        {
            "text_config": PLAIN
            | {
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention", "conv"],
                "block_multiple_of": 16,
            },
            "vision_config": VISION | {"model_type": "siglip2_vision_model", "num_patches": 16},
            "image_token_id": mark("<image>"),
            "projector_hidden_size": 48,
        },
        {
            "encoder_patch_size": 14,
            "tile_size": 56,
            "min_image_tokens": 2,
            "max_image_tokens": 4,
            "min_tiles": 2,
            "max_tiles": 4,
        },
        {},
    ),
    "PaddleOCRVL": (
        {
            "text_config": TEXT | {"rope_parameters": SECTIONS, "use_bias": True},
            "vision_config": VISION | {"image_size": 56},
        }
        | PAD,
        PIXELS,
        {},
    ),
}
"""`…Config` of transformers → its fields, the options of its processor of images, and those of its processor."""
GEMMA4: dict[str, Any] = {
    "text_config": TEXT
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    },
    "image_token_id": mark("<|image|>"),
    "video_token_id": mark("<|video|>"),
    "audio_token_id": mark("<|audio|>"),
    "boi_token_id": mark("<start_of_image>"),
    "eoi_token_id": mark("<end_of_image>"),
}
GEMMA4_PIXELS = {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}
FOREIGN: dict[str, Spec] = {
    "AyaVision": (
        {
            "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 8},
            "vision_config": VISION | {"model_type": "siglip_vision_model", "patch_size": 7},
            "image_token_index": mark("<|IMG_PATCH|>"),
        },
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 4},
        {"patch_size": 7, "img_size": 28, "downsample_factor": 2},
    ),
    "Gemma4": (GEMMA4, GEMMA4_PIXELS, {"image_seq_length": 70}),
    "Gemma4, pictures seen whole": (
        GEMMA4 | {"text_config": GEMMA4["text_config"] | {"use_bidirectional_attention": "vision"}},
        GEMMA4_PIXELS,
        {"image_seq_length": 70},
    ),
    "Glm4v": (
        {
            "text_config": PLAIN | {"rope_parameters": SECTIONS},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "out_hidden_size": 64,
                "intermediate_size": 48,
            },
            "image_token_id": mark("<|image|>"),
            "video_token_id": mark("<|video|>"),
        },
        {"size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 28 * 28 * 16}},
        {},
    ),
}
"""The same for models of no native family, behind a comma what is different."""
NEEDS = {"Mistral3": "torchvision", "Lfm2Vl": "torchvision", "SmolVLM": "num2words"}
"""Processors that transformers builds only with a package that may be missing."""


def named_hosts(names: Sequence[str] = tuple(HOSTS)) -> list[Any]:
    """Parameters of a test, skipped with the reason where the model's processor cannot be built here."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name in NEEDS and find_spec(NEEDS[name]) is None,
                reason=f"transformers reads pictures of {name} with {NEEDS.get(name)}, which is not installed",
            ),
        )
        for name in names
    ]


VIDEO: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 4},
    "Qwen2_5_VL": {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 4},
    "Qwen3VL": {"size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 32 * 32 * 16}},
    "Qwen3_5": {"size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 32 * 32 * 16}},
}
"""Models that take videos → the options of their processor of videos."""


def processor_of(folder: Path, *, videos: bool = False) -> Any:
    base = getattr(transformers, PROCESSOR_MAPPING_NAMES[_kind(folder)])
    return (base if videos else still(base)).from_pretrained(folder)


def _kind(folder: Path) -> str:
    return transformers.AutoConfig.from_pretrained(folder).model_type


def save(name: str, folder: Path, *, videos: bool = False) -> Any:
    """Save a model with its processor, and return it as transformers reads it again, in float32.

    With `videos` the processor prepares videos as well, for which it needs torchvision.
    """
    fields, image_options, options = (HOSTS | FOREIGN)[name]
    name = name.partition(",")[0]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**fields, tie_word_embeddings=False)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not parameter_name.endswith("embedding"):
            parameter.data.mul_(4)
        if not parameter.any():  # as Gemma's projector begins
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKS])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        extra_special_tokens=NAMES.get(name, {}),
    )
    base = getattr(transformers, PROCESSOR_MAPPING_NAMES[config.model_type])
    classes = IMAGE_PROCESSOR_MAPPING_NAMES[config.model_type]
    images = getattr(transformers, classes.get("pil") or classes["torchvision"])(**image_options)
    parts: dict[str, Any] = {"image_processor": images, "tokenizer": fast, "video_processor": None}
    if videos:
        moving = getattr(transformers, VIDEO_PROCESSOR_MAPPING_NAMES[config.model_type]["torchvision"])
        parts["video_processor"] = moving(**VIDEO[name])
    if "feature_extractor" in base.get_attributes():
        parts["feature_extractor"] = getattr(transformers, f"{name}AudioFeatureExtractor")()
    kind = base if videos else still(base)
    kind(*(parts[part] for part in base.get_attributes()), **options).save_pretrained(folder)
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


def picture(seed: int, height: int = 60, width: int = 90) -> np.ndarray:
    """Random shapes of colour (H, W, 3) in uint8: no two patches are alike."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
