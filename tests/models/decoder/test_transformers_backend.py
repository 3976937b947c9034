"""Families without a native decoder run over the paged cache: transformers' tokens, alone and in company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from folders import VOCABULARY, build, causal, save
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.core.scheme import BF16, W8A8
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.models.decoder.transformers_backend import check
from torchwright.models.decoder.transformers_backend.attention import CannotPage, window_of
from torchwright.models.decoder.transformers_backend.experts import PackedExperts, has_experts
from torchwright.models.decoder.transformers_backend.load import load_on_transformers
from torchwright.models.decoder.transformers_backend.packing import pack_layers
from torchwright.models.decoder.transformers_backend.paged import TransformersModel
from torchwright.models.decoder.transformers_backend.writer import TransformersWriter
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import SamplingOptions, Submit

NEW = 10
LENGTHS = (3, 9, 17, 40)
POISONED = 7
HEADS_16: dict[str, Any] = {"head_dim": 16}


def gpt_oss(**options: Any) -> Any:
    return causal(
        "GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, **options
    )


def latent(kind: str, **options: Any) -> Any:
    """Latent attention of two ranks, and experts in every layer or from one on."""
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return causal(kind, num_key_value_heads=4, moe_intermediate_size=16, **ranks, **experts, **options)


def deepseek() -> Any:
    return latent("DeepseekV3", v_head_dim=12, first_k_dense_replace=1)


PAGED = {
    "GPT-2, learned positions": lambda: causal("GPT2", num_key_value_heads=4),
    "Cohere 2, past its sliding window": lambda: causal("Cohere2", sliding_window=8),
    "gpt-oss, sinks and experts": gpt_oss,
    "DeepSeek V3, keys and values of other sizes": deepseek,
    "GPT-NeoX, a part of each head turned": lambda: causal("GPTNeoX", rotary_pct=0.5),
    "Cohere, layers in parallel": lambda: causal("Cohere"),
}
ALONE = {
    "Mamba": "no positions",
    "BLOOM, a bias by distance": "no positions",
    "Llama 4, chunks": "mask",
    "dynamic angles": "length of the text",
}


def mamba() -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    return build(
        transformers.MambaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        "AutoModelForCausalLM",
    )


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCABULARY, (count,), generator=generator).tolist() for count in LENGTHS]


def whole_passes(model: Any, ids: list[int]) -> list[int]:
    """Greedy tokens, each from one pass over the whole text."""
    text = list(ids)
    for _ in range(NEW):
        with torch.inference_mode():
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.fixture(params=PAGED)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(PAGED[request.param](), tmp_path)


@pytest.mark.plain("DeepSeek V3, keys and values of other sizes")
def test_tokens_are_those_of_whole_passes_alone_and_in_company(folder: Path) -> None:
    loaded = load_on_transformers(folder, torch.float32)
    assert isinstance(loaded.model, LoadedPagedModel), loaded.notices
    assert "transformers back end" in loaded.notices[0]
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    wanted = [whole_passes(reference, ids) for ids in prompts()]
    assert loaded.model.generate(prompts(), max_new_tokens=NEW, stop=[]) == wanted
    assert loaded.model.generate(prompts()[2], max_new_tokens=NEW, stop=[], prefill_chunk=5) == wanted[2]
    assert served(loaded.model, pages=64) == wanted
    # With room for two of the four at once, sequences are preempted and computed again.
    assert served(loaded.model, pages=6) == wanted


@pytest.mark.plain(
    "Cohere 2, past its sliding window-w8a8",
    "GPT-2, learned positions-w8a8",
    "GPT-2, learned positions-None",
    "Cohere, layers in parallel-None",
)
@pytest.mark.parametrize("quantize", [None, "w8a8"])
def test_a_token_that_is_no_number_ends_its_own_answer_alone(folder: Path, quantize: str | None) -> None:
    loaded: Any = load_on_transformers(folder, torch.bfloat16, quantize=quantize).model
    texts = [[token for token in ids if token != POISONED] for ids in prompts()]
    wanted = served(loaded, 64, texts)
    with torch.inference_mode():
        loaded.decoder.model.get_input_embeddings().weight[POISONED] = float("nan")
    found = served(loaded, 64, [texts[0], [*texts[1][:5], POISONED, *texts[1][5:]], *texts[2:]])
    assert found[1] == []
    assert found[:1] + found[2:] == wanted[:1] + wanted[2:]


def served(loaded: Any, pages: int, texts: list[list[int]] | None = None) -> list[list[int]]:
    engine = ServingEngine(loaded, size=CacheSize(pages, 64), options=EngineOptions(step_tokens=64))
    found: dict[str, list[int]] = {str(place): [] for place in range(len(LENGTHS))}
    for name, ids in zip(found, texts or prompts(), strict=True):
        sampling = SamplingOptions(temperature=0.0)
        assert engine.submit(Submit(id=name, ids=ids, max_tokens=NEW, sampling=sampling)) is None
    while not engine.idle:
        for output in engine.step().outputs:
            found[output.id] += output.tokens
    engine.check_integrity()
    return list(found.values())


def test_a_second_equal_prompt_has_cached_tokens(tmp_path: Path) -> None:
    loaded: Any = load_on_transformers(save(gpt_oss(), tmp_path), torch.float32).model
    engine = ServingEngine(loaded, size=CacheSize(64, 64))
    for name in "ab":
        sampling = SamplingOptions(temperature=0.0)
        engine.submit(Submit(id=name, ids=prompts()[3], max_tokens=2, sampling=sampling))
        while not engine.idle:
            stats = engine.step().stats
    assert stats.pages_cached > 0
    assert engine.stats().prefix_hits > 0


@pytest.mark.plain("deepseek-dtype1-w8a8-None", "gpt_oss-dtype2-w8a8-kv2")
@pytest.mark.parametrize(
    ("dtype", "quantize", "kv"),
    [(torch.bfloat16, None, None), (torch.bfloat16, "w8a8", None), (torch.float32, "w8a8", torch.int8)],
)
@pytest.mark.parametrize("make", [deepseek, gpt_oss])
def test_packed_layers_and_kept_routers(
    make: Any, tmp_path: Path, dtype: torch.dtype, quantize: str | None, kv: torch.dtype | None
) -> None:
    folder = save(make(), tmp_path)
    loaded = load_on_transformers(folder, dtype, quantize=quantize, kv=kv)
    assert isinstance(loaded.model, LoadedPagedModel), loaded.notices
    assert "linear layers packed" in loaded.notices[0]
    exact: Any = load_on_transformers(folder, torch.float32).model
    ids_BT = torch.tensor([prompts()[2]])
    wanted, found = exact.logits(ids_BT), loaded.model.logits(ids_BT)
    assert float((wanted - found).norm() / wanted.norm()) < 0.3
    assert not torch.equal(wanted, found)
    experts = [part for part in loaded.model.decoder.modules() if isinstance(part, PackedExperts)]
    assert experts, "experts are packed too"
    assert not any(part.rules._parameters for part in experts), "their own weights are let go"


def sparse() -> Any:
    """Keys that an indexer chooses: for a short text all of them, so that its logits alone would not show it."""
    return latent("DeepseekV32", v_head_dim=16, index_head_dim=16, index_n_heads=2, index_topk=64)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (sparse, "its attention also depends on 'indices'"),
        (mamba, "it takes no positions"),
        (lambda: causal("Bloom", n_head=4), "it takes no positions"),
        (
            lambda: causal(
                "Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "depends on the length of the text",
        ),
    ],
)
def test_others_give_one_answer_at_a_time_and_say_why(make: Any, why: str, tmp_path: Path) -> None:
    folder = save(make(), tmp_path)
    loaded = load_on_transformers(folder, torch.float32)
    assert isinstance(loaded.model, TransformersWriter)
    assert f"one answer at a time: {why}" in loaded.notices[0] or why in loaded.notices[0]
    with pytest.raises(WorkloadError, match=r"--kv is not for"):
        load_on_transformers(folder, torch.float32, kv=torch.int8)


def test_other_logits_over_pages_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that mixes tokens of the row outside attention: the check finds it, whatever transformers says."""
    model = causal("GPT2", num_key_value_heads=4)
    mlp = model.transformer.h[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x) + x.roll(1, dims=1)
    paged = TransformersModel(model, context=256, bos=1)
    with pytest.raises(CannotPage, match="differ from its own"):
        check.check_paging(paged)
    mlp.forward = plain
    check.check_paging(paged)


def test_masks_are_known_by_their_values() -> None:
    from transformers import masking_utils as masks

    assert window_of(masks.causal_mask_function, None) == 0
    assert window_of(masks.sliding_window_causal_mask_function(8), 8) == 8
    left = torch.zeros(1, dtype=torch.int64)
    for function, size in (
        (masks.chunked_causal_mask_function(8, left), 8),
        (masks.bidirectional_mask_function, None),
        (masks.sliding_window_causal_mask_function(8), 9),
        (masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: k > 0), None),
    ):
        with pytest.raises(CannotPage, match="mask"):
            window_of(function, size)


def test_a_model_that_is_gone_leaves_no_function_behind(tmp_path: Path) -> None:
    import gc

    names = set(transformers.AttentionInterface._global_mapping)
    loaded: Any = load_on_transformers(save(causal("GPT2", num_key_value_heads=4), tmp_path), torch.float32)
    added = set(transformers.AttentionInterface._global_mapping) - names
    assert len(added) == 1
    del loaded
    gc.collect()
    assert not set(transformers.AttentionInterface._global_mapping) & added


@pytest.mark.parametrize("make", [deepseek, gpt_oss])
def test_packed_experts_are_the_models_own(make: Any, tmp_path: Path) -> None:
    """Bias and layout of every kind; a token's output does not depend on its company, to the bit."""
    model = make().bfloat16()
    experts = next(part for part in model.modules() if has_experts(part))
    packed = PackedExperts(experts, BF16, torch.device("cpu"))
    x_TE = torch.randn(9, 32).bfloat16()
    chosen_TC = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    shares_TC = torch.rand(9, 2).bfloat16()
    with torch.inference_mode():
        wanted, found = experts(x_TE, chosen_TC, shares_TC), packed(x_TE, chosen_TC, shares_TC)
        assert float((wanted - found).norm() / wanted.norm()) < 0.02
        assert torch.equal(packed(x_TE[3:5], chosen_TC[3:5], shares_TC[3:5]), found[3:5])


def test_a_model_that_reads_its_weights_keeps_its_layers(tmp_path: Path) -> None:
    model = causal("Cohere").bfloat16()
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: torch.nn.functional.linear(x, mlp.up_proj.weight) @ mlp.down_proj.weight.t()
    assert pack_layers(model, None, torch.bfloat16, torch.device("cpu")) == 0
    assert isinstance(mlp.up_proj, torch.nn.Linear)
    with pytest.raises(ModelError, match="does not run with layers of w8a8"):
        pack_layers(model, W8A8, torch.bfloat16, torch.device("cpu"))


def test_what_transformers_keeps_in_float32_is_not_rounded(tmp_path: Path) -> None:
    """Angles, which at far positions would be others, and a bias of experts near 7, which would choose others."""
    model = deepseek()
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.data.uniform_(6.82, 7.06)
    folder = save(model, tmp_path)
    loaded: Any = load_on_transformers(folder, torch.bfloat16).model
    buffers = dict(loaded.decoder.model.named_buffers())
    kept = {name: buffer for name, buffer in buffers.items() if "inv_freq" in name or "correction" in name}
    assert kept
    assert all(buffer.dtype == torch.float32 for buffer in kept.values())
    written = {name: buffer for name, buffer in model.named_buffers() if "correction" in name}
    assert all(torch.equal(buffers[name], buffer) for name, buffer in written.items())


def test_a_window_without_a_sliding_layer_hides_nothing(tmp_path: Path) -> None:
    """`sliding_window` beside layers that are all full attention (vllm#49795)."""
    folder = save(causal("Cohere2", sliding_window=8, layer_types=["full_attention"] * 2), tmp_path)
    loaded: Any = load_on_transformers(folder, torch.float32).model
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids_BT = torch.tensor([prompts()[3]])
    with torch.inference_mode():
        wanted = reference(input_ids=ids_BT, use_cache=False).logits
    torch.testing.assert_close(loaded.logits(ids_BT), wanted, rtol=1e-4, atol=1e-4)
