"""8-bit weights with activations as they are."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from torchwright.core.records import DeviceFacts, Step
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.program import compile_program, export
from torchwright.optimization.engines.dispatch.call import spec_of
from torchwright.optimization.engines.dispatch.spec import CallSpec
from torchwright.optimization.techniques import Target
from torchwright.optimization.techniques.int8_weight_only import Int8WeightLinear, Int8WeightOnly
from torchwright.workloads.module import ModuleWorkload

CPU = DeviceFacts(kind="cpu", name="test", cores=2)
MEASURED = DeviceFacts(kind="cpu", name="test", cores=2, read_gb_per_s=10.0)
SIZE = 256


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make(device: DeviceFacts = CPU, rows: int = 4) -> Target:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE, bias=False))
    return make_target(ModuleWorkload(model, torch.randn(rows, SIZE)), device)


def widened(layer: nn.Linear) -> torch.Tensor:
    """The slow reference: every weight rounded to the nearest of 255 steps of its row."""
    rows = []
    for row in layer.weight.detach().double():
        step = row.abs().max() / 127
        rows.append((row / step).round() * step)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(SIZE,), (3, SIZE), (2, 3, SIZE)])
def test_a_layer_computes_what_its_integers_stand_for(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(SIZE, 48).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    assert layer.bias is not None
    expected = x.double() @ widened(layer).T + layer.bias.detach().double()
    got = Int8WeightLinear(layer)(x)
    assert got.dtype == dtype
    assert got.shape == (*shape[:-1], 48)
    assert float((got.double() - expected).norm() / expected.norm()) < 1e-2  # bfloat16's digits
    torch.testing.assert_close(Int8WeightLinear(layer).weight.double(), widened(layer), rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_compiled_it_is_a_template_that_reads_the_integers(tmp_path: Path) -> None:
    """And not a product with a weight that the compiler has widened once and for all."""
    target = make(rows=16)
    target.properties.add("compiled")
    x = torch.randn(16, SIZE)
    expected = target.model(x).detach()
    apply_steps(target, [Step(name="int8_weight_only")])
    assert target.coverage[0].changed == target.coverage[0].total == 2
    cases = target.workload.cases(torch.float32)
    program = export(target.model, cases)[cases[0].name]
    counters.clear()
    inductor = {"freezing": True, "max_autotune_gemm_backends": "CPP", "autotune_fallback_to_aten": False}
    compile_program(program, tmp_path / "model.pt2", target.settings.inductor | inductor)
    assert counters["inductor"]["cpp_templated_kernel_counter"] == 2
    spec = spec_of("forward", program)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
        # A process that has compiled nothing, and so asked for no tile units.
        got = elsewhere.submit(load_and_run, tmp_path / "model.pt2", spec, x.numpy()).result()
    got = torch.from_numpy(got)
    assert float((got - expected).norm() / expected.norm()) < Int8WeightOnly.tolerance


def load_and_run(path: Path, spec: CallSpec, x: np.ndarray) -> np.ndarray:
    return Package(path, spec).run([torch.from_numpy(x)]).numpy()


def test_without_bytes_to_save_it_is_refused_with_the_numbers() -> None:
    target = make(MEASURED)
    assert Int8WeightOnly().refuse(target) is None, "nothing was measured"
    saved = 2 * SIZE * SIZE / 10e9
    target.kernel_seconds = {"bfloat16": saved * 10}
    assert Int8WeightOnly().refuse(target) is None
    target.kernel_seconds = {"bfloat16": saved * 100}
    assert "save 0.01 ms at most: under 5%" in (Int8WeightOnly().refuse(target) or "")


def test_layers_are_ranked_and_left_alone() -> None:
    target = make()
    target.properties.add("compiled")
    error = Int8WeightOnly().module_error(target.model[0], torch.randn(4, SIZE))  # type: ignore[index]
    assert error is not None
    assert 1e-4 < error < 1e-2
    technique = Int8WeightOnly().retreat(("2",))
    assert technique is not None
    technique.apply(target)
    assert target.coverage[0].skipped == {"2": "left in float: among the most sensitive"}
