"""Every operator's fake implementation, and torch.compile and torch.export over a packed layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchwright.core.scheme import MADE
from torchwright.hardware.kernels import cells, conv, fake
from torchwright.hardware.kernels.linear import PackedLinear


def packed(scheme: str) -> PackedLinear:
    torch.manual_seed(0)
    return PackedLinear(torch.randn(70, 96), torch.randn(70), MADE[scheme])


def cells_of(gates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gates of 20 units for two steps of a batch of two, and the packed weight."""
    return torch.randn(2, 2, gates * 20), cells.pack_cells(torch.randn(gates * 20, 20), gates)


def samples(kind: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Operator → arguments of one call."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 96).to(kind), torch.randn(96)
    linear = {scheme: packed(scheme) for scheme in MADE}
    k, v = (
        torch.zeros(4, 2, 8, 16, 2, dtype=torch.bfloat16),
        torch.zeros(4, 2, 8, 16, 2, dtype=torch.bfloat16),
    )
    integers = torch.zeros(4, 2, 16, 16, dtype=torch.int8)
    pages = (integers, integers.clone(), torch.ones(4, 2, 16), torch.ones(4, 2, 16))
    angle = torch.randn(9, 4)
    where = (angle.cos(), angle.sin(), torch.tensor([0, 1, 2]), torch.tensor([16, 17, 18]))
    table = (torch.ones(1, 1, dtype=torch.int32), torch.tensor([0, 3]).int(), torch.tensor([3]).int())
    image, sizes = torch.randn(2, 20, 7, 5).to(kind), ([3, 3], [2, 2], [1, 1])
    window = conv.pack_pairs(torch.randn(18, 20, 3, 3).to(kind)), torch.randn(18)
    slots = (torch.tensor([0, 3]).int(), *(torch.tensor(ids) for ids in ([2], [1], [0])))
    keys, values, a = torch.randn(3, 24).to(kind), torch.randn(3, 64).to(kind), torch.randn(3, 4).to(kind)
    head, state = torch.rand(4), torch.zeros(4, 4, 12, 16)
    grid = [torch.randn(1, 2, 6, 16).to(kind) for _ in range(3)]
    return {
        "conv_dense": (image, *window, *sizes, 18, "relu", torch.randn(2, 18, 4, 3).to(kind)),
        "conv_depthwise": (image, torch.randn(3, 3, 20), torch.randn(20), *sizes, "silu"),
        "image_mean": (image,),
        "linear_bf16": (x, linear["bf16"].packed, linear["bf16"].bias, 70),
        "linear_grouped": (x, torch.zeros(128 * 4 * (8 + 16), dtype=torch.uint8), None, 70, 32, 4),
        "linear_heads": (x, torch.zeros(3, 64 * 128 * 2, dtype=torch.uint8), 60),
        "linear_w8a8": (x, linear["w8a8"].packed, linear["w8a8"].scale, linear["w8a8"].bias, 70),
        "linear_w8a8_fused": (
            *(x, linear["w8a8"].packed, linear["w8a8"].scale, torch.randn(128), linear["w8a8"].bias),
            *(70, "gelu", torch.randn(2, 3, 70).to(kind)),
        ),
        "attention": (*(torch.randn(1, 2, 5, 16).bfloat16() for _ in range(3)), None, 0.25),
        "varlen_attention": (
            *(torch.randn(3, 96).to(kind), angle[:3].repeat(1, 2).cos(), angle[:3].repeat(1, 2).sin()),
            *(torch.tensor([0, 2, 3]).int(), 2, 0.25),
        ),
        "grid_attention": (*grid, torch.randn(3, 16), torch.randn(5, 16), 0.25),
        "linear_w4a8": (x, linear["w4a8"].packed, linear["w4a8"].scale, None, 70, 32),
        "linear_w4a16": (
            *(x, linear["w4a16"].packed, linear["w4a16"].scale, linear["w4a16"].bias),
            *(70, 32),
        ),
        "short_conv": (keys, torch.randn(3, 24), None, torch.zeros(4, 2, 24), *slots, True),
        "gated_delta": (keys, keys.clone(), values, a, a.clone(), head, head.clone(), state, *slots, 2),
        "selective_scan": (keys, keys.clone(), values, a, head, head.clone(), head.clone(), state, *slots, 2),
        "gated_norm": (values, values.clone(), torch.randn(4, 16), 1e-5, False),
        "lstm_layer": (*cells_of(4), torch.randn(2, 20), torch.randn(2, 20), True, False),
        "gru_layer": (*cells_of(3), torch.randn(32), torch.randn(2, 20), False, True),
        "rms_norm": (x, weight, 1e-5),
        "add_rms_norm": (x, x.clone(), weight, 1e-5),
        "norm": (x, weight, weight.clone(), 1e-5, True),
        "norm_backward": (x, x.clone(), torch.randn(6), torch.rand(6), weight, [True, True, False]),
        "gated": (x, "silu"),
        "activate": (x, "gelu"),
        "route": (torch.randn(3, 12).to(kind), torch.randn(12), None, 3, True, 4, 2, 2, True, 1.5),
        "quantize_w4": (torch.randn(5, 64), torch.rand(64), 32),
        "rope_store": (torch.randn(3, 128).to(kind), *where, *pages, 4, 2, torch.ones(16), None, 1e-5),
        "paged_attention": (torch.randn(3, 4, 16).to(kind), k, v, None, None, *table, 0.25, 0, 0.0),
    }


@pytest.mark.plain("rms_norm-kind1", "activate-kind0", "gated-kind1", "linear_grouped-kind1")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(samples(torch.float32)))
def test_operators_pass_the_checks_of_torch(native: Any, name: str, kind: torch.dtype) -> None:
    """Schema (what is mutated, what is aliased), fake implementation, and tracing with dynamic shapes."""
    torch.library.opcheck(getattr(native, name).default, samples(kind)[name])


def test_every_operator_with_tensors_has_one(native: Any) -> None:
    names = {
        schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("torchwright::")
    }
    plain = {"isa", "isas", "own_threads", "reads_tiles", "use_isa"}
    assert {name.removeprefix("torchwright::") for name in names} - plain == set(samples(torch.float32))
    assert set(samples(torch.float32)) == {*fake.FAKES, *fake.CPU_FAKES}


@pytest.mark.parametrize("scheme", MADE)
def test_compile_sees_one_graph(native: Any, scheme: str) -> None:
    layer = packed(scheme)
    graph = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for rows in (5, 9):
        x = torch.randn(rows, 96)
        assert torch.equal(graph(x), layer(x))


@pytest.mark.parametrize("scheme", MADE)
def test_export_keeps_the_operator(native: Any, scheme: str) -> None:
    layer, x = packed(scheme), torch.randn(5, 96)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert [node.target for node in program.graph.nodes if node.op == "call_function"].count(
        getattr(native, f"linear_{scheme}").default
    ) == 1
    wider = torch.randn(11, 96)
    assert torch.equal(program.module()(wider), layer(wider))
