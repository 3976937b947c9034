"""What a recording says of modules whose work is known. Nothing is said of speeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from torchwright.core.records import DeviceFacts
from torchwright.optimization.profile.recording import labelled, record
from torchwright.optimization.profile.values import OperatorTime, Recording
from torchwright.workloads.base import Case

MACHINE = DeviceFacts(kind="cpu", name="cpu", read_gb_per_s=10.0, tflops={"float32": 0.1, "bfloat16": 1.0})


def recorded(function: Callable[..., Any], *args: Any, repeat: int = 1, **options: Any) -> Recording:
    with torch.inference_mode():
        return record(
            lambda case: function(*case.args),
            [Case("forward", args=args, repeat=repeat)],
            MACHINE,
            most_calls=2,
            **options,
        )


def operator(found: Recording, name: str) -> OperatorTime:
    return next(one for one in found.operators if one.name == name)


def operations(found: Recording) -> float:
    """Of all operators, from their rates and times."""
    rates = [(one.rate, one.seconds) for one in found.operators if one.rate is not None]
    return sum(rate.gflops * 1e9 * seconds for rate, seconds in rates if rate.gflops is not None)


X = torch.randn(2, 8, 12, 12)
TOKENS = torch.randn(2, 5, 16)
HEADS = torch.randn(2, 4, 6, 8)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (nn.Linear(16, 24), (TOKENS,)),
        (nn.Linear(16, 24, bias=False), (TOKENS[0],)),
        (torch.matmul, (TOKENS, TOKENS.mT)),
        (torch.mm, (TOKENS[0], TOKENS[0].mT)),
        (torch.baddbmm, (torch.zeros(2, 5, 5), TOKENS, TOKENS.mT)),
        (nn.Conv2d(8, 6, 3, padding=1), (X,)),
        (nn.Conv2d(8, 8, 3, stride=2, dilation=2, groups=8), (X,)),
        (nn.Conv2d(8, 6, (1, 3), padding=(0, 1), groups=2, bias=False), (X,)),
        (nn.Conv1d(5, 7, 3, stride=2), (TOKENS,)),
        (nn.Conv3d(2, 3, 2), (torch.randn(1, 2, 4, 5, 6),)),
        (nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1, groups=2), (X,)),
        (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), (TOKENS,)),
        (F.scaled_dot_product_attention, (HEADS, HEADS[..., :3, :], HEADS[..., :3, :])),
    ],
)
def test_operations_are_those_that_torchs_own_counter_counts(function: Any, args: tuple[Any, ...]) -> None:
    flash: Any = lambda q, k, v, *args, out_shape=None, **kw: sdpa_flop_count(q, k, v)
    extra = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flash}
    with torch.inference_mode(), FlopCounterMode(display=False, custom_mapping=extra) as counter:
        function(*args)
    assert counter.get_total_flops() > 0
    found = recorded(function, *args)
    assert operations(found) == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert found.operations == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_operations_are_given_to_the_operator_that_computes() -> None:
    found = recorded(nn.Linear(64, 64), torch.randn(4, 64))
    product, caller = operator(found, "aten::addmm"), operator(found, "aten::linear")
    assert (product.kind, caller.kind) == ("matmul", "dispatch")
    assert (product.rate is not None, caller.rate) == (True, None)


def test_bytes_are_inputs_and_outputs() -> None:
    a, b = torch.randn(1000, 100), torch.randn(100)
    added = operator(recorded(torch.add, a, b), "aten::add")
    assert added.kind == "memory-bound"
    assert added.rate is not None
    assert added.rate.gb_per_s is not None
    assert added.rate.gb_per_s * 1e9 * added.seconds == pytest.approx(4 * (2 * a.numel() + b.numel()))
    assert added.rate.bound_by == "bytes"
    assert added.rate.share == pytest.approx(added.rate.gb_per_s / 10.0)


def test_a_reduction_reads_what_it_is_given() -> None:
    x = torch.randn(100, 1000)
    found = operator(recorded(torch.max, x), "aten::max")
    assert found.rate is not None
    assert found.rate.gb_per_s is not None
    assert found.rate.gb_per_s * 1e9 * found.seconds == pytest.approx(4 * x.numel())


@pytest.mark.parametrize("name", ["sum", "hardswish", "mean"])
def test_helpers_within_an_operator_take_nothing_from_it(name: str) -> None:
    """`sum` fills its output first, and `mean` leaves all to `sum`."""
    function = F.hardswish if name == "hardswish" else getattr(torch, name)
    found = recorded(function, torch.randn(512, 1024))
    worker = operator(found, "aten::sum" if name == "mean" else f"aten::{name}")
    assert worker.kind == "memory-bound"
    assert worker.rate is not None


def test_casts_and_copies_have_lines_of_their_own() -> None:
    x = torch.randn(64, 64)
    found = recorded(lambda x: x.to(torch.bfloat16).float() + x.t().contiguous(), x)
    down, up = operator(found, "aten::copy_ to bfloat16"), operator(found, "aten::copy_ to float32")
    assert (down.kind, up.kind, operator(found, "aten::copy_").kind) == ("casts", "casts", "copies")
    assert down.calls == up.calls == 1
    assert down.rate is not None
    assert down.rate.gb_per_s is not None
    assert down.rate.gb_per_s * 1e9 * down.seconds == pytest.approx(x.numel() * 6)
    assert {"casts", "copies"} <= {one.kind for one in found.kinds}


def test_time_without_an_operator_is_idle() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x + 1

    found = recorded(slow, torch.ones(4))
    assert found.idle_seconds >= 0.02
    assert found.idle_share == pytest.approx(found.idle_seconds / found.seconds)
    assert next(one for one in found.kinds if one.kind == "idle").seconds == found.idle_seconds


def test_shares_of_a_pass_add_up() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)
    ).eval()
    found = recorded(model, X)
    assert sum(one.share for one in found.kinds) == pytest.approx(1.0)
    assert sum(one.seconds for one in found.kinds) == pytest.approx(found.seconds)
    assert sum(one.seconds for one in found.operators) + found.idle_seconds == pytest.approx(found.seconds)
    assert found.operators == tuple(sorted(found.operators, key=lambda one: -one.seconds))


def test_a_pass_repeats_its_calls() -> None:
    once, often = (recorded(torch.relu, torch.ones(8), repeat=repeat) for repeat in (1, 5))
    assert (operator(once, "aten::relu").calls, operator(often, "aten::relu").calls) == (1, 5)
    assert [(call.name, call.repeat) for call in often.calls] == [("forward", 5)]


def test_labels_of_the_users_are_no_operators() -> None:
    def labelled_by_hand(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("my::stage"):
            return x + 1

    names = {one.name for one in recorded(labelled_by_hand, torch.ones(4)).operators}
    assert "aten::add" in names
    assert "my::stage" not in names


class Compiled:
    """Stands where a compiled package does: its kernels are unknown to the profiler."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x + 1


@pytest.mark.parametrize(("named", "kind"), [(False, "compiled code"), (True, "idle")])
def test_kernels_without_names_are_no_idle_time(named: bool, kind: str) -> None:
    plain = Compiled.run
    with labelled(Compiled, "run"):
        found = recorded(Compiled().run, torch.ones(4), named=named)
    assert Compiled.run is plain
    assert next(one for one in found.kinds if one.kind == kind).seconds >= 0.01
    assert operator(found, "aten::add").calls == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("graph_0_cpp_fused_relu_0", "fused kernels"),
        ("cpp_fused_add_mul_3", "fused kernels"),
        ("graph_1_cpp_fused__to_copy_transpose_view_2", "casts"),
        ("graph_1_cpp_fused_clone_permute_12", "copies"),
        ("mkldnn::_convolution_pointwise", "convolution"),
        ("aoti_torch_cpu_mkldnn__convolution_pointwise", "convolution"),
        ("aoti_torch_cpu__linear_pointwise", "matmul"),
        ("aoti_torch_cpu_addmm_out", "matmul"),
        ("mkl::_mkl_linear", "matmul"),
        ("onednn::qlinear_pointwise", "matmul"),
        ("torchwright::linear_w4a8", "matmul"),
        ("torchwright::paged_attention", "attention"),
        ("torchwright::rms_norm", "memory-bound"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm", "memory-bound"),
        ("aten::quantize_per_tensor", "casts"),
        ("aten::view", "dispatch"),
        ("aten::empty", "dispatch"),
        ("aten::sigmoid", "memory-bound"),
        ("aten::hardswish", "memory-bound"),
        ("aten::to", "dispatch"),
        ("aten::no_such_operator", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    from torchwright.optimization.profile.kinds import is_operator, kind_of

    assert is_operator(name)
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    "name", ["Torch-Compiled Region: 0/0", "## Call CompiledFxGraph f ##", "call forward"]
)
def test_labels(name: str) -> None:
    from torchwright.optimization.profile.kinds import is_operator

    assert not is_operator(name)
