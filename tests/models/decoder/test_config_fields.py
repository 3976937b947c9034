"""Every field of a family's config.json is honoured as transformers does, or refused by name.

Logits are compared with those of transformers' eager float32, which loads the same folder, within `TOLERANCE` of
logits of order 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import config_fields as sweep
import pytest
import torch
import transformers
from config_fields import FULL, SLIDING, built, fields, values
from safetensors.torch import load_file, save_file
from tiny import COMMON, token_ids

from torchwright.core.errors import ModelError
from torchwright.hub.architectures import NATIVE, UnsupportedArchitecture
from torchwright.hub.language_part import language_part
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.families import FAMILIES, decoder_config

FINE = ("equal", "refused", "alone", "transformers does not build it")

OWN: list[tuple[str, str, Any, str]] = [
    ("Llama", "attention_bias", True, "equal"),
    ("Llama", "mlp_bias", True, "equal"),
    ("Llama", "hidden_act", "relu", "refused"),
    ("Llama", "pretraining_tp", 2, "equal"),
    ("Llama", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "refused"),
    ("Phi3", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "equal"),
    ("Mistral", "sliding_window", 0, "refused"),
    ("Qwen2", "layer_types", [SLIDING, FULL, SLIDING], "equal"),
    ("Qwen3", "rms_norm_eps", 0.3, "equal"),
    ("Gemma2", "attn_logit_softcapping", 1.0, "equal"),
    ("Gemma2", "final_logit_softcapping", None, "equal"),
    ("Gemma3Text", "attn_logit_softcapping", 1.0, "refused"),
    ("Gemma3Text", "use_bidirectional_attention", True, "refused"),
    ("Gemma3Text", "query_pre_attn_scalar", 64, "equal"),
    ("Granite", "logits_scaling", 4.0, "equal"),
    ("Qwen3Moe", "norm_topk_prob", True, "equal"),
    ("Olmoe", "clip_qkv", 0.4, "equal"),
]
"""Family, field of its class, value, verdict."""
WRITTEN: list[tuple[str, str, Any, str]] = [
    ("Mistral", "layer_types", [SLIDING, FULL, SLIDING], "refused"),
    ("Llama", "sliding_window", 5, "refused"),
    ("Llama", "attn_logit_softcapping", 1.0, "refused"),
    ("Llama", "is_causal", False, "refused"),
    ("Llama", "per_layer_config", {"0": {"intermediate_size": 64}}, "refused"),
    ("Llama", "quantization", {"bits": 4, "group_size": 64}, "refused"),
    ("Llama", "rope_scaling", {"type": "linear", "factor": 4.0}, "equal"),
    ("Llama", "use_cache", False, "equal"),
    ("Qwen3Moe", "routed_scaling_factor", 2.5, "refused"),
    ("Qwen3Moe", "routed_scaling_factor", 1.0, "equal"),
    ("Qwen3Moe", "n_shared_experts", 1, "refused"),
]
"""The same for a field that the family's class does not have."""


@pytest.mark.parametrize(("family", "field", "value", "wanted"), OWN)
def test_a_field_of_the_class_is_honoured_or_refused(
    family: str, field: str, value: Any, wanted: str, tmp_path: Path
) -> None:
    assert sweep.own(family, field, value, tmp_path) == wanted


@pytest.mark.parametrize(("family", "field", "value", "wanted"), WRITTEN)
def test_a_field_of_other_classes_is_honoured_or_refused(
    family: str, field: str, value: Any, wanted: str, tmp_path: Path
) -> None:
    built(family, {}).save_pretrained(tmp_path / "base")
    assert sweep.written(tmp_path / "base", field, value, tmp_path / "changed") == wanted


@pytest.mark.sweep
@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_every_field_is_honoured_or_refused(family: str, tmp_path: Path) -> None:
    """Change each field of the class, write each field of other classes, and take each field away."""
    base = tmp_path / "base"
    built(family, {}).save_pretrained(base)
    assert sweep.verdict(base, "-") == "equal"
    folder = (tmp_path / str(number) for number in range(1000))
    found = {
        f"{name} = {value}": sweep.own(family, name, value, next(folder))
        for name, default in fields(family).items()
        for value in values(name, default)
    }
    found |= {
        f"{name} := {value}": sweep.written(base, name, value, next(folder))
        for name, several in sweep.EXTRA.items()
        for value in several
    }
    saved = json.loads((base / "config.json").read_text())
    found |= {f"no {name}": sweep.without(base, name, next(folder)) for name in saved}
    assert {what: verdict for what, verdict in found.items() if verdict not in FINE} == {}
    assert sum(verdict == "equal" for verdict in found.values()) > 60


def test_the_table_of_architectures_is_the_table_of_families() -> None:
    assert list(NATIVE) == list(FAMILIES)


# Configurations as they are published, but for their sizes: none of these fields may be refused.
SMALL = {key: value for key, value in COMMON.items() if not key.endswith("_token_id")}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "initializer_range": 0.02,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "unsloth_version": "2025.3.1",
        "_name_or_path": "meta/some",
        "_attn_implementation_autoset": True,
    },
    "SmolLM2": {
        "architectures": ["LlamaForCausalLM"],
        "is_llama_config": True,
        "model_type": "llama",
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 28,
        "model_type": "qwen2",
        "sliding_window": 131072,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "resid_pdrop": 0.0,
        "rope_scaling": None,
        "sliding_window": 262144,
    },
    "Gemma 2": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "model_type": "gemma2",
        "query_pre_attn_scalar": 256,
    },
    "Gemma 3": {
        "_sliding_window_pattern": 6,
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "model_type": "gemma3_text",
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "use_bidirectional_attention": False,
    },
    "SmolLM3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "layer_types": [FULL] * 3,
        "max_window_layers": 28,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1],
        "pretraining_tp": 2,
        "use_sliding_window": False,
    },
    "LFM2": {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_dim": 64,
        "block_ff_dim": 384,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 64,
        "conv_dim_out": 64,
        "conv_use_xavier_init": True,
        "full_attn_idxs": [1],
        "model_type": "lfm2",
        "norm_eps": 1e-05,
        "num_heads": 4,
        "rope_theta": 1000000.0,
        "theta": 1000000.0,
        "tie_embedding": True,
        "use_pos_enc": True,
    },
    "Granite 4 H": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "init_method": "mup",
        "layer_types": ["mamba", "attention", "mamba"],
        "logits_scaling": 6,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
        "mamba_proj_bias": False,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 6,
        "num_local_experts": 64,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 10000,
        "shared_intermediate_size": 128,
    },
    "Qwen3-Next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "use_sliding_window": False,
    },
    "Qwen3.5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "vision_config": {"depth": 1},
        "text_config": SMALL
        | {
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "layer_types": ["linear_attention", "linear_attention", FULL],
            "linear_key_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
        },
    },
    "Hunyuan 7B": {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "attention_bias": False,
        "attention_head_dim": 16,
        "cla_share_factor": 2,
        "class_num": 0,
        "dense_list": [4096, 0],
        "eod_token_id": 3,
        "head_dim": 16,
        "mask_init_id": 12,
        "mlp_bias": False,
        "model_type": "hunyuan_v1_dense",
        "norm_type": "hf_rms",
        "num_experts": 1,
        "org_vocab_size": 128167,
        "pool_type": "last",
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        "rope_theta": 10000.0,
        "use_cla": False,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
    },
    "Hunyuan A13B": {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "attention_head_dim": 16,
        "group_limited_greedy": False,
        "kv_lora_rank": None,
        "model_type": "hunyuan_v1_moe",
        "moe_drop_tokens": False,
        "moe_intermediate_size": [SMALL["intermediate_size"]] * 3,
        "moe_layer_num_skipped": 0,
        "moe_topk": [8] * 3,
        "norm_topk_prob": True,
        "num_experts": 64,
        "num_media_embeds": 257,
        "num_shared_expert": [1] * 3,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "routed_scaling_factor": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "vit_patch": 1,
    },
    "a classifier's leftovers": {
        "architectures": ["LlamaForCausalLM"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "problem_type": None,
        "output_hidden_states": False,
        "task_specific_params": None,
        "tokenizer_class": "LlamaTokenizer",
        "max_length": 20,
        "temperature": 1.0,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    config = language_part(SMALL | PUBLISHED[name])
    assert decoder_config(config, "config.json").layers == 3


def test_architectures_and_model_type_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'model_type' cannot be used.*'qwen2'.*llama, as 'architectures'"):
        decoder_config(SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}, "config.json")


def test_a_multimodal_model_is_recognized() -> None:
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {"a": 1},
    }
    with pytest.raises(UnsupportedArchitecture, match=r"is multimodal: it takes pictures.*LlavaFor"):
        decoder_config(config, "config.json")


# Folders that transformers reads and that lack what others have.


def same_logits(folder: Path) -> None:
    wanted = sweep.reference(folder)
    assert wanted is not None, "transformers does not read the folder"
    torch.testing.assert_close(
        load_decoder(folder).logits(token_ids(1, sweep.TOKENS)), wanted, rtol=0, atol=1e-4
    )


def saved(folder: Path, family: str = "Llama", **overrides: Any) -> tuple[Path, dict[str, Any]]:
    """A small model's folder and its config.json."""
    built(family, overrides).save_pretrained(folder)
    return folder, json.loads((folder / "config.json").read_text())


def test_a_folder_without_architectures_is_read_by_its_model_type(tmp_path: Path) -> None:
    folder, config = saved(tmp_path / "a")
    del config["architectures"]
    same_logits(sweep.with_config(folder, config, tmp_path / "b"))


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_a_base_model_saved_by_itself_is_read_where_its_output_layer_is_tied(
    family: str, tmp_path: Path
) -> None:
    built(family, {"tie_word_embeddings": True}).base_model.save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    same_logits(tmp_path)


def test_a_base_model_without_an_output_layer_is_refused(tmp_path: Path) -> None:
    built("Llama", {}).base_model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lack the tensor 'lm_head\.weight'"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("change", ["only the output layer", "another output layer", "both alike"])
def test_tied_files_with_an_output_layer_are_read_as_transformers_reads_them(
    change: str, tmp_path: Path
) -> None:
    folder, _ = saved(tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    if change == "only the output layer":
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    else:
        tensors["lm_head.weight"] = (
            table.flip(0).contiguous() if change == "another output layer" else table.clone()
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    same_logits(folder)
    decoder: Any = load_decoder(folder).decoder
    shared = decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()
    assert shared == (change != "another output layer")


@pytest.mark.parametrize("kind", ["Exaone", "InternLM3", "IQuestCoder"])
def test_configurations_of_their_own_whose_model_is_llama_are_read(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**COMMON | {"head_dim": 16})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.15) if parameter.dim() > 1 else parameter.data.add_(0.1)
    model.save_pretrained(tmp_path)
    same_logits(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rms_norm_eps", "rope_parameters"):  # what the class fills in
        del config[name]
    same_logits(sweep.with_config(tmp_path, config, tmp_path / "bare"))
