"""Switching attention, and attention in blocks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts
from torchwright.optimization.engines.compiled.program import export
from torchwright.optimization.techniques import Target
from torchwright.optimization.techniques.attention import SwitchAttention, switchable
from torchwright.optimization.techniques.matmul_attention import AttentionCalls, MatmulAttention, attend
from torchwright.optimization.techniques.shared.blocked_attention import (
    BlockedAttention,
    BlockedMask,
    find_sites,
)
from torchwright.workloads.base import Case
from torchwright.workloads.module import ModuleWorkload

CPU = DeviceFacts(kind="cpu", name="test")
BLOCKED = SwitchAttention(implementation="blocked")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make(model: nn.Module, *inputs: torch.Tensor) -> Target:
    workload = ModuleWorkload(model, inputs)
    return Target(model=workload.build(), workload=workload, device=CPU, properties={"eager"})


def window(T: int, width: int) -> torch.Tensor:
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return (distance >= 0) & (distance < width)


class Masked(nn.Module):
    """Attention of x with itself, with the mask that a function of x gives."""

    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor | None], heads: int = 2) -> None:
        super().__init__()
        self.mask, self.heads = mask, heads

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        B, T, E = x_BTE.shape
        q = x_BTE.view(B, T, self.heads, -1).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(x_BTE))
            .transpose(1, 2)
            .reshape(B, T, E)
        )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    st.integers(1, 200),
    st.integers(1, 200),
    st.data(),
)
def test_blocks_compute_what_sdpa_does(
    B: int, heads: tuple[int, int], Q: int, K: int, data: st.DataObject
) -> None:
    """Any mask in which each query sees something, any sizes, grouped queries; float64, 1e-9."""
    H, kv = heads
    grouped = kv < H
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    kind = data.draw(st.sampled_from(["window", "tiles", "random", "causal"]))
    i, j = torch.arange(Q)[:, None], torch.arange(K)
    mask = {
        "window": ((i - j).abs() < data.draw(st.integers(1, 64))),
        "tiles": i // 16 == j // 16,
        "random": torch.rand(Q, K, generator=generator) < 0.1,
        "causal": i >= j,
    }[kind]
    mask[:, 0] |= ~mask.any(1)
    q, k, v = (
        torch.randn(B, h, n, 8, generator=generator, dtype=torch.float64)
        for h, n in ((H, Q), (kv, K), (kv, K))
    )
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=grouped)
    found = BlockedMask(mask).attention(q, k, v, 0.3, grouped)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("T", "width", "block", "share"), [(1024, 128, 128, 0.25), (512, 32, 32, 0.125)])
def test_block_fits_the_window(T: int, width: int, block: int, share: float) -> None:
    mask = BlockedMask(window(T, width))
    assert (mask.block, mask.share, mask.causal) == (block, share, False)


def test_a_causal_triangle_becomes_is_causal() -> None:
    mask = BlockedMask(window(64, 64))
    assert mask.causal
    assert dict(mask.named_buffers()) == {}


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (lambda x: None, "it has no mask"),
        (lambda x: x[..., 0][:, None, None] > -100, "depends on the inputs"),
        (lambda x: window(64, 8) if x.sum() > 0 else window(64, 9), "depends on the inputs"),
        (
            lambda x: torch.zeros(64, 64, dtype=torch.bool).masked_fill_(x[0, :, 0] > 0, True),
            "depends on the inputs",
        ),
        (
            lambda x: torch.rand(1, 2, 64, 64).round().bool() | torch.eye(64).bool(),
            "over the batch or the heads",
        ),
        (lambda x: -torch.rand(64, 64), "adds a bias"),
        (lambda x: torch.ones(64, 64).bool(), "leaves 100% to compute"),
        (lambda x: window(64, 8) & (torch.arange(64) > 3), "hides everything from some queries"),
    ],
)
def test_masks_that_are_left_alone(mask: Callable[[torch.Tensor], torch.Tensor | None], reason: str) -> None:
    target = make(Masked(mask), torch.randn(1, 64, 16))
    original = target.model
    assert reason in (BLOCKED.refuse(target) or "")
    with pytest.raises(RefusedTechnique, match=reason):
        BLOCKED.apply(target)
    assert target.model is original


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: window(x.shape[1], 16),
        lambda x: torch.ones_like(x[0, :, :1] @ x[0, :, :1].T).bool().tril().triu(-9),
        lambda x: torch.zeros(x.shape[1], x.shape[1]).masked_fill(~window(x.shape[1], 16), -torch.inf),
        lambda x: window(x.shape[1], 16).expand(3, 2, -1, -1),
    ],
)
def test_constant_masks_are_found(mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    target = make(nn.Sequential(Masked(mask), Masked(mask)), torch.randn(3, 160, 16))
    assert BLOCKED.refuse(target) is None
    BLOCKED.apply(target)
    fresh = torch.randn(3, 160, 16)
    torch.testing.assert_close(target.model(fresh), target.workload.build()(fresh))
    wrappers = [m for m in target.model.modules() if isinstance(m, BlockedAttention)]
    assert len(wrappers) == 2
    assert wrappers[0].masks[0] is wrappers[1].masks[0], "equal masks are kept once"
    assert wrappers[0].heads == 2
    with pytest.raises(AttributeError, match="nothing"):
        wrappers[0].nothing


def test_another_size_goes_to_sdpa() -> None:
    target = make(Masked(lambda x: window(x.shape[1], 16)), torch.randn(1, 160, 16))
    BLOCKED.apply(target)
    assert isinstance(target.model, BlockedAttention)
    fresh = torch.randn(2, 100, 16)
    torch.testing.assert_close(target.model(fresh), target.workload.build()(fresh))


def test_several_masks_of_one_size_in_one_module_are_left_alone() -> None:
    widths = iter([8, 16] * 9)
    target = make(Masked(lambda x: window(64, next(widths))), torch.randn(1, 64, 16))
    two = nn.Sequential(target.model, target.model)
    sites = find_sites(two, [Case(name="forward", args=(torch.randn(1, 64, 16),))])
    assert [site.reason for site in sites] == ["it uses several masks of one size"]


def test_blocks_export_as_plain_operations() -> None:
    target = make(Masked(lambda x: window(x.shape[1], 16)), torch.randn(1, 160, 16))
    BLOCKED.apply(target)
    program = export(target.model, target.workload.cases(torch.float32))["forward"]
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.scaled_dot_product_attention.default" in names
    assert "aten.index_select.default" in names
    fresh = torch.randn(1, 160, 16)
    torch.testing.assert_close(program.module()(fresh), target.workload.build()(fresh))


def test_wrong_results_are_refused_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make(nn.Sequential(Masked(lambda x: window(160, 16))), torch.randn(1, 160, 16))
    monkeypatch.setattr(BlockedMask, "attention", lambda self, q, k, v, scale, gqa: q * 2)
    with pytest.raises(RefusedTechnique, match="outputs change by"):
        BLOCKED.apply(target)
    assert not any(isinstance(m, BlockedAttention) for m in target.model.modules())


class TestTransformers:
    @pytest.fixture
    def target(self) -> Target:
        from transformers import BertConfig, BertModel

        config = BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
        )
        model = BertModel(config, add_pooling_layer=False).eval()
        workload = ModuleWorkload(model, {"input_ids": torch.randint(0, 50, (2, 8)), "return_dict": False})
        return Target(model=workload.build(), workload=workload, device=CPU, properties={"eager"})

    def test_only_the_other_one_is_worth_trying(self, target: Target) -> None:
        assert list(SwitchAttention().variants(target)) == []
        assert SwitchAttention().refuse(target) == "the model uses sdpa already"
        switchable(target.model)[0].set_attn_implementation("eager")
        assert [v.implementation for v in SwitchAttention().variants(target)] == ["sdpa"]

    def test_switch(self, target: Target) -> None:
        SwitchAttention(implementation="eager").apply(target)
        assert [m.config._attn_implementation for m in switchable(target.model)] == ["eager"]
        assert target.coverage[0].changed == target.coverage[0].total == 1
        ids = torch.randint(0, 50, (3, 6))
        found = target.model(ids, return_dict=False)[0]
        torch.testing.assert_close(
            found, target.workload.build()(ids, return_dict=False)[0], rtol=1e-4, atol=1e-5
        )

    def test_a_switch_that_changes_the_outputs_is_undone(
        self, target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "torchwright.optimization.techniques.attention.worst_error", lambda before, after: 0.5
        )
        with pytest.raises(RefusedTechnique, match=r"change by 5\.0e-01"):
            SwitchAttention(implementation="eager").apply(target)
        assert switchable(target.model)[0].config._attn_implementation == "sdpa"

    @pytest.mark.slow
    def test_to_look_at_a_module_of_ones_own_needs_no_transformers(self) -> None:
        """It may not even be importable: a torchvision built for another torch takes it along."""
        code = (
            "import sys; sys.modules['transformers'] = None\n"
            "from torch import nn; from torchwright.optimization.techniques.attention import switchable\n"
            "print(switchable(nn.Linear(2, 2)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("[]\n", "")

    def test_others_have_nothing_to_switch(self) -> None:
        target = make(nn.Linear(4, 4), torch.randn(1, 4))
        assert "not one of transformers'" in (SwitchAttention().refuse(target) or "")
        assert "no module of the model calls" in (BLOCKED.refuse(target) or "")


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_sees_no_key_is_answered_by_zeros(kind: str, queries: int) -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 16).bfloat16()
    q = q[:, :, :queries]
    mask = torch.rand(2, 1, queries, 6) > 0.4
    mask[0, 0, -1] = False
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)
    wanted = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask.to(mask.dtype if kind == "bool" else torch.float32)
    )
    got = attend(512, q, k, v, attn_mask=mask)
    assert got[0, :, -1].eq(0).all()
    torch.testing.assert_close(got.float(), wanted, rtol=0, atol=0.03)


# ------------------------------------------------------------------------------------ torch's own multi-head attention


class Heads(nn.Module):
    """torch's multi-head attention, asked for its weights or not."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.heads, self.weights = nn.MultiheadAttention(32, 2, batch_first=True), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads(x, x, x, need_weights=self.weights)[0]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        (encoder(), True),
        (Heads(weights=False), True),
        (Heads(weights=True), False),
        (nn.Linear(32, 4), False),
    ],
    ids=["encoder", "no weights", "weights", "none"],
)
def test_calls_inside_torchs_multi_head_attention_are_seen(model: nn.Module, calls: bool):
    """No mode is shown them, so that attention of nn.TransformerEncoder was never tried on other kernels."""
    with torch.inference_mode(), AttentionCalls() as seen:
        model.eval()(torch.randn(2, 5, 32))
    assert seen.seen is calls


def test_products_take_the_place_of_attention_inside_torchs_multi_head_attention():
    x = torch.randn(2, 5, 32).bfloat16()
    model = encoder().eval().bfloat16()
    wanted = model.float()(x.float())
    target = make(model.bfloat16(), x)
    MatmulAttention().apply(target)
    (program,) = export(target.model, [Case(name="forward", args=(x,))]).values()
    called = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in called if "scaled_dot_product" in name]
    torch.testing.assert_close(program.module()(x).float(), wanted, atol=0.05, rtol=0.05)
