"""GGUF files of models with recurrent layers: what converters write in more than one way, blocks, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_models as models
import gguf_sizes
import pytest
import quantized as made
import torch
from gguf_files import U32
from test_gguf import letters
from test_gguf_families import agrees, token_ids

from torchwright.core.errors import ModelError
from torchwright.hardware.kernels import ops
from torchwright.hub.gguf.assemble import below, columns, rows
from torchwright.hub.gguf.folder import opened
from torchwright.hub.weight import Grouped, Integers, Plain
from torchwright.models.decoder import load_decoder
from torchwright.workloads.huggingface import load_model

pytestmark = pytest.mark.usefixtures("gguf_cache")


@pytest.mark.parametrize(
    "name", ["lfm2moe", "granitehybrid", "granitehybrid-experts", "qwen3next", "qwen35moe"]
)
def test_transformers_takes_the_folder_of_a_file(name: str, tmp_path: Path) -> None:
    model = models.build(name)
    read = load_model(
        opened(models.write(tmp_path / "model.gguf", name, model, letters())), "AutoModelForCausalLM"
    )
    torch.testing.assert_close(
        made.logits(read, token_ids()), made.logits(model, token_ids()), rtol=0, atol=1e-4
    )


WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
DELTA = {"shared_expert_intermediate_size": 256, "linear_num_value_heads": 4}
"""Sizes that blocks of 256 numbers divide, in heads that move as whole groups of 32."""
SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("lfm2moe", "Q8_0"): {},
    ("granitehybrid", "Q8_0"): {},
    ("granitehybrid-experts", "Q8_0"): {},
    ("granitehybrid-experts", "Q4_K"): {
        "hidden_size": 256,
        "intermediate_size": 256,
        "shared_intermediate_size": 256,
        "mamba_d_head": 64,
    },
    ("qwen3next", "Q4_K"): WIDE | DELTA | {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ("qwen35moe", "Q8_0"): {},
    ("qwen35moe", "Q4_K"): WIDE | DELTA | {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}


@pytest.mark.plain("granitehybrid-experts-Q4_K", "qwen35moe-Q8_0", "lfm2moe-Q8_0")
@pytest.mark.parametrize(("name", "kind"), SIZES)
def test_weights_in_blocks(name: str, kind: str, tmp_path: Path) -> None:
    model = models.build(name, **SIZES[name, kind])
    agrees(models.write(tmp_path / "model.gguf", name, model, letters(), lambda stored: kind), model)


@pytest.mark.parametrize(("name", "wide"), [("granitehybrid", 2), ("qwen35moe", 1)])
def test_integers_that_are_kept_give_the_bits_of_dequantized_ones(
    name: str, wide: int, tmp_path: Path
) -> None:
    """`wide` layers have rows in another order: each state space's, and the attention's queries."""
    if ops.fault("cpu"):
        pytest.skip(f"no kernels: {ops.fault('cpu')}")
    model = models.build(name, **SIZES.get((name, "Q4_K"), {}))
    path = models.write(tmp_path / "model.gguf", name, model, letters(), lambda stored: "Q8_0")
    kept = load_decoder(path, torch.bfloat16)
    assert f"{wide} layers dequantized to bfloat16" in (kept.stored or "")
    plain = load_decoder(path, torch.bfloat16, quantize="none")
    assert torch.equal(kept.logits(token_ids()), plain.logits(token_ids()))


def test_an_interval_tells_which_layers_are_recurrent(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    model = models.build("qwen35", num_hidden_layers=4, layer_types=kinds)
    interval: dict[str, Any] = {
        "qwen35.attention.recurrent_layers": [True],
        "qwen35.full_attention_interval": U32(2),
    }
    with pytest.raises(ModelError, match=r"recurrent_layers'.*4 times true or false"):
        load_decoder(models.write(tmp_path / "none.gguf", "qwen35", model, letters(), **interval))
    listed = gguf_sizes.SIZES["qwen35"]
    sizes = lambda config: {key: value for key, value in listed(config).items() if "recurrent" not in key}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gguf_sizes.SIZES, "qwen35", sizes)
        del interval["qwen35.attention.recurrent_layers"]
        agrees(models.write(tmp_path / "model.gguf", "qwen35", model, letters(), **interval), model)


def test_all_four_projections_may_be_one_tensor(tmp_path: Path) -> None:
    """Files of llama.cpp's first version for Qwen3-Next."""
    model = models.build("qwen3next")
    weights = model.state_dict()
    apart = [f"blk.{layer}.{stem}.weight" for layer in (0, 2) for stem in ("attn_qkv", "attn_gate")]
    whole = {
        f"blk.{layer}.ssm_in.weight": weights[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
        for layer in (0, 2)
    }
    path = models.write(
        tmp_path / "model.gguf", "qwen3next", model, letters(), extra=whole, without=tuple(apart)
    )
    agrees(path, model)


def test_queries_with_gates_keys_and_values_may_be_one_tensor(tmp_path: Path) -> None:
    model = models.build("qwen35")
    apart = tuple(f"blk.1.{stem}.weight" for stem in ("attn_q", "attn_k", "attn_v"))
    weights = model.model.layers[1].self_attn
    fused = torch.cat([weights.q_proj.weight, weights.k_proj.weight, weights.v_proj.weight])
    path = models.write(
        tmp_path / "model.gguf",
        "qwen35",
        model,
        letters(),
        extra={"blk.1.attn_qkv.weight": fused},
        without=apart,
    )
    agrees(path, model)


def test_layers_that_predict_tokens_ahead_are_left_out(tmp_path: Path) -> None:
    model = models.build("qwen35")
    draft = {"blk.3.nextn.eh_proj.weight": torch.ones(64, 128), "blk.3.attn_q.weight": torch.ones(64, 64)}
    more: dict[str, Any] = {
        "qwen35.block_count": U32(4),
        "qwen35.nextn_predict_layers": U32(1),
        "qwen35.attention.recurrent_layers": [True, False, True, False],
    }
    agrees(models.write(tmp_path / "model.gguf", "qwen35", model, letters(), extra=draft, **more), model)


THREE = [U32(2), U32(0), U32(4)]
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent layers of Llama": (
        "llama",
        {"llama.attention.head_count_kv": [U32(2), U32(0), U32(2)]},
        "head_count_kv'.*LlamaForCausalLM has no recurrent layers",
    ),
    "two counts of heads": ("lfm2", {"lfm2.attention.head_count_kv": THREE}, "3 times the same number, or 0"),
    "too few layers": ("lfm2", {"lfm2.attention.head_count_kv": THREE[:2]}, "3 times the same number"),
    "no attention": ("lfm2", {"lfm2.attention.head_count_kv": [U32(0)] * 3}, "3 times the same number"),
    "a window": ("lfm2", {"lfm2.attention.sliding_window": U32(9)}, "'lfm2.attention.sliding_window'"),
    "shares by softmax": ("lfm2moe", {"lfm2moe.expert_gating_func": U32(1)}, "expert_gating_func'.*2, as"),
    "scaled shares": ("lfm2moe", {"lfm2moe.expert_weights_scale": 2.5}, "'lfm2moe.expert_weights_scale'"),
    "inner size": (
        "granitehybrid",
        {"granitehybrid.ssm.inner_size": U32(96)},
        "inner_size'.*of embedding_le",
    ),
    "heads and groups": ("qwen35", {"qwen35.ssm.group_count": U32(4)}, "time_step_rank'.*multiple of ssm.gr"),
    "heads and size": (
        "qwen35",
        {"qwen35.ssm.inner_size": U32(95)},
        "inner_size'.*multiple of ssm.time_step",
    ),
    "norms of steps": ("qwen3next", {"qwen3next.ssm.dt_b_c_rms": True}, "'qwen3next.ssm.dt_b_c_rms'"),
    "too many blocks": ("qwen35", {"qwen35.block_count": U32(2**31 - 1)}, "'qwen35.block_count'.*at most"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_change_the_logits_are_refused(case: str, tmp_path: Path) -> None:
    name, changed, message = WRONG[case]
    path = models.write(tmp_path / "wrong.gguf", name, models.build(name), letters(), **changed)
    with pytest.raises(ModelError, match=message):
        load_decoder(path)


TENSORS: dict[str, tuple[str, dict[str, torch.Tensor], tuple[str, ...], str]] = {
    "a convolution beside attention": (
        "lfm2",
        {"blk.1.shortconv.conv.weight": torch.ones(64, 3)},
        (),
        "'blk.1.shortconv.conv.weight' that Lfm2ForCausalLM does not have",
    ),
    "attention in a recurrent layer": (
        "qwen35",
        {"blk.0.attn_q.weight": torch.ones(64, 64)},
        (),
        "'blk.0.attn_q.weight'",
    ),
    "another last norm": ("lfm2", {"output_norm.weight": torch.ones(64)}, (), "'output_norm.weight'"),
    "no gates": ("qwen3next", {}, ("blk.0.attn_gate.weight",), "lacks the tensor 'blk.0.attn_gate.weight'"),
    "too few gates": ("qwen3next", {"blk.0.attn_gate.weight": torch.ones(9, 64)}, (), "has another shape"),
    "gate as a vector": ("granitehybrid", {"blk.0.ffn_gate.weight": torch.ones(96)}, (), "96.*a matrix"),
    "a rate above 0": ("qwen35", {"blk.0.ssm_a": torch.ones(6)}, (), "'blk.0.ssm_a' .* cannot be used"),
    "a bias of the projection": (
        "granitehybrid",
        {"blk.0.ssm_in.bias": torch.ones(296)},
        (),
        "'blk.0.ssm_in.bias'",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named(case: str, tmp_path: Path) -> None:
    name, extra, without, message = TENSORS[case]
    model = models.build(name)
    path = models.write(tmp_path / "wrong.gguf", name, model, letters(), extra=extra, without=without)
    with pytest.raises(ModelError, match=message):
        load_decoder(path)


def grouped(seed: int, N: int = 6, K: int = 16, group: int = 4) -> Grouped:
    random = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 16, (N, K), generator=random).to(torch.uint8)
    scales, least = (torch.rand(N, K // group, generator=random) for _ in range(2))
    part = lambda begin, end: Integers(
        integers_NK=integers[begin:end], scales_NG=scales[begin:end], least_NG=least[begin:end]
    )
    return Grouped(shape=(N, K), bits=4, group=group, part=part)


def test_assembled_weights_keep_their_integers_where_they_can() -> None:
    first, second = grouped(1), grouped(2, N=3)
    stacked = torch.cat([first.rows(0, 6), second.rows(0, 3)])
    both = below([first, second], ["Q4_K", "Q4_K"])
    assert isinstance(both, Grouped)
    mixed = below([first, second], ["Q4_K", "Q4_1"])
    assert not isinstance(mixed, Grouped)
    for weight in (both, mixed):
        assert all(
            torch.equal(weight.rows(begin, end), stacked[begin:end])
            for begin in range(10)
            for end in range(begin, 10)
        )
    order_N = torch.tensor([5, 6, 7, 0, 2, 1, 8, 3, 4])
    assert torch.equal(rows(both, order_N).rows(1, 8), stacked[order_N][1:8])
    order_K = torch.cat([torch.arange(8, 16), torch.arange(8)])
    swapped = columns(first, order_K)
    assert isinstance(swapped, Grouped)
    broken = columns(first, order_K.roll(1))
    assert not isinstance(broken, Grouped)
    assert torch.equal(swapped.rows(2, 5), first.rows(2, 5)[:, order_K])
    assert torch.equal(broken.rows(2, 5), first.rows(2, 5)[:, order_K.roll(1)])
    assert torch.equal(columns(Plain(stacked), order_K).rows(0, 9), stacked[:, order_K])
