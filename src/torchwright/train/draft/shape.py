"""The config.json of a new head in SpecForge's layout, and the tokens that it can propose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.draft.eagle_config import ARCHITECTURES, EagleConfig
from torchwright.train.data.shards import Shards
from torchwright.train.draft.config import MOST_TOKENS, HeadSection
from torchwright.train.run.config.data_section import RunError

THETA = 10_000.0
"""Base of the rotary embedding for a target that has none."""
SHALLOW = 12
"""Layers below which EAGLE-3's three layers lie next to each other."""
COUNTED = 1 << 22
"""Tokens that are counted at a time."""


def head_config(target: DecoderConfig, section: HeadSection) -> dict[str, Any]:
    """The config.json of a new head: a layer as wide as the target's, without biases, as SpecForge reads and writes it.

    Raises `RunError` for layers that the target does not have.
    """
    layers = section.layers or observed_layers(target.layers)
    if not all(0 < layer < target.layers for layer in layers):
        raise RunError(
            f"head.layers = {list(layers)}",
            found=f"a target of {target.layers} layers",
            allowed=f"three of 1 to {target.layers - 1}: SpecForge names a layer's input by the layer before it",
        )
    theta = next((rope.theta for rope in target.ropes if rope), THETA)
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "hidden_size": target.model,
        "intermediate_size": section.feed_forward or target.feed_forward,
        "num_hidden_layers": 1,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.eps,
        "max_position_embeddings": target.context,
        "rope_theta": theta,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": target.vocabulary,
        "draft_vocab_size": min(section.vocabulary or MOST_TOKENS, target.vocabulary),
        "target_hidden_size": target.model,
        # SpecForge and SGLang name a layer by its output: the next one's input.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        },
    }


def observed_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs a head reads by default: EAGLE-3's, spread further in a shallow target."""
    if layers >= SHALLOW:
        return 2, layers // 2, layers - 3
    return 1, max(1, layers // 2), layers - 1


def frequent_tokens(
    shards: Iterable[Shards], vocabulary: int, wanted: int, ends: Sequence[int]
) -> np.ndarray:
    """The `wanted` tokens that are trained on most often, int64 and rising; the `ends` of texts are always among them.

    Of equally frequent tokens the lower ids are taken.
    """
    if wanted >= vocabulary:
        return np.arange(vocabulary)
    counts = np.zeros(vocabulary, np.int64)
    for some in shards:
        for shard, size in enumerate(some.sizes):
            for start in range(0, size, COUNTED):
                ids = some.read(shard, start, COUNTED)
                counts += np.bincount(ids[some.trained(shard, start, COUNTED)], minlength=vocabulary)
    counts[[end for end in ends if end < vocabulary]] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-counts, kind="stable")[:wanted]).astype(np.int64)


def described(config: dict[str, Any], read: EagleConfig) -> dict[str, Any]:
    """A head's config.json in SpecForge's layout, for a head that may have been read in another one."""
    if "transformer_layer_config" not in config:
        return config
    layer, inner = read.layer, config["transformer_layer_config"]
    kept = {key: value for key, value in inner.items() if key not in ("architectures", "model_type")}
    return kept | {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "vocab_size": layer.vocabulary,
        "tie_word_embeddings": False,
        "draft_vocab_size": read.draft_vocabulary,
        "target_hidden_size": read.target_model,
        "norm_before_residual": read.norm_before_residual,
        "norm_before_fc": read.norm_before_fuse,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in read.observed],
            "use_aux_hidden_state": True,
        },
    }
