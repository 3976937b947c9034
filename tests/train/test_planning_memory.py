"""Estimated memory against what the trainer's own step takes, alone and under every kind of parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchwright.train.layout import Layout
from torchwright.train.planning.check import Counted, count_steps, eager_step
from torchwright.train.planning.job import Job, LayoutPlan
from torchwright.train.planning.memory import peak_memory
from torchwright.train.planning.models import KNOWN, read_model
from torchwright.train.prove.processes import on_processes
from torchwright.train.shape import Shape

SMALL: dict[str, Any] = KNOWN["llama-3.1-8b"] | {
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 768,
}
ONE_KEY = SMALL | {"num_key_value_heads": 1}
MANY_WORDS = SMALL | {"vocab_size": 12288, "num_hidden_layers": 2}
EXPERTS = SMALL | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 192,
}
LATENT = KNOWN["deepseek-v3"] | {
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 768,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
FEW = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 768,
}
CONVOLUTIONS = (
    KNOWN["lfm2-1.2b"] | FEW | {"intermediate_size": 672, "block_multiple_of": 32, "full_attn_idxs": [1]}
)
DELTA = (
    KNOWN["qwen3-next-80b-a3b"]
    | FEW
    | {
        "head_dim": 16,
        "full_attention_interval": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
    }
)
STATE_SPACE = (
    KNOWN["granite-4.0-h-micro"]
    | FEW
    | {
        "shared_intermediate_size": 448,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
    }
)
BESIDE = (
    KNOWN["falcon-h1-0.5b"]
    | FEW
    | {
        "intermediate_size": 448,
        "head_dim": 16,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
    }
)
GPT_OSS = KNOWN["gpt-oss-20b"] | {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GEMMA4 = KNOWN["gemma-4-e2b"] | {
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "num_kv_shared_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 768,
    "vocab_size_per_layer_input": 768,
    "hidden_size_per_layer_input": 32,
    "sliding_window": 128,
}
GEMMA4_EXPERTS = KNOWN["gemma-4-26b-a4b"] | {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 768,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 96,
    "sliding_window": 128,
}
CASES: list[tuple[dict[str, Any], str, int, int, str, str, int]] = [
    # model, layout, rows, context, precision, recompute, micro-batches
    (SMALL, "dp_shard=4", 2, 192, "fp32", "none", 1),
    (SMALL, "dp_shard=4", 2, 192, "bf16", "none", 1),
    (SMALL, "dp_shard=4", 4, 192, "bf16", "full", 1),
    (SMALL, "dp_shard=4", 2, 192, "bf16", "selective", 1),
    (SMALL, "dp_shard=4", 1, 32, "bf16", "none", 2),
    (SMALL, "dp_replicate=2,dp_shard=2", 1, 96, "bf16", "none", 1),
    (MANY_WORDS, "dp_shard=4", 1, 64, "bf16", "none", 1),
    (SMALL, "dp_shard=2,tp=2", 4, 192, "bf16", "none", 1),
    (SMALL, "dp_shard=2,cp=2", 2, 256, "bf16", "none", 1),
    (SMALL, "dp_shard=4", 1, 2048, "bf16", "none", 1),
    (ONE_KEY, "cp=4", 2, 256, "bf16", "none", 1),
    (ONE_KEY, "cp=4", 2, 1024, "bf16", "full", 1),
    (ONE_KEY, "dp_shard=2,cp=2", 1, 4096, "bf16", "none", 1),
    (ONE_KEY, "dp_shard=2,cp=2", 1, 1024, "fp32", "selective", 1),
    (EXPERTS, "dp_shard=4", 2, 128, "bf16", "none", 1),
    (EXPERTS, "dp_shard=4,ep=2", 2, 128, "bf16", "none", 1),
    (LATENT, "dp_shard=4,ep=2", 2, 192, "bf16", "none", 1),
    (LATENT, "dp_shard=2,tp=2", 2, 192, "bf16", "none", 1),
    (CONVOLUTIONS, "dp_shard=4", 2, 192, "bf16", "none", 1),
    (CONVOLUTIONS, "dp_shard=2,tp=2", 2, 192, "bf16", "none", 1),
    (DELTA, "dp_shard=4,ep=2", 2, 192, "bf16", "none", 1),
    (DELTA, "dp_shard=2,tp=2", 2, 192, "bf16", "none", 1),
    (STATE_SPACE, "dp_shard=4", 2, 192, "bf16", "none", 1),
    (STATE_SPACE, "dp_shard=4", 1, 1024, "bf16", "selective", 1),
    (STATE_SPACE, "dp_shard=2,tp=2", 2, 192, "bf16", "none", 1),
    (BESIDE, "dp_shard=4", 1, 1024, "bf16", "full", 1),
    (GPT_OSS, "dp_shard=4,ep=2", 2, 192, "bf16", "none", 1),
    (GPT_OSS, "dp_shard=2,tp=2", 2, 192, "bf16", "none", 1),
    (GEMMA4, "dp_shard=4", 2, 192, "bf16", "none", 1),
    (GEMMA4, "dp_shard=2,tp=2", 2, 192, "bf16", "none", 1),
    (GEMMA4_EXPERTS, "dp_shard=4,ep=2", 2, 192, "bf16", "none", 1),
]
WORLD = 4
QUICK: list[tuple[dict[str, Any], str, int, int, str, str, int]] = [
    (SMALL, "dp_shard=2", 2, 192, "bf16", "none", 1),
    (SMALL, "dp_shard=2", 2, 192, "fp32", "selective", 2),
    (ONE_KEY, "cp=2", 1, 1024, "bf16", "none", 1),
]
ALONE: list[tuple[dict[str, Any], str, int, int, str, str, int]] = [
    (SMALL, "", 2, 192, "fp32", "none", 2),
    (LATENT, "", 2, 192, "bf16", "none", 1),
]
FAMILIES: list[tuple[dict[str, Any], str, int, int, str, str, int]] = [
    (SMALL, "", 2, 192, "bf16", "none", 1),
    (CONVOLUTIONS, "", 2, 192, "bf16", "none", 1),
    (DELTA, "", 2, 192, "bf16", "none", 1),
    (STATE_SPACE, "", 2, 192, "fp32", "none", 1),
    (BESIDE, "", 2, 192, "bf16", "none", 1),
    (GPT_OSS, "", 2, 192, "bf16", "none", 1),
    (GEMMA4, "", 2, 192, "bf16", "none", 1),
    (GEMMA4_EXPERTS, "", 2, 192, "bf16", "none", 1),
]


def planned(cases: list[tuple[dict[str, Any], str, int, int, str, str, int]], folder: Path) -> list[Any]:
    found = []
    for index, (config, layout, rows, context, precision, kept, micro_batches) in enumerate(cases):
        path = folder / f"{index}.json"
        path.write_text(json.dumps(config))
        sizes = {"rows": rows, "context": context, "micro_batches": micro_batches}
        job, plan = eager_step(layout, precision=precision, recompute=kept, **sizes)
        found.append((read_model(str(path)), job, plan))
    return found


def assert_near(config: Any, job: Job, plan: LayoutPlan, real: Counted) -> None:
    estimated = peak_memory(Shape(config), job, plan, fused=False)
    assert estimated.parameters == pytest.approx(real.parameters, rel=0.02)
    assert estimated.optimizer == pytest.approx(real.optimizer, rel=0.02)
    assert real.gradients == real.parameters
    assert estimated.total == pytest.approx(real.peak, rel=0.15)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Counted]]:
    """Every case with what a process took in it, counted in one start of four processes."""
    cases = planned(CASES, tmp_path_factory.mktemp("memory"))
    return list(zip(cases, on_processes(WORLD, count_steps, cases)[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: f"{index}-{CASES[index][1]}")
def test_peak_is_within_15_per_cent_of_what_a_step_takes(
    counted: list[tuple[Any, Counted]], index: int
) -> None:
    case, real = counted[index]
    assert_near(*case, real)


@pytest.mark.plain("alone")
@pytest.mark.parametrize(
    ("cases", "processes"), [(QUICK, 2), (ALONE, 1), (FAMILIES, 1)], ids=["two", "alone", "families"]
)
def test_a_few_steps_of_the_trainer_take_what_is_planned(cases: Any, processes: int, tmp_path: Path) -> None:
    """Attention as the trainer computes it here, and gathers in the precision that it asks for.

    In the plain run on one process: how the parts follow the layout is computed below.
    """
    found = planned(cases, tmp_path)
    for case, real in zip(found, on_processes(processes, count_steps, found)[0], strict=True):
        assert_near(*case, real)


def test_the_parts_follow_the_layout() -> None:
    """Ratios that hold whatever the constants are."""
    shape = Shape(read_model("llama-3.1-8b"))
    job = Job(tokens_per_step=64 * 8192, context=8192)

    def peak(layout: str, recompute: str = "none", rows: int = 1) -> Any:
        plan = LayoutPlan(layout=Layout.parse(layout), micro_batch=rows, micro_batches=2, recompute=recompute)  # type: ignore[arg-type]
        return peak_memory(shape, job, plan)

    one, sharded = peak("dp_replicate=8"), peak("dp_shard=8")
    assert one.parameters == pytest.approx(8 * sharded.parameters)
    assert one.parameters == 4 * shape.parameters
    assert one.optimizer == 2 * one.parameters
    assert peak("cp=8").parameters == sharded.parameters
    assert peak("dp_shard=8", rows=2).activations == pytest.approx(2 * sharded.activations)
    assert peak("dp_shard=4,cp=2").activations < 0.6 * sharded.activations
    kept = [peak("dp_shard=8", recompute).activations for recompute in ("none", "selective", "full")]
    assert kept[0] > kept[2]
    assert kept[1] > kept[2]


def test_eight_bit_moments_take_a_quarter_and_their_scales() -> None:
    shape = Shape(read_model("llama-3.1-8b"))
    plan = LayoutPlan(layout=Layout(dp_shard=8), micro_batch=1, micro_batches=1, recompute="full")
    small = peak_memory(shape, Job(tokens_per_step=65536, context=8192, optimizer="adamw8bit"), plan)
    large = peak_memory(shape, Job(tokens_per_step=65536, context=8192), plan)
    assert small.optimizer / large.optimizer == pytest.approx((2 + 8 / 256) / 8)
