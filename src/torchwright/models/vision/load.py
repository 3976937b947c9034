"""transformers' own vision encoder and projector of a folder, without its language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError, first_line
from torchwright.hub.folder import read_config
from torchwright.workloads.huggingface import quiet_transformers

LANGUAGE = ("language_model", "text_model")
"""Names in transformers for the language model, which the decoder computes."""


def vision_part(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model without its language model, which is loaded with one layer and few tokens, then dropped."""
    config = read_config(folder)
    try:
        with quiet_transformers():
            import transformers

            described: Any = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            text = described.get_text_config()
            text.num_hidden_layers = 1
            text.vocab_size = 1 + max(_ids(text.to_dict()), default=0)
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:1]
            if hasattr(described, "quantization_config"):
                del described.quantization_config
            # The whole class: its conversions of published names of tensors are not all applied for its base model.
            auto: Any = transformers.AutoModelForImageTextToText
            whole, loaded = auto.from_pretrained(
                folder,
                config=described,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelError(
            f"transformers cannot load the vision encoder of {folder}", found=first_line(error)
        ) from error
    model: Any = whole.base_model
    part = next((name for name in LANGUAGE if hasattr(model, name)), None)
    elsewhere = ("lm_head", *(f"{whole.base_model_prefix}.{name}" for name in LANGUAGE))
    lacks = [name for name in loaded["missing_keys"] if not name.startswith(elsewhere)]
    if lacks or not hasattr(model, "get_image_features") or part is None:
        kind = f"{config.get('model_type')}: " + (
            f"{len(lacks)} tensors missing, such as {lacks[0]}" if lacks else ""
        )
        raise ModelError(f"the vision encoder of {folder} cannot be used", found=kind)
    delattr(model, part)
    return model.eval().requires_grad_(False)


def _ids(fields: dict[str, Any]) -> list[int]:
    """Special tokens, which must lie within the vocabulary."""
    return [value for name, value in fields.items() if name.endswith("_token_id") and isinstance(value, int)]
