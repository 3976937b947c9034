"""A workload on its way to its trials: what arrives, and where its tensors lie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from torchwright.optimization.trial.travel import TENSORS, pack, unpack
from torchwright.train.prove.processes import on_processes
from torchwright.workloads.module import ModuleWorkload


class Odd(nn.Module):
    """Storages that are shared, seen as another type, cut, empty, and of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        turns = torch.randn(3, 2)
        self.register_buffer("turns", turns)
        self.register_buffer("complex", torch.view_as_complex(turns))
        self.register_buffer("part", torch.randn(8, 4)[2:7, ::3])
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("narrow", torch.randn(7).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False]))


@pytest.fixture
def travelled(tmp_path: Path) -> tuple[nn.Module, nn.Module]:
    model = Odd()
    return model, unpack(pack(ModuleWorkload(model, (torch.ones(2, 5),)), tmp_path)).model  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportReturnType]


def test_tensors_arrive_as_they_were(travelled: tuple[nn.Module, nn.Module]):
    model, found = travelled
    expected, arrived = model.state_dict(), found.state_dict()
    assert list(expected) == list(arrived)
    for name, tensor in expected.items():
        torch.testing.assert_close(arrived[name], tensor, rtol=0, atol=0)
        assert arrived[name].stride() == tensor.stride()


def test_storages_that_are_shared_stay_shared(travelled: tuple[nn.Module, nn.Module]):
    found: Any = travelled[1]
    assert found.second.weight is found.first.weight
    found.turns[0, 0] = 7.0
    assert found.complex[0].real == 7.0


def test_weights_are_mapped_from_the_file_and_changed_in_this_process_alone(tmp_path: Path):
    """A block that is unpacked and freed would change what glibc does with the original's activations."""
    workload = ModuleWorkload(nn.Linear(64, 64), (torch.ones(2, 64),))
    found: Any = unpack(pack(workload, tmp_path))
    address = found.model.weight.data_ptr()
    assert any(
        int(start, 16) <= address < int(end, 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / TENSORS))
        for start, end in [line.split()[0].split("-")]
    )
    found.model.weight.detach().zero_()
    again: Any = unpack(tmp_path)
    torch.testing.assert_close(again.model.weight, workload.model.weight)


def test_a_model_of_transformers_records_its_outputs_where_it_arrives(tmp_path: Path):
    """transformers notes what a class records when it builds one; a process that unpickles it builds none."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        depths=[1, 1], hidden_sizes=[8, 16], num_encoder_blocks=2, num_attention_heads=[1, 2],
        sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2], decoder_hidden_size=8,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    pictures = torch.randn(1, 3, 16, 16)
    pack(ModuleWorkload(model, (pictures,)), tmp_path)
    assert on_processes(1, shape_where_it_arrives, tmp_path) == [list(model(pictures).logits.shape)]


def shape_where_it_arrives(folder: Path) -> list[int]:
    workload: Any = unpack(folder)
    return list(workload.build()(*workload.inputs[0][0]).logits.shape)


def test_a_graph_of_make_fx_arrives_in_a_process_that_has_traced_nothing(tmp_path: Path):
    """CHGNet's energies and forces: an exported derivative."""
    x = torch.randn(3, 5)
    model: Any = make_fx(nn.Linear(5, 5).requires_grad_(False))(x)
    torch.save(model(x), tmp_path / "expected.pt")
    pack(ModuleWorkload(model, (x,)), tmp_path)
    code = f"""
import torch
from pathlib import Path
from torchwright.optimization.trial.travel import unpack
found, folder = unpack(Path({str(tmp_path)!r})), Path({str(tmp_path)!r})
torch.testing.assert_close(found.model(*found.inputs[0][0]), torch.load(folder / "expected.pt"))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
