"""config.json, tokenizer, processor and chat template for random weights of Qwen2.5-VL, as they are published.

Peers read these files, some with older releases of transformers. The tokenizer knows bytes, and has the published ids
of the special tokens; the rest of the vocabulary has names that no text makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIRST_SPECIAL = 151_643
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


IDS = {name.strip("<|>"): FIRST_SPECIAL + place for place, name in enumerate(SPECIAL)}


def write(folder: Path, fields: dict[str, Any]) -> None:
    """Write the files into a folder of weights; `fields` are those of transformers' configuration class."""
    text, vision = dict(fields["text_config"]), fields["vision_config"]
    rope = text.pop("rope_parameters")
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "bos_token_id": IDS["endoftext"],
        "eos_token_id": IDS["im_end"],
        **{f"{kind}_token_id": IDS[kind] for kind in ("vision_start", "vision_end")},
        **{f"{kind}_token_id": IDS[f"{kind}_pad"] for kind in ("vision", "image", "video")},
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "use_sliding_window": False,
        **text,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "tie_word_embeddings": fields["tie_word_embeddings"],
        "torch_dtype": "bfloat16",
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            "in_chans": 3,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            **vision,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "th", *(f"<unused{place}>" for place in range(FIRST_SPECIAL - len(alphabet) - 1))]
    # llama.cpp refuses a vocabulary without merges.
    made = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [("t", "h")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIAL],
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
