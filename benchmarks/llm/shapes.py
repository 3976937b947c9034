"""Random-weight language models of real shapes, written once as Hugging Face folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# fmt: off
_TIED = {"tie_word_embeddings": True}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("LlamaConfig", _TIED | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0,
    }),
    "qwen3-0.6b": ("Qwen3Config", _TIED | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
    "qwen2.5-1.5b": ("Qwen2Config", _TIED | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936,
    }),
    "smollm2-360m": ("LlamaConfig", _TIED | {
        "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "vocab_size": 49152,
    }),
    "gemma-3-1b": ("Gemma3TextConfig", _TIED | {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    }),
    "lfm2-1.2b": ("Lfm2Config", _TIED | {
        "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 65536, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }),
    "qwen2.5-vl-3b": ("Qwen2_5_VLConfig", _TIED | {
        "image_token_id": 151655,
        "text_config": {
            "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
            "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 16384,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }),
}
# fmt: on


def make(name: str, folder: Path) -> Path:
    """Return `folder`/NAME with config.json and bfloat16 weights; write it if it does not exist yet."""
    target = folder / name
    if (target / "config.json").is_file():
        return target
    import transformers

    kind, options = SHAPES[name]
    sees = "vision_config" in options
    config = getattr(transformers, kind)(**({} if sees else {"max_position_embeddings": 16384}), **options)
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.ones(value.shape, dtype=torch.bfloat16)
        if value.ndim == 1
        else torch.empty(value.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)
        for key, value in model.state_dict().items()
        if not (key == "lm_head.weight" and config.tie_word_embeddings)
    }
    new = folder / f"{name}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(new)
    new.rename(target)
    return target
