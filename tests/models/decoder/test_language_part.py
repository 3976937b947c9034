"""The language model inside a multimodal folder answers text as the whole model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from folders import VOCABULARY, byte_tokenizer
from torchwright.core.errors import ModelError
from torchwright.hub.language_part import language_part
from torchwright.models.decoder import load_decoder
from torchwright.optimization.open_model import open_model
from torchwright.serve.folder import find

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
PLAIN_HEADS = {key: value for key, value in TEXT.items() if key != "head_dim"} | {"hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
DELTA_TEXT: dict[str, Any] = TEXT | {
    "hidden_size": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HOSTS: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": TEXT | {"model_type": "gemma3_text", "sliding_window": 8},
        "vision_config": VISION,
    },
    "Gemma4": {
        "text_config": TEXT
        | {
            "global_head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
        | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY}
        | {"hidden_size_per_layer_input": 24},
        "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 16},
        "image_token_id": 7,
    },
    "Llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
    "LlavaNext": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": 8},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
    "LlavaOnevision": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
    },
    "Mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": VISION | {"model_type": "pixtral"},
    },
    "Idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION},
    "SmolVLM": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION},
    "Qwen2VL": {"text_config": PLAIN_HEADS | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION},
    "Qwen2_5_VL": {"text_config": PLAIN_HEADS | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION},
    "Qwen3VL": {
        "text_config": TEXT | {"hidden_size": 64} | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION,
    },
    "Qwen3_5": {
        "text_config": DELTA_TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION,
    },
    "Qwen3_5Moe": {
        "text_config": DELTA_TEXT
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN_VISION,
    },
    "Lfm2Vl": {
        "text_config": PLAIN_HEADS
        | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
        "vision_config": VISION | {"model_type": "siglip2_vision_model", "num_patches": 4},
    },
    "InternVL": {
        "text_config": TEXT | {"model_type": "qwen3"},
        "vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
    },
    "PaddleOCRVL": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": VISION},
}
"""`…Config` of transformers → fields of a small model."""


def saved(name: str, folder: Path, *, tied: bool = False) -> Any:
    """A random model of one kind, in its folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**HOSTS[name], tie_word_embeddings=tied)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()


def logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids_BT, use_cache=False).logits.float()


IDS = torch.randint(5, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.plain("Llava-False", "LlavaNext-True", "Idefics3-True", "Llava-True")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", HOSTS)
def test_text_is_answered_as_by_the_whole_model(name: str, tied: bool, tmp_path: Path) -> None:
    whole = saved(name, tmp_path, tied=tied)
    ours = load_decoder(tmp_path, torch.float32)
    torch.testing.assert_close(ours.logits(IDS), logits(whole, IDS), rtol=1e-4, atol=1e-4)
    assert find(str(tmp_path)).served_as == "writer"
    opened = open_model(str(tmp_path), dtype="fp32", device="cpu")
    assert any("it takes text alone" in notice for notice in opened.notices)


OLDER = {
    "Qwen2_5_VL": {"model.language_model.": "model.", "model.visual.": "visual."},
    "Llava": {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.",
    },
    "SmolVLM": {},
}
"""Names of tensors in published files, which transformers renames as it reads them."""


@pytest.mark.parametrize("name", OLDER)
def test_published_names_of_tensors_are_read(name: str, tmp_path: Path) -> None:
    whole = saved(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for new, old in OLDER[name].items():
        tensors = {
            key.replace(new, old) if key.startswith(new) else key: value for key, value in tensors.items()
        }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if name == "Qwen2_5_VL":  # its published config.json is flat
        data = json.loads((tmp_path / "config.json").read_text())
        text = data.pop("text_config")
        section = text.pop("rope_parameters")
        older = {
            "rope_theta": section["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        }
        flat = text | data | older
        (tmp_path / "config.json").write_text(json.dumps(flat))
    ours = load_decoder(tmp_path, torch.float32)
    torch.testing.assert_close(ours.logits(IDS), logits(whole, IDS), rtol=1e-4, atol=1e-4)


def test_two_tensors_for_one_of_the_model_are_refused(tmp_path: Path) -> None:
    """An older and a newer name of the same weight: either could be the one that was meant."""
    saved("Llava", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    again = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    usual = f"model.{again[again.index('layers.') :]}"
    assert again != usual
    save_file(
        tensors | {usual: torch.zeros_like(tensors[again])},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelError, match="two tensors of the folder are the model's") as refused:
        load_decoder(tmp_path)
    assert again in str(refused.value)
    assert usual in str(refused.value)


def test_other_multimodal_folders_are_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "nosuch_vl", "vision_config": {}, "text_config": TEXT | {"model_type": "llama"}}
    assert language_part(config) is config
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {"a": 1}}))
    with pytest.raises(ModelError, match="multimodal"):
        load_decoder(tmp_path)
    strange = {"model_type": "llava", "text_config": TEXT | {"model_type": "nosuch"}}
    assert language_part(strange) is strange
