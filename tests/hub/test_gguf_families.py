"""GGUF files of each model family: logits equal to those of transformers on the weights that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_models as models
import pytest
import quantized as made
import torch
from gguf_files import U32
from test_gguf import letters

from torchwright.core.errors import ModelError
from torchwright.hardware.kernels import ops
from torchwright.hub.gguf.families import FAMILIES
from torchwright.hub.gguf.folder import opened
from torchwright.models.decoder import load_decoder
from torchwright.workloads.huggingface import load_model

pytestmark = pytest.mark.usefixtures("gguf_cache")


def token_ids(length: int = 40) -> torch.Tensor:
    """Longer than every window and every trained length of the models."""
    return torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(1))


def agrees(path: Path, model: Any) -> None:
    torch.testing.assert_close(
        load_decoder(path).logits(token_ids()), made.logits(model, token_ids()), rtol=0, atol=1e-4
    )


def test_every_family_is_written_here() -> None:
    assert {architecture for architecture, _, _ in models.MODELS.values()} >= set(FAMILIES) - {
        "qwen2",
        "qwen3",
    }


@pytest.mark.parametrize("name", models.MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = models.build(name)
    agrees(models.write(tmp_path / "model.gguf", name, model, letters()), model)


BLOCKS = [
    *((name, kind) for name in ("gpt-oss", "glm4moe") for kind in ("Q8_0", "MXFP4")),
    ("qwen3moe", "Q8_0"),
    ("qwen3moe", "Q4_K"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
"""Sizes that blocks of 256 numbers divide."""


@pytest.mark.parametrize(("name", "kind"), BLOCKS)
def test_experts_in_blocks(name: str, kind: str, tmp_path: Path) -> None:
    model = models.build(name, **(WIDE if kind == "Q4_K" else {}))
    chosen = lambda stored: kind if kind != "MXFP4" or "_exps" in stored else "F32"
    path = models.write(tmp_path / "model.gguf", name, model, letters(), chosen)
    agrees(path, model)


def test_experts_that_are_kept_give_the_bits_of_dequantized_ones(tmp_path: Path) -> None:
    if ops.fault("cpu"):
        pytest.skip(f"no kernels: {ops.fault('cpu')}")
    model = models.build("qwen3moe", **WIDE)
    path = models.write(tmp_path / "model.gguf", "qwen3moe", model, letters(), lambda stored: "Q4_K")
    kept = load_decoder(path, torch.bfloat16)
    assert kept.stored == "GGUF Q4_K, F32: repacked as w4bf16"
    wide = load_decoder(path, torch.bfloat16, quantize="none")
    assert torch.equal(kept.logits(token_ids()), wide.logits(token_ids()))


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "gemma3", "glm4moe"])
def test_transformers_takes_the_folder_of_a_file(name: str, tmp_path: Path) -> None:
    """The folder is the original that `optimize` compares with."""
    model = models.build(name)
    path = models.write(tmp_path / "model.gguf", name, model, letters())
    read = load_model(opened(path), "AutoModelForCausalLM")
    torch.testing.assert_close(made.logits(read, token_ids()), made.logits(model, token_ids()))


@pytest.mark.parametrize("name", ["llama-biases", "qwen3moe", "chatglm"])
def test_query_key_and_value_may_be_one_tensor(name: str, tmp_path: Path) -> None:
    model = models.build(name)
    apart = {
        stored: view.reshape(shape) for stored, view, shape, _ in models.parts(models.MODELS[name][0], model)
    }
    gone = tuple(stored for stored in apart if stored.split(".")[-2] in ("attn_q", "attn_k", "attn_v"))
    fused = {
        stored.replace("attn_q", "attn_qkv"): torch.cat(
            [apart[stored.replace("attn_q", each)] for each in ("attn_q", "attn_k", "attn_v")]
        )
        for stored in gone
        if ".attn_q." in stored
    }
    path = models.write(tmp_path / "model.gguf", name, model, letters(), extra=fused, without=gone)
    agrees(path, model)


def test_layers_that_predict_tokens_ahead_are_left_out(tmp_path: Path) -> None:
    model = models.build("glm4moe")
    draft = {"blk.3.nextn.eh_proj.weight": torch.ones(64, 128), "blk.3.attn_norm.weight": torch.ones(64)}
    more: dict[str, Any] = {"glm4moe.block_count": U32(4), "glm4moe.nextn_predict_layers": U32(1)}
    agrees(models.write(tmp_path / "model.gguf", "glm4moe", model, letters(), extra=draft, **more), model)


def test_one_number_tells_which_layers_have_a_window(tmp_path: Path) -> None:
    model = models.build("gemma3")
    number: dict[str, Any] = {"gemma3.attention.sliding_window_pattern": U32(6)}
    agrees(models.write(tmp_path / "model.gguf", "gemma3", model, letters(), **number), model)
    full: dict[str, Any] = {"gemma3.attention.sliding_window_pattern": U32(1)}
    loaded = load_decoder(models.write(tmp_path / "full.gguf", "gemma3", model, letters(), **full))
    assert loaded.decoder.config.windows == (0,) * 7


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts of ERNIE": ("ernie4_5", {"general.architecture": "ernie4_5-moe"}, "'ernie4_5-moe'.*ernie4_5"),
    "experts of Granite": ("granite", {"granite.expert_count": U32(4)}, "'granite.expert_count'.*no experts"),
    "count of experts": ("mixtral", {"llama.expert_count": U32(5)}, "'blk.0.ffn_.*' .*a stack of 5 experts"),
    "no experts": ("qwen3moe", {"qwen3moe.expert_count": U32(0)}, "'qwen3moe.expert_count'.*1 or more"),
    "shares by sigmoid": ("qwen3moe", {"qwen3moe.expert_gating_func": U32(2)}, "expert_gating_func'.*1, as"),
    "scaled shares": ("qwen3moe", {"qwen3moe.expert_weights_scale": 2.5}, "'qwen3moe.expert_weights_scale'"),
    "a temperature": ("mistral3", {"mistral3.attention.temperature_scale": 0.1}, "temperature_scale'"),
    "positions of pictures": ("glm4", {"glm4.rope.dimension_sections": [U32(8)] * 2}, "dimension_sections'"),
    "no rotary embedding": (
        "granite",
        {"granite.rope.scaling.finetuned": False},
        "'granite.rope.scaling.fine",
    ),
    "part of a head": ("llama", {"llama.rope.dimension_count": U32(8)}, "'llama.rope.dimension_count'.*16"),
    "extrapolation": ("gpt-oss", {"gpt-oss.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor'.*: 1"),
    "attention of yarn": ("gpt-oss", {"gpt-oss.rope.scaling.yarn_attn_factor": 1.5}, "attn_factor'.*1.2079"),
    "too few windows": ("olmo3", {"olmo2.attention.sliding_window_pattern": [True]}, "4 times true or false"),
    "a local base": ("gemma2", {"gemma2.rope.freq_base_swa": 5.0}, "'gemma2.rope.freq_base_swa'"),
    "drafts alone": ("glm4moe", {"glm4moe.nextn_predict_layers": U32(3)}, "fewer than the 3 blocks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_change_the_logits_are_refused(case: str, tmp_path: Path) -> None:
    name, changed, message = WRONG[case]
    model = models.build(name)
    with pytest.raises(ModelError, match=message):
        load_decoder(models.write(tmp_path / "wrong.gguf", name, model, letters(), **changed))


ONE = torch.ones(64)
TENSORS: dict[str, tuple[str, dict[str, torch.Tensor], tuple[str, ...], str]] = {
    "another family's norm": (
        "llama",
        {"blk.0.attn_q_norm.weight": torch.ones(16)},
        (),
        "LlamaForCausalLM does",
    ),
    "a bias of the output layer": ("llama", {"output.bias": torch.ones(96)}, (), "'output.bias'"),
    "a bias that no one adds": ("qwen2vl", {"blk.0.attn_output.bias": ONE}, (), "'blk.0.attn_output.bias'"),
    "one bias of four": ("llama", {"blk.0.attn_q.bias": ONE}, (), "attn_q.*biases for attn_q, attn_k"),
    "query twice": (
        "llama",
        {"blk.0.attn_qkv.weight": torch.ones(128, 64)},
        (),
        "two tensors.*q_proj.weight",
    ),
    "fused rows": ("llama", {"blk.0.attn_qkv.weight": torch.ones(99, 64)}, (), "99, 64.*128 rows"),
    "a layer beyond": ("llama", {"blk.3.attn_q.weight": torch.ones(64, 64)}, (), "'blk.3.attn_q.weight'"),
    "flat experts": ("mixtral", {"blk.0.ffn_up_exps.weight": torch.ones(6, 64)}, (), "6, 64.*a stack of 6"),
    "gate without up": ("gpt-oss", {}, ("blk.1.ffn_up_exps.weight",), "lacks the tensor 'blk.1.ffn_up_exps"),
    "up without gate": (
        "gpt-oss",
        {},
        ("blk.1.ffn_gate_exps.bias",),
        "lacks the tensor 'blk.1.ffn_gate_exps",
    ),
    "no sinks": (
        "gpt-oss",
        {},
        ("blk.2.attn_sinks.weight",),
        "lack the tensor 'model.layers.2.self_attn.sinks'",
    ),
    "long factors alone": (
        "phi3-longrope",
        {},
        ("rope_factors_short.weight",),
        "'rope_factors_short.weight'",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named(case: str, tmp_path: Path) -> None:
    name, extra, without, message = TENSORS[case]
    model = models.build(name)
    path = models.write(tmp_path / "wrong.gguf", name, model, letters(), extra=extra, without=without)
    with pytest.raises(ModelError, match=message):
        load_decoder(path)
