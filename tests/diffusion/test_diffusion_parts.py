"""Techniques on a pipeline's components: what they change, and how they stand together."""

# pyright: basic
from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from torchwright.devices import get_device
from torchwright.engines.apply import apply_steps, make_target
from torchwright.techniques.base import Target, parse_step


@functools.cache
def workload_of(folder: Path) -> Any:
    """One for all targets: it finds its calls once."""
    from torchwright.diffusion.workload import DiffusionWorkload

    return DiffusionWorkload(folder, steps=2)


def target_of(folder: Path, *steps: str) -> Target:
    target = make_target(workload_of(folder), get_device("cpu").identify())
    target.properties |= {"compiled"}
    apply_steps(target, [parse_step(text) for text in steps])
    return target


def errors(target: Target, original: Target) -> dict[str, float]:
    """Relative errors of the calls' outputs against the original's, on fresh random inputs."""
    found = {}
    with torch.inference_mode():
        for case in original.workload.cases(torch.float32):
            args, kwargs = pytree.tree_map(_other, (case.args, case.kwargs))
            before, after = (
                pytree.tree_leaves(model(*args, **kwargs)) for model in (original.model, target.model)
            )
            pairs = list(zip(before, after, strict=True))
            assert all(a.dtype == b.dtype for a, b in pairs)
            floats = [(a.double(), b.double()) for a, b in pairs if a.is_floating_point()]
            found[case.name] = max(float((b - a).norm() / a.norm()) for a, b in floats)
    return found


def _other(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2:
        return torch.randn_like(value)
    return value


def test_half_precision_finds_the_components_inside_of_a_wrapper(pixart: Path) -> None:
    original = target_of(pixart)
    found = errors(target_of(pixart, "channels_last", "dtype"), original)
    assert all(0 < error < 3e-2 for error in found.values())


def test_layers_kept_in_float32_are_given_it_inside_of_a_wrapper(pixart: Path) -> None:
    """The components have their plain names there, so that what they keep is found."""
    step = "dtype:keep_float32=transformer.adaln_single"
    apart = target_of(pixart, step)
    assert set(errors(target_of(pixart, "channels_last", step), apart).values()) == {0.0}


@pytest.mark.parametrize("others", [(), ("dtype",), ("channels_last", "dtype")])
def test_a_pipeline_in_4_bits_still_reads_its_weights(pixart: Path, others: tuple[str, ...]) -> None:
    """A text encoder's feed-forward casts what it passes on to the type of the next layer's weight."""
    target = target_of(pixart, *others, "int4_weight_only:group_size=32")
    assert target.coverage[-1].changed > 0
    found = errors(target, target_of(pixart))
    # 4 bits lose about 8% of a layer of random weights, and a few layers follow one another.
    assert all(error < 0.5 for error in found.values()), found
    assert found["text_encoder"] > 0
