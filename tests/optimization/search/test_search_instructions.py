"""Types of 16 bits on a processor that has no instructions for them: what is not tried, and what is all the same."""

from __future__ import annotations

import pytest
import torch

from factories import make_device, make_features
from search_world import World, fake_world, product, row, rows, step
from torchwright.core.records import Features
from torchwright.hardware.devices import get_device
from torchwright.hardware.devices.cpu import onednn_computes
from torchwright.optimization.techniques.dtype import Dtype
from torchwright.optimization.techniques.openvino import RunOpenVino

LINEAR = {"convolution": 0.0, "recurrent": False}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = fake_world(monkeypatch)
    found.gain = product(half=2.0)
    return found


@pytest.mark.parametrize(
    ("features", "kernels"),
    [
        (make_features(convolution=0.01, recurrent=False), {}),
        (make_features(convolution=0.0, recurrent=True), {}),
        (make_features(**LINEAR), {"float32": 0.002, "bfloat16": 0.008}),
    ],
    ids=["convolutions", "recurrent layers", "linear layers of many rows"],
)
def test_is_not_tried(world: World, features: Features, kernels: dict[str, float]) -> None:
    world.features, world.kernels = features, kernels
    assert rows(world.search(step("half"))) == {"half": "kept"}
    world.device = make_device(without=("bfloat16",))
    outcome = world.search(step("half"))
    assert row(outcome, "half").status == "refused"
    assert row(outcome, "half").reason == (
        "this processor has no instructions for bfloat16, and layers in it take several times as long"
    )
    # What is asked for is tried, and its time says the same.
    assert row(world.search(step("half"), wanted=(step("half"),)), "half").status == "kept"


def test_fewer_bytes_of_single_rows_are_tried(world: World) -> None:
    world.features, world.kernels = make_features(**LINEAR), {"float32": 0.002, "bfloat16": 0.001}
    world.device = make_device(without=("bfloat16",))
    assert rows(world.search(step("half"))) == {"half": "kept"}


def test_what_computes_in_16_bits() -> None:
    assert [Dtype(dtype=dtype).half for dtype in ("bfloat16", "float16")] == ["bfloat16", "float16"]
    found = [RunOpenVino(precision=each).half for each in ("bf16", "f16", "f32", "int8")]
    assert found == ["bfloat16", "float16", None, None]


def test_the_processor_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = get_device("cpu")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    assert cpu.identify().without == ("float16",)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu.identify().without == ("bfloat16", "float16")
    assert not onednn_computes("bfloat16")
