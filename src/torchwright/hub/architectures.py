"""Recognize which native decoder family a config.json describes. No torch here.

`architectures` names the family. Where it is missing or names a base model, `model_type` does, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError
from torchwright.core.quiet import quiet_import
from torchwright.hub.fields import Fields

NATIVE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "CwmForCausalLM": "cwm",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Exaone4ForCausalLM": "exaone4",
    "GraniteForCausalLM": "granite",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "GptOssForCausalLM": "gpt_oss",
    "SeedOssForCausalLM": "seed_oss",
    "Gemma4ForCausalLM": "gemma4_text",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "FalconH1ForCausalLM": "falcon_h1",
    "BambaForCausalLM": "bamba",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
}
"""Architecture → `model_type` of its configuration in transformers."""
OTHER_INPUTS = {
    "vision_config": "pictures",
    "vision_tower": "pictures",
    "mm_vision_tower": "pictures",
    "visual": "pictures",
    "img_processor": "pictures",
    "audio_config": "sound",
    "audio_processor": "sound",
    "thinker_config": "pictures and sound",
}
"""Keys of a multimodal config.json → the input they describe."""
CAUSAL = ("ForCausalLM", "LMHeadModel", "BertGenerationDecoder", "ReformerModelWithLMHead")
"""Endings of the names of decoder-only language models."""

GENERATES = "ForConditionalGeneration"
"""Ending of the names of classes that write text of text and other inputs."""
WITH_TEXT_ALONE = (
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
)
"""Multimodal classes that transformers also loads as causal language models."""


class UnsupportedArchitecture(ModelError):
    """A model that the native decoder does not know; transformers may."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A configuration class of its own whose model is one of the native families."""

    architecture: str
    renamed: dict[str, str] = field(default_factory=dict)
    """Its names of fields → the family's."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults that differ from the family's."""

    def translate(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the fields under the family's names, with the variant's defaults filled in.

        A field that has both names has the variant's value.
        """
        renamed = {self.renamed[key]: value for key, value in data.items() if key in self.renamed}
        return (
            self.defaults | {key: value for key, value in data.items() if key not in self.renamed} | renamed
        )


VARIANTS = {
    "exaone": Variant(
        architecture="LlamaForCausalLM",
        renamed={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    ),
    "internlm3": Variant(
        architecture="LlamaForCausalLM",
        renamed={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
    ),
    "lfm2": Variant(
        architecture="Lfm2ForCausalLM",
        renamed={
            "block_ff_dim": "intermediate_size",
            "norm_eps": "rms_norm_eps",
            "tie_embedding": "tie_word_embeddings",
        },
    ),
    "lfm2_moe": Variant(
        architecture="Lfm2MoeForCausalLM",
        renamed={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
    ),
    "granitemoehybrid": Variant(
        architecture="GraniteMoeHybridForCausalLM", renamed={"layers_block_type": "layer_types"}
    ),
    "iquestcoder": Variant(architecture="LlamaForCausalLM", defaults={"rms_norm_eps": 1e-5, "head_dim": 128}),
}
"""`model_type` → the family it is a variant of, or whose fields have other names in it."""


def recognize(data: dict[str, Any], path: Path | str) -> tuple[str, dict[str, Any]]:
    """Return the architecture of a config.json and its fields under that family's names.

    Raises `UnsupportedArchitecture` for a model of no native family, and `ModelError` where `architectures` and
    `model_type` name different families.
    """
    names, kind = named(data), data.get("model_type")
    if kind in VARIANTS and (not names or any("ForCausalLM" in name for name in names)):
        return VARIANTS[kind].architecture, VARIANTS[kind].translate(data)
    by_name = {architecture.lower(): architecture for architecture in NATIVE}
    known = [by_name[name.lower()] for name in names if name.lower() in by_name]
    if not known and all(name.endswith("Model") for name in names):
        known = [architecture for architecture, native in NATIVE.items() if native == kind]
    # Another model type may configure a known class, as Sarvam's does GLM-4 MoE.
    if not known or (kind is not None and kind not in NATIVE.values()):
        raise _unsupported(data, names, path)
    if kind is not None and kind != NATIVE[known[0]]:
        raise Fields(path, data).wrong(
            "model_type", f"{NATIVE[known[0]]}, as 'architectures' says {known[0]}"
        )
    return known[0], data


def named(data: dict[str, Any]) -> list[str]:
    """Return the architectures that a config.json names."""
    names = data.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def runs_on_transformers(data: dict[str, Any]) -> bool:
    """Check whether transformers has the class of a model that continues text alone. Imports no torch."""
    names = [name for name in named(data) if name.endswith((*CAUSAL, *WITH_TEXT_ALONE))]
    if not names or (other_inputs(data) and not set(names) <= set(WITH_TEXT_ALONE)):
        return False
    return _has_classes(names)


def shows_on_transformers(data: dict[str, Any]) -> bool:
    """Check whether transformers has the class of a decoder that takes pictures besides text. Imports no torch."""
    names = named(data)
    takes = "pictures" in (other_inputs(data) or "") and data.get("is_encoder_decoder") is not True
    if not names or not takes or not all(name.endswith(("ForCausalLM", GENERATES)) for name in names):
        return False
    return _has_classes(names)


def _has_classes(names: list[str]) -> bool:
    with quiet_import():
        import transformers

        known = set(dir(transformers))
    return all(name in known for name in names)


def folder_instead(workload: Mapping[str, Any]) -> str | None:
    """Return the advice for an artifact of one forward pass whose model writes text; None for any other.

    Such an artifact has no cache, but the folder that it was made from can be run on transformers' own code.
    """
    if not str(workload.get("architecture")).endswith(CAUSAL):
        return None
    return f"it holds one forward pass; name the model's folder instead: {workload.get('model')}"


def other_inputs(data: dict[str, Any]) -> str | None:
    """Return what a multimodal model takes besides text, None for a model of text alone."""
    found = dict.fromkeys(words for key, words in OTHER_INPUTS.items() if data.get(key))
    return " and ".join(found) or None


def _unsupported(data: dict[str, Any], names: list[str], path: Path | str) -> UnsupportedArchitecture:
    kind = data.get("model_type")
    found = ", ".join(names) or f"no 'architectures', and model_type {kind!r}"
    if inputs := other_inputs(data):
        return UnsupportedArchitecture(
            f"the model of {path} is multimodal: it takes {inputs} besides text; the native decoder takes text alone",
            found=found,
            allowed=", ".join(sorted(NATIVE)),
            next="take a checkpoint of its language model alone",
        )
    return UnsupportedArchitecture(
        f"the native decoder does not know the model of {path}",
        found=found,
        allowed=", ".join(sorted(NATIVE)),
        next="`torchwright generate` and `serve` run a folder of another family on transformers' own code, where "
        "transformers has its class",
    )
