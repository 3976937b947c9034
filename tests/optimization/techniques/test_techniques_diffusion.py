"""Steps of pipelines alone: the fused model draws the same, tiles draw nearly the same, and refusals have reasons."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.base import from_step

pytest.importorskip("diffusers", reason="pipelines are opened with diffusers")
sys.path.append(str(Path(__file__).parents[2] / "models" / "diffusion"))


def workload_of(family: str, folder: Path, size: str) -> Any:
    tiny_families = importlib.import_module("tiny_families")
    from torchwright.models.diffusion.workload import DiffusionWorkload

    return DiffusionWorkload(tiny_families.write(family, folder), steps=2, size=size)


def outputs(workload: Any, target: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        found = [target.model(*case.args, **case.kwargs) for case in workload.cases(torch.float32)]
    return [each for each in found if isinstance(each, torch.Tensor)]


def applied(workload: Any, *steps: Step) -> Any:
    target = make_target(workload, get_device("cpu").identify())
    apply_steps(target, steps)
    return target


@pytest.mark.plain("pixart-4")
@pytest.mark.parametrize(
    ("family", "layers"), [("pixart", 4), ("stable_diffusion", 8), ("stable_diffusion_3", 2), ("flux", 3)]
)
def test_fused_attention_computes_the_same(family: str, layers: int, tmp_path: Path) -> None:
    workload = workload_of(family, tmp_path, "16x24")
    fused = applied(workload, Step(name="fused_qkv"))
    for a, b in zip(outputs(workload, applied(workload)), outputs(workload, fused), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert fused.coverage[-1].changed == fused.coverage[-1].total == layers
    left = {name.rpartition(".")[2] for name, _ in fused.model.named_modules() if "transformer" in name}
    assert "to_v" not in left


def test_tiles_hold_less_and_are_blended(tmp_path: Path) -> None:
    workload = workload_of("pixart", tmp_path, "64x48")
    tiled = applied(workload, Step(name="vae_tiling", options={"tile": 16}))
    largest: list[int] = []
    tiled.model.vae.decoder.register_forward_pre_hook(
        lambda module, args: largest.append(max(args[0].shape[-2:]))
    )
    before, after = (outputs(workload, target)[-1] for target in (applied(workload), tiled))
    assert max(largest) == 16
    assert len(largest) > 1
    assert before.shape == after.shape == (1, 3, 64, 48)
    # A tile's own place is decoded as it was, but for what reaches over its edge and what norms see.
    assert (before - after).norm() < 0.5 * before.norm()


@pytest.mark.slow  # the contract of techniques has reasons of every technique
@pytest.mark.parametrize(
    ("step", "family", "said"),
    [
        (Step(name="vae_tiling"), "pixart", "all of them in one tile of 64"),
        (Step(name="vae_tiling", options={"tile": 2}), "pixart", "4 are the fewest"),
        (Step(name="vae_tiling", options={"tile": 4}), "sana", "AutoencoderDC"),
        (Step(name="fused_qkv"), "sana", "diffusers fuses nothing"),
    ],
)
def test_refusals_have_reasons(step: Step, family: str, said: str, tmp_path: Path) -> None:
    target = make_target(workload_of(family, tmp_path, "32x32"), get_device("cpu").identify())
    reason = from_step(step).refuse(target)
    assert reason is not None
    assert said in reason
    with pytest.raises(RefusedTechnique):
        apply_steps(target, [step])
