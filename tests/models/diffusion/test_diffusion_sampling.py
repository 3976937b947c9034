"""Plans, similarity and folders: what needs no diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchwright.core.errors import ArtifactError, ModelError, TorchwrightError, WorkloadError
from torchwright.models.diffusion.folder import open_pipeline
from torchwright.models.diffusion.parts import build_parts
from torchwright.models.diffusion.sampling import Plan, Steps, steps_to_reuse
from torchwright.models.diffusion.score import alike, ms_ssim


def predictions(plan: Plan, *, steps: int, rows: int = 2) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """What the steps of one picture give, and (step, rows) of each call of a denoiser that computes 2 x + step."""
    calls: list[tuple[int, int]] = []
    step = 0

    def denoise(x_BC: torch.Tensor, *, timestep: torch.Tensor) -> torch.Tensor:
        calls.append((step, x_BC.shape[0]))
        assert timestep.shape[0] == x_BC.shape[0]
        return 2 * x_BC + step

    denoiser, given = Steps(denoise, plan, count=lambda: steps), []
    for step in range(steps):  # noqa: B007
        x_BC = torch.arange(rows)[:, None] * torch.ones(rows, 3)
        given.append(denoiser(x_BC, timestep=torch.zeros(rows)))
    return given, calls


def test_all_steps_are_computed_without_a_plan() -> None:
    given, calls = predictions(Plan(), steps=4)
    assert calls == [(step, 2) for step in range(4)]
    assert all(torch.equal(got[0], torch.full((3,), float(step))) for step, got in enumerate(given))


def test_a_reused_step_gives_what_the_last_computed_one_did() -> None:
    given, calls = predictions(Plan(reused=frozenset({2, 3})), steps=5)
    assert [step for step, _ in calls] == [0, 1, 4]
    assert torch.equal(given[2], given[1])
    assert torch.equal(given[3], given[1])


def test_a_first_step_cannot_be_reused() -> None:
    assert predictions(Plan(reused=frozenset({0})), steps=2)[1][0] == (0, 2)


def test_unguided_steps_compute_the_rows_with_the_prompt() -> None:
    """Guidance is the same in every step here, so that nothing may change."""
    full, _ = predictions(Plan(), steps=5)
    given, calls = predictions(Plan(unguided=2), steps=5)
    assert calls == [(0, 2), (1, 2), (2, 2), (3, 1), (4, 1)]
    assert all(torch.equal(a, b) for a, b in zip(full, given, strict=True))


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        (Plan(), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        (Plan(unguided=2), [0, 0, 1, 1, 2, 2, 3, 4]),
        (Plan(unguided=5), [0, 0, 1, 2, 3, 4]),
        (Plan(unguided=2, reused=frozenset({1, 3})), [0, 0, 2, 2, 4]),
    ],
)
def test_guidance_by_a_second_call(plan: Plan, asked: list[int]) -> None:
    """An unguided step takes the difference of the last guided one, and does not ask without the prompt."""
    steps, calls = 5, list[int]()
    true = torch.randn(steps, 2, 3)

    def denoise(step: int, turn: int) -> torch.Tensor:
        calls.append(step)
        return true[step, turn]

    denoiser = Steps(denoise, plan, count=lambda: steps, turns=2)
    given = torch.stack([torch.stack([denoiser(step, turn) for turn in range(2)]) for step in range(steps)])
    assert calls == asked
    last, guidance = torch.empty(2, 3), torch.empty(3)
    for step in range(steps):
        if step not in plan.reused:
            plain = step < steps - plan.unguided or step == 0
            last = true[step] if plain else torch.stack([true[step, 0], true[step, 0] - guidance])
            guidance = last[0] - last[1] if plain else guidance
        assert torch.allclose(given[step], last, atol=1e-6)


def test_a_denoiser_without_guidance_is_left_alone() -> None:
    assert predictions(Plan(unguided=3), steps=4, rows=1)[1] == [(step, 1) for step in range(4)]


def test_steps_are_reused_up_to_the_threshold() -> None:
    changes = [0.0, 0.5, 0.1, 0.1, 0.1, 0.1, 0.3, 0.01]
    assert steps_to_reuse(changes, 0.25) == {2, 3, 5}
    assert steps_to_reuse(changes, 0.05) == set()
    assert steps_to_reuse(changes, 10.0) == set(range(1, 7))


@pytest.mark.parametrize("bad", [{"reused": "all"}, {"reused": [1.5]}, {"unguided": -1}, {"reused": [True]}])
def test_a_damaged_plan_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="damaged"):
        Plan.from_dict(bad)


def test_a_plan_comes_back_from_its_description() -> None:
    plan = Plan(reused=frozenset({4, 2}), unguided=3)
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def plain_ssim(x_HW: torch.Tensor, y_HW: torch.Tensor) -> float:
    """One scale, place by place, as the paper writes it."""
    place = torch.arange(11, dtype=torch.float64) - 5
    line = torch.exp(-(place**2) / (2 * 1.5**2))
    window = torch.outer(line, line) / line.sum() ** 2
    luminance, structure = [], []
    for top in range(x_HW.shape[0] - 10):
        for left in range(x_HW.shape[1] - 10):
            x, y = (p[top : top + 11, left : left + 11] for p in (x_HW, y_HW))
            mx, my = (window * x).sum(), (window * y).sum()
            vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
            covariance = (window * (x - mx) * (y - my)).sum()
            luminance.append((2 * mx * my + 1e-4) / (mx**2 + my**2 + 1e-4))
            structure.append((2 * covariance + 9e-4) / (vx + vy + 9e-4))
    return float(torch.stack(luminance).mean() * torch.stack(structure).mean())


def test_similarity_is_the_papers() -> None:
    x_HW = torch.rand(14, 13, dtype=torch.float64)
    y_HW = (x_HW + 0.3 * torch.randn(14, 13, dtype=torch.float64)).clamp(0, 1)
    found = ms_ssim(x_HW.expand(1, 3, -1, -1), y_HW.expand(1, 3, -1, -1))
    assert found.item() == pytest.approx(max(plain_ssim(x_HW, y_HW), 0), abs=1e-9)


def test_similarity_falls_with_noise_and_is_one_for_equals() -> None:
    pictures = torch.nn.functional.interpolate(torch.rand(2, 3, 8, 8), (192, 192), mode="bicubic").clamp(0, 1)
    assert torch.allclose(ms_ssim(pictures, pictures), torch.ones(2, dtype=torch.float64))
    little, much = (ms_ssim(pictures, pictures + s * torch.randn(pictures.shape)) for s in (0.02, 0.3))
    assert (much < little).all()


def test_pictures_that_prove_nothing_are_refused() -> None:
    one = {"pictures": torch.rand(1, 3, 16, 16), "latents": torch.rand(1, 4)}
    with pytest.raises(WorkloadError, match="interval"):
        alike(one, one)
    two = {"pictures": torch.rand(2, 3, 16, 16), "latents": torch.rand(2, 4)}
    bad = two | {"latents": torch.full((2, 4), torch.nan)}
    with pytest.raises(WorkloadError, match="not numbers"):
        alike(two, bad)
    with pytest.raises(WorkloadError, match="side by side"):
        ms_ssim(torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8))


def folder(path: Path, **entries: Any) -> Path:
    index = {
        "_class_name": "PixArtSigmaPipeline",
        "transformer": ["diffusers", "PixArtTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "DPMSolverMultistepScheduler"],
    }
    for name in ("transformer", "vae", "scheduler"):
        (path / name).mkdir()
        (path / name / "model.safetensors").touch()
    (path / "model_index.json").write_text(json.dumps(index | entries))
    return path


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"_class_name": "NobodysPipeline"}, "NobodysPipeline"),
        ({"_class_name": ["PixArtSigmaPipeline"]}, "pipeline"),
        ({"transformer": ["my_code", "Model"]}, "names code that is not run"),
        ({"transformer": ["diffusers", "x; import os"]}, "names code that is not run"),
        ({"transformer": ["diffusers"]}, "names code that is not run"),
        ({"vae": [None, None]}, "names no vae"),
        ({"text_encoder": ["transformers", "T5EncoderModel"]}, "lacks the component text_encoder"),
        ({"../up": ["diffusers", "AutoencoderKL"]}, "component"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, entries: dict[str, Any], said: str) -> None:
    with pytest.raises(TorchwrightError, match=said):
        open_pipeline(folder(tmp_path, **entries))


def test_weights_in_pickles_are_not_opened(tmp_path: Path) -> None:
    found = folder(tmp_path)
    (found / "transformer" / "model.safetensors").rename(found / "transformer" / "model.bin")
    with pytest.raises(ModelError, match=r"transformer has no \*\.safetensors"):
        build_parts(open_pipeline(found))  # an artifact's folder has none, where a package holds them


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model_index\.json"):
        open_pipeline(tmp_path)
    with pytest.raises(ModelError, match="there is no model at"):
        open_pipeline(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("checker", "said"), [([None, None], "has no"), (["stable_diffusion", "Checker"], "is not run")]
)
def test_nobody_looks_at_the_pictures_and_it_is_said(tmp_path: Path, checker: list[Any], said: str) -> None:
    assert said in open_pipeline(folder(tmp_path, safety_checker=checker)).notices[0]
