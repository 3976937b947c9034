"""torch's own kernels of attention, one for all calls."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import DeviceFacts
from torchwright.optimization.engines.compiled.packaging import rewritten
from torchwright.optimization.engines.compiled.program import compile_program, export, functional
from torchwright.optimization.techniques import Target
from torchwright.optimization.techniques.attention_backend import (
    ATTENTION,
    AttentionBackend,
    expand_attention,
)
from torchwright.workloads.module import ModuleWorkload

CPU = DeviceFacts(kind="cpu", name="test")
CUDA = DeviceFacts(kind="cuda", name="test")
MATH = AttentionBackend(backend="math")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Calls(nn.Module):
    """Attention as it is called: with a mask of both kinds, causal with a scale, fewer keys than queries have heads."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, dtype=dtype)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTE.shape
        q, k, v = self.qkv(x_BTE).view(B, T, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        bias = torch.arange(T, dtype=q.dtype)[:, None].expand(T, T)
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            + F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            + F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
            + F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        )


def make(model: nn.Module, *inputs: torch.Tensor, device: DeviceFacts = CPU) -> Target:
    workload = ModuleWorkload(model, inputs)
    return Target(model=workload.build(), workload=workload, device=device, properties={"eager", "sdpa"})


def reference(model: Calls, x_BTE: torch.Tensor) -> torch.Tensor:
    """In float64, by the definition."""
    B, T, _ = x_BTE.shape
    x, weight, bias = (tensor.double() for tensor in (x_BTE, model.qkv.weight, model.qkv.bias))
    q, k, v = F.linear(x, weight, bias).view(B, T, 3, 4, 16).permute(2, 0, 3, 1, 4)

    def attend(k: torch.Tensor, v: torch.Tensor, added: Any = 0.0, scale: float = 0.25) -> torch.Tensor:
        return (q @ k.mT * scale + added).softmax(-1) @ v

    hidden = torch.zeros(T, T, dtype=torch.float64).masked_fill(~torch.ones(T, T).tril().bool(), -math.inf)
    rows = torch.arange(T, dtype=torch.float64)[:, None].expand(T, T)
    heads = [0, 0, 1, 1]
    return (
        attend(k, v, hidden)
        + attend(k, v, rows)
        + attend(k, v, hidden, 0.3)
        + attend(k[:, heads], v[:, heads])
    )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_products_say_what_attention_says(dtype: torch.dtype, limit: float):
    model, x = Calls(dtype), torch.randn(2, 10, 64, dtype=dtype)
    target = make(model, x)
    MATH.apply(target)
    with torch.no_grad():
        found = target.model(x).double()
        expected = reference(model, x)
    assert ((found - expected).norm() / expected.norm()).item() < limit
    (coverage,) = target.coverage
    assert str(coverage) == "4 of 4 calls of attention through math"


def exported(model: nn.Module, x: torch.Tensor) -> ExportedProgram:
    """As it would be compiled."""
    target = make(model, x)
    MATH.apply(target)
    (program,) = export(target.model, target.workload.cases(torch.float32)).values()
    assert attentions(program) == 4
    return rewritten(program, target.settings)


def attentions(program: ExportedProgram) -> int:
    return len(program.graph.find_nodes(op="call_function", target=ATTENTION))


def test_an_exported_graph_holds_the_kernel_and_not_the_choice():
    model, x = Calls(), torch.randn(2, 10, 64)
    program = exported(model, x)
    assert not attentions(program)
    torch.testing.assert_close(program.module()(x), model(x))


class Reshaped(nn.Module):
    """DistilBERT's: heads are joined by `reshape`, which an export with flash attention writes down as a view."""

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        B, T, E = x_BTE.shape
        heads = x_BTE.view(B, T, 4, E // 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(B, T, E)


@pytest.mark.parametrize("sizes", [None, {0: Dim("rows", min=1, max=64), 1: Dim("tokens", min=2, max=64)}])
def test_views_of_the_other_kernels_output_still_hold(sizes: dict[int, Any] | None):
    model, x = Reshaped(), torch.randn(2, 10, 64)
    program = functional(torch.export.export(model, (x,), dynamic_shapes=sizes and (sizes,)))
    expand_attention(SDPBackend.MATH, program.graph_module)
    assert not attentions(program)
    for shape in ((2, 10, 64), *(((5, 20, 64), (1, 3, 64)) if sizes else ())):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
def test_it_compiles_ahead_of_time(tmp_path: Path):
    model, x = Calls(), torch.randn(2, 10, 64)
    compile_program(exported(model, x), tmp_path / "math.pt2", {})
    compiled: Any = torch._inductor.aoti_load_package(str(tmp_path / "math.pt2"))
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.slow
def test_a_graph_for_any_number_of_rows_stays_one():
    model = Calls()
    shapes = ({0: Dim("rows", min=1, max=64), 1: Dim("tokens", min=2, max=64)},)
    program = functional(torch.export.export(model, (torch.randn(2, 10, 64),), dynamic_shapes=shapes))
    expand_attention(SDPBackend.MATH, program.graph_module)
    assert not attentions(program)
    for shape in ((1, 3, 64), (5, 20, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x))


def test_torch_compile_takes_it_in_one_graph():
    model, x = Calls(), torch.randn(2, 10, 64)
    target = make(model, x)
    MATH.apply(target)
    compiled = torch.compile(target.model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_what_torch_takes_already_is_refused():
    target = make(Calls(), torch.randn(2, 10, 64))
    original = target.model
    with pytest.raises(RefusedTechnique, match=r"flash attention changes nothing.*4 of 4 calls already"):
        AttentionBackend(backend="flash").apply(target)
    assert target.model is original
    assert not target.settings.rewrites


def test_a_kernel_that_takes_no_call_is_refused():
    """Asked for past its refusal, it would leave plain products in every place."""
    with pytest.raises(RefusedTechnique, match=r"efficient attention takes no call.*none of 4"):
        AttentionBackend(backend="efficient").apply(make(Calls(), torch.randn(2, 10, 64)))


def test_what_no_machine_here_has_is_refused_in_words(monkeypatch: pytest.MonkeyPatch):
    target, card = make(Calls(), torch.randn(2, 10, 64)), make(Calls(), torch.randn(2, 10, 64), device=CUDA)
    words = "torch has this kernel for CUDA devices alone; for a CPU it has flash and math"
    assert {each.backend: each.refuse(target) for each in MATH.variants(target)} == {
        "efficient": words, "cudnn": words, "math": None
    }  # fmt: skip
    assert AttentionBackend(backend="flash").refuse(target) is None
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    found = {each.backend: each.refuse(card) for each in MATH.variants(card)}
    assert found == {
        "flash": "this build of torch has no FlashAttention", "efficient": None,
        "cudnn": "this build of torch has no cuDNN", "math": None,
    }  # fmt: skip
    other = make(Calls(), torch.randn(2, 10, 64), device=DeviceFacts(kind="xpu", name="test"))
    assert "not known here" in (MATH.refuse(other) or "")
