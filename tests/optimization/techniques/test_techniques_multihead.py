"""nn.MultiheadAttention taken apart computes what torch's does, in whatever way it is called."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.cpu import build
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.packaging import rewritten
from torchwright.optimization.engines.compiled.program import export
from torchwright.optimization.techniques.shared.multihead import SeparateHeads, separate_heads
from torchwright.workloads.module import ModuleWorkload

B, T, S, E, H = 2, 5, 7, 24, 3


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def attention(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(E, H, **options).eval().requires_grad_(False)
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            bias.normal_()  # zeros before training
    return module


def tokens(count: int, features: int, batch_first: bool, batched: bool = True) -> torch.Tensor:
    if not batched:
        return torch.randn(count, features)
    return torch.randn(B, count, features) if batch_first else torch.randn(count, B, features)


MASKS: dict[str, Any] = {
    "none": dict,
    "bool": lambda: {"attn_mask": torch.rand(T, S) < 0.3},
    "float": lambda: {"attn_mask": torch.randn(T, S)},
    "by head": lambda: {"attn_mask": torch.randn(B * H, T, S)},
    "padding": lambda: {"key_padding_mask": torch.arange(S).expand(B, S) > 4},
    "both": lambda: {
        "attn_mask": torch.randn(T, S),
        "key_padding_mask": torch.where(torch.arange(S).expand(B, S) > 4, -1e4, 0.0),
    },
}


@pytest.mark.parametrize(
    ("mask", "batch_first", "need_weights"), list(itertools.product(MASKS, (True, False), (True, False)))
)
def test_a_call_is_answered_as_by_torch(mask: str, batch_first: bool, need_weights: bool) -> None:
    module = attention(batch_first=batch_first, kdim=16, vdim=40)
    x, keys, values = (tokens(*size, batch_first) for size in ((T, E), (S, 16), (S, 40)))
    options = {**MASKS[mask](), "need_weights": need_weights}
    wanted, got = module(x, keys, values, **options), SeparateHeads(module)(x, keys, values, **options)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("bias", "average"), [(True, True), (False, False)])
def test_tokens_without_a_batch_and_weights_by_head(bias: bool, average: bool) -> None:
    module, x = attention(bias=bias), tokens(T, E, True, batched=False)
    options: Any = {"average_attn_weights": average}
    torch.testing.assert_close(SeparateHeads(module)(x, x, x, **options), module(x, x, x, **options))


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_causal_mask(need_weights: bool) -> None:
    module, x = attention(batch_first=True), tokens(T, E, True)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    options: Any = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    torch.testing.assert_close(SeparateHeads(module)(x, x, x, **options), module(x, x, x, **options))
    with pytest.raises(ValueError, match="is_causal is a hint"):
        SeparateHeads(module)(x, x, x, is_causal=True)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [True, False])
def test_whole_transformers_of_torch(norm_first: bool) -> None:
    model = nn.Transformer(E, H, 2, 2, 48, batch_first=True, norm_first=norm_first).eval()
    source, target = tokens(S, E, True), tokens(T, E, True)
    padding = torch.arange(S).expand(B, S) > 4
    masks: Any = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(T),
        "src_key_padding_mask": torch.where(padding, float("-inf"), 0.0),
        "memory_key_padding_mask": torch.where(padding, float("-inf"), 0.0),
    }
    with torch.no_grad():
        wanted = model(source, target, **masks)
        assert separate_heads(model) == {}
        assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
        torch.testing.assert_close(model(source, target, **masks), wanted)


def test_what_computes_something_else_is_left_alone() -> None:
    class Subclass(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            attended, weights = super().forward(*args, **kwargs)
            return attended.relu(), weights

    hooked = attention()
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "own": Subclass(E, H),
            "with_zero": attention(add_zero_attn=True),
            "with_keys": attention(add_bias_kv=True),
            "hooked": hooked,
            "parametrized": parametrizations.weight_norm(attention(), "in_proj_weight"),
        }
    )
    assert separate_heads(model).keys() == model.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_layer_of_an_encoder_is_quantized_and_projections_are_one(rows_kernels: None) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    target = make_target(ModuleWorkload(model, torch.randn(2, 16, 64)), get_device("cpu").facts())
    steps = ("dtype", "int8_dynamic", "dense_attention", "compile")
    apply_steps(target, [Step(name=name) for name in steps])
    rows, attentions = (
        next(c for c in target.coverage if c.technique == name)
        for name in ("int8_dynamic", "dense_attention")
    )
    assert (rows.changed, rows.total, attentions.changed) == (12, 12, 2)
    programs = export(target.model, target.workload.graphs(torch.float32))
    (program,) = [rewritten(program, target.settings) for program in programs.values()]
    called = [str(node.target) for node in program.graph.nodes]
    assert sum("linear_w8a8_fused" in name for name in called) == 2 * 4


@pytest.fixture
def rows_kernels() -> None:
    if fault := build.load_fault():
        pytest.skip(fault)
