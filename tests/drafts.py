"""Folders of EAGLE-3 heads with random weights, as SpecForge and speculators write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from torchwright.models.decoder.draft import Draft

LAYERS = {"specforge": "midlayer", "speculators": "layers.0"}
ARCHITECTURES = {"specforge": "LlamaForCausalLMEagle3", "speculators": "Eagle3Speculator"}


def head_tensors(
    target: dict[str, Any],
    *,
    layout: str = "specforge",
    draft_vocabulary: int = 64,
    seed: int = 0,
    own_embedding: bool = True,
    biased: bool = False,
    target_model: int | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors of a head with these sizes, for a target of `target_model` numbers a token (as many as the head's)."""
    random = torch.Generator().manual_seed(seed)
    E, F, V = target["hidden_size"], target["intermediate_size"], target["vocab_size"]
    heads, kv = target["num_attention_heads"], target["num_key_value_heads"]
    D = target.get("head_dim") or E // heads
    layer = LAYERS[layout]

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(E, generator=random)

    chosen_D = torch.randperm(V, generator=random)[:draft_vocabulary].sort().values
    tensors = {
        "fc.weight": matrix(E, 3 * (target_model or E)),
        f"{layer}.self_attn.q_proj.weight": matrix(heads * D, 2 * E),
        f"{layer}.self_attn.k_proj.weight": matrix(kv * D, 2 * E),
        f"{layer}.self_attn.v_proj.weight": matrix(kv * D, 2 * E),
        f"{layer}.self_attn.o_proj.weight": matrix(E, heads * D),
        f"{layer}.mlp.gate_proj.weight": matrix(F, E),
        f"{layer}.mlp.up_proj.weight": matrix(F, E),
        f"{layer}.mlp.down_proj.weight": matrix(E, F),
        f"{layer}.hidden_norm.weight": norm(),
        f"{layer}.input_layernorm.weight": norm(),
        f"{layer}.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": matrix(draft_vocabulary, E),
        "d2t": chosen_D - torch.arange(draft_vocabulary),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, chosen_D, True),
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(V, E)
    if biased:
        for part, rows in (("q", heads * D), ("k", kv * D), ("v", kv * D), ("o", E)):
            tensors[f"{layer}.self_attn.{part}_proj.bias"] = matrix(rows, 1)[:, 0]
    return tensors


def head_config(
    target: dict[str, Any], *, layout: str = "specforge", draft_vocabulary: int = 64, **fields: Any
) -> dict[str, Any]:
    """The config.json of such a head; `fields` go before its own."""
    kept = (
        *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads"),
        *(
            "head_dim",
            "rms_norm_eps",
            "max_position_embeddings",
            "rope_parameters",
            "rope_theta",
            "hidden_act",
        ),
    )
    layer = {key: target[key] for key in kept if target.get(key) is not None}
    layer |= {"model_type": "llama", "num_hidden_layers": 1}
    made = {"architectures": [ARCHITECTURES[layout]], "draft_vocab_size": draft_vocabulary}
    if layout == "speculators":
        made |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    else:
        made |= layer
    return made | fields


def write_head(target: Path, folder: Path, *, layout: str = "specforge", **options: Any) -> Path:
    """A random head for the model in `target`; options are those of `head_tensors` and fields of its config.

    `sizes` are fields of the target's config.json that the head has otherwise.
    """
    config = json.loads((target / "config.json").read_text())
    target_model = config["hidden_size"]
    config |= options.pop("sizes", {})
    names = ("draft_vocabulary", "seed", "own_embedding", "biased")
    shape = {name: options.pop(name) for name in names if name in options}
    tensors = head_tensors(config, layout=layout, target_model=target_model, **shape)
    tensors |= options.pop("tensors", {})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    vocabulary = {"draft_vocabulary": shape["draft_vocabulary"]} if "draft_vocabulary" in shape else {}
    biased = {"attention_bias": True} if shape.get("biased") and layout == "specforge" else {}
    wide = {} if config["hidden_size"] == target_model else {"target_hidden_size": target_model}
    described = head_config(config, layout=layout, **vocabulary, **biased, **wide, **options)
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def most_likely(draft: Draft, hidden_NE: torch.Tensor) -> tuple[list[int], list[float]]:
    """Each row's greedy proposal and its probability."""
    tokens_N1, logprob_N1 = draft.likeliest(hidden_NE, 1)
    return tokens_N1[:, 0].tolist(), np.exp(logprob_N1[:, 0]).tolist()
