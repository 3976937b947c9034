"""Tiny encoder-decoder text models with random weights, one or more of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

VOCABULARY = 400
COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
BART = COMMON | {
    "bos_token_id": 0,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 160,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
T5 = COMMON | {
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", BART),
    "bart-scaled": (
        "Bart",
        BART | {"scale_embedding": True, "activation_function": "relu", "decoder_layers": 1},
    ),
    "marian": ("Marian", BART | {"scale_embedding": True, "activation_function": "swish"}),
    "marian-two-tables": (
        "Marian",
        BART | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 320, "pad_token_id": 3},
    ),
    "nllb": ("M2M100", BART | {"scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("MBart", BART | {"scale_embedding": True, "encoder_layers": 3}),
    "pegasus": ("Pegasus", BART | {"scale_embedding": True}),
    "t5": ("T5", T5),
    "t5-1.1": (
        "T5",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
    ),
    "t5-wide": (
        "T5",
        T5 | {"d_kv": 32, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    ),
}
CLASSES = {"Marian": "MarianMTModel", "M2M100": "M2M100ForConditionalGeneration"}


def tiny(folder: Path, name: str) -> Any:
    """The folder's model in float64, whose norms, biases and tables are none that a new model has."""
    family, fields = MODELS[name]
    made: Any = getattr(transformers, CLASSES.get(family, f"{family}ForConditionalGeneration"))(
        getattr(transformers, f"{family}Config")(**fields)
    )
    made.eval().requires_grad_(False)
    for key, parameter in made.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
        elif "relative_attention_bias" in key:
            parameter.copy_(2 * torch.randn_like(parameter))
        elif "embed_positions" not in key or family in ("Bart", "MBart"):
            width = fields["d_model"]
            embeds = "shared" in key or "embed_tokens" in key
            size = (
                (width**-0.5 if fields.get("scale_embedding") else 1.0)
                if embeds
                else parameter.shape[1] ** -0.5
            )
            # Blocks outweigh what was embedded: else a tied output layer says each token again.
            size *= 0.25 if key.endswith(".q.weight") else 1  # T5 does not scale its scores
            size *= 3 if key.endswith((".out_proj.weight", ".o.weight", ".fc2.weight", ".wo.weight")) else 1
            parameter.copy_(size * torch.randn_like(parameter))
    if hasattr(made, "final_logits_bias"):
        made.final_logits_bias.copy_(torch.randn_like(made.final_logits_bias))
    made.tie_weights()
    made.save_pretrained(folder)
    return made.double()


def tokenizer(folder: Path, languages: tuple[str, ...] = (), *, behind: bool = False) -> None:
    """A token a byte behind the special ones; sources begin with the first language, if any, and end with </s>.

    With `behind` the language follows </s>.
    """
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*specials, *alphabet])}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*specials, *languages])
    front = [languages[0]] if languages else []
    made.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>", *front] if behind else [*front, "$A", "</s>"],
        special_tokens=[(token, made.token_to_id(token)) for token in (*front, "</s>")],
    )
    made.save(str(folder / "tokenizer.json"))
