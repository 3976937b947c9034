"""The config.json of an EAGLE-3 head, in the layouts of SpecForge (and SafeAILab's EAGLE) and of speculators."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import decoder_config

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
HEAD_FIELDS = (
    *("draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual", "norm_before_fc"),
    *("eagle_aux_hidden_state_layer_ids", "bias", "tie_word_embeddings", "fc_norm", "norm_output"),
)
"""Fields of a head that a Llama's config.json does not have, or that mean something else there."""
HOUSEKEEPING = ("auto_map", "speculators_config", "speculators_version", "verifier_num_layers", "base_model")
"""Fields that say where a head comes from."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """The shape of an EAGLE-3 head (Li et al., 2025)."""

    layer: DecoderConfig
    """Its one layer, as that of a Llama with one layer."""
    draft_vocabulary: int
    """Tokens that it can propose."""
    target_model: int
    """The decoder's model size."""
    observed: tuple[int, ...]
    """Layers of the decoder whose inputs it reads."""
    norm_before_residual: bool
    """True if the residual stream begins behind the norm of the fused features."""
    norm_before_fuse: bool
    """True if all features together are normed before they are fused."""
    norm_features: bool
    """True if each layer's are normed by themselves (EAGLE 3.1)."""
    normed_states: bool
    """True if the next step reads the head's states behind its final norm (EAGLE 3.1)."""


def is_eagle(config: dict[str, Any]) -> bool:
    """Check whether a config.json describes an EAGLE-3 head."""
    return config.get("speculators_model_type") == "eagle3" or any(
        name in ARCHITECTURES for name in config.get("architectures") or ()
    )


def eagle_config(config: dict[str, Any], path: Path, *, target_layers: int) -> EagleConfig:
    """Read an EAGLE-3 head's config.json; raise `ModelError` for fields that are wrong or not honoured."""
    fields = Fields(path, config)
    nested = "transformer_layer_config" in config
    inner = fields.section("transformer_layer_config").data if nested else config
    skipped = (*HEAD_FIELDS, *HOUSEKEEPING, "speculators_model_type", "architectures", "model_type")
    llama = {key: value for key, value in inner.items() if key not in skipped}
    if inner.get("model_type", "llama") != "llama":
        raise ModelError(
            f"{path} describes a head whose layer is not a Llama's",
            found=str(inner.get("model_type")),
            allowed="llama",
        )
    llama |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    # The same key: in SpecForge whether logits have a norm before them, in speculators whether the next step does.
    if not nested and not fields.flag("norm_output", True):
        raise fields.wrong(
            "norm_output", "true: heads without a norm before their output layer are not computed here"
        )
    layer = decoder_config(llama, path)
    if layer.layers != 1:
        raise fields.wrong("num_hidden_layers", "1: heads of several layers are not read")
    return EagleConfig(
        layer=layer,
        draft_vocabulary=fields.integer("draft_vocab_size", layer.vocabulary),
        target_model=fields.integer("target_hidden_size", layer.model),
        observed=_observed(fields, target_layers, by_input=nested),
        # speculators' heads, whose layer is nested, norm before the residual stream unless they say otherwise.
        norm_before_residual=fields.flag("norm_before_residual", nested),
        norm_before_fuse=fields.flag("norm_before_fc", False),
        norm_features=fields.flag("fc_norm", False),
        normed_states=nested and fields.flag("norm_output", False),
    )


def _observed(fields: Fields, layers: int, *, by_input: bool) -> tuple[int, ...]:
    """The observed layers, by their inputs, as speculators and vLLM count; SpecForge and SGLang count outputs."""
    key = "eagle_aux_hidden_state_layer_ids"
    section = fields.section("eagle_config") if isinstance(fields.data.get("eagle_config"), dict) else fields
    ids = section.get(key)
    if ids is None:
        return (2, layers // 2, layers - 3) if layers > 5 else _spread(layers)
    if not isinstance(ids, list) or len(ids) != 3 or not all(type(id) is int for id in ids):
        raise section.wrong(key, "three layers")
    found = tuple(id if by_input else id + 1 for id in ids)
    if not all(0 <= id <= layers for id in found):
        raise section.wrong(key, f"layers of the model, which has {layers}")
    return found


def _spread(layers: int) -> tuple[int, int, int]:
    """Three layers of a decoder that is too shallow for the usual ones."""
    return min(1, layers), layers // 2, layers
