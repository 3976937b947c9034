"""Guidance, negative prompts and schedulers, beside diffusers' own; and models that were distilled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from torchwright.core.errors import UnknownName, WorkloadError
from torchwright.models.diffusion.limits import Style

diffusers = pytest.importorskip("diffusers", reason="pipelines are opened with diffusers")
import tiny_families as tiny  # noqa: E402

SIZE = (16, 24)


def with_scheduler(folder: Path, scheduler: Any) -> Path:
    scheduler.save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def schnell(folder: Path) -> Path:
    """A Flux that was distilled: its denoiser has no input for guidance."""
    pipe = tiny.FAMILIES["flux"][0]()
    config = {**pipe.transformer.config, "guidance_embeds": False}
    pipe.transformer = diffusers.FluxTransformer2DModel.from_config(config)
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("stable_diffusion", tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="module")
def diffuser(folder: Path) -> Any:
    from torchwright.models.diffusion.load import load_diffuser

    return load_diffuser(folder)


def theirs(folder: Path, scheduler: Any = None, **asked: Any) -> torch.Tensor:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    if scheduler is not None:
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    height, width = SIZE
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        return pipe(
            "a red dog", height=height, width=width, generator=generator, output_type="pt", **asked
        ).images[0]


def ours(diffuser: Any, style: Style, steps: int | None = 3) -> torch.Tensor:
    return diffuser.draw("a red dog", seed=7, steps=steps, size=SIZE, style=style).picture_3HW


@pytest.mark.slow
def test_guidance_and_negative_prompt_are_diffusers_own(folder: Path, diffuser: Any) -> None:
    plain = ours(diffuser, Style())
    for guidance, negative in ((3.0, None), (0.0, None), (7.5, "blue house")):
        found = ours(diffuser, Style(guidance=guidance, negative=negative))
        asked = {"num_inference_steps": 3, "guidance_scale": guidance, "negative_prompt": negative}
        assert torch.equal(found, theirs(folder, **asked))
        assert not torch.equal(found, plain)
    assert torch.equal(ours(diffuser, Style()), plain)


@pytest.mark.plain("euler-EulerDiscreteScheduler")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("euler", "EulerDiscreteScheduler"),
        ("euler_a", "EulerAncestralDiscreteScheduler"),
        ("ddim", "DDIMScheduler"),
    ],
)
def test_schedulers_are_diffusers_own_and_stay_with_their_picture(
    folder: Path, diffuser: Any, name: str, kind: str
) -> None:
    plain = ours(diffuser, Style())
    wanted = theirs(folder, getattr(diffusers, kind), num_inference_steps=3)
    assert torch.equal(ours(diffuser, Style(scheduler=name)), wanted)
    assert torch.equal(ours(diffuser, Style()), plain)


@pytest.mark.slow
def test_every_scheduler_by_name_makes_a_picture(diffuser: Any) -> None:
    from torchwright.models.diffusion.schedulers import NAMES

    for name in NAMES:
        assert torch.isfinite(ours(diffuser, Style(scheduler=name), steps=4)).all(), name


def test_what_a_model_cannot_do_is_refused_by_name(diffuser: Any, tmp_path: Path) -> None:
    from torchwright.models.diffusion.load import load_diffuser

    with pytest.raises(UnknownName, match="did you mean 'euler'"):
        ours(diffuser, Style(scheduler="eulr"))
    with pytest.raises(WorkloadError, match="negative prompt changes nothing"):
        ours(diffuser, Style(guidance=0.0, negative="blue"))
    with pytest.raises(WorkloadError, match="guidance -1"):
        ours(diffuser, Style(guidance=-1.0))
    flux = load_diffuser(schnell(tmp_path))
    with pytest.raises(WorkloadError, match=r"cannot use the scheduler ddim.*Allowed: euler, heun, lcm"):
        flux.draw("a dog", steps=1, size=SIZE, style=Style(scheduler="ddim"))
    with pytest.raises(WorkloadError, match="trained without guidance"):
        flux.draw("a dog", steps=1, size=SIZE, style=Style(guidance=3.0))
    with pytest.raises(WorkloadError, match="negative prompt changes nothing"):
        flux.draw("a dog", steps=1, size=SIZE, style=Style(negative="blue"))
    assert flux.habits.steps == 4


def test_guidance_in_two_calls_may_be_left_out(tmp_path: Path) -> None:
    from torchwright.models.diffusion.load import load_diffuser

    qwen, told = load_diffuser(tiny.write("qwen_image", tmp_path)), []
    qwen.draw("a dog", steps=2, size=SIZE, style=Style(guidance=1.0), on_step=lambda *done: told.append(done))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.slow
def test_a_turbo_model_runs_as_it_was_trained(tmp_path: Path) -> None:
    """SD-Turbo's scheduler: no guidance and few steps, unless they are asked for."""
    from torchwright.models.diffusion.load import load_diffuser

    folder = tiny.write("stable_diffusion", tmp_path)
    with_scheduler(folder, diffusers.EulerDiscreteScheduler(timestep_spacing="trailing", steps_offset=1))
    turbo = load_diffuser(folder)
    assert (turbo.habits.steps, turbo.habits.guidance) == (4, 0.0)
    wanted = theirs(folder, num_inference_steps=4, guidance_scale=0.0)
    assert torch.equal(ours(turbo, Style(), steps=None), wanted)
    one = theirs(folder, num_inference_steps=1, guidance_scale=0.0)
    assert torch.equal(ours(turbo, Style(), steps=1), one)
    guided = theirs(folder, num_inference_steps=2, guidance_scale=2.0)
    assert torch.equal(ours(turbo, Style(guidance=2.0), steps=2), guided)


def test_a_consistency_model_runs_as_it_was_trained(tmp_path: Path) -> None:
    from torchwright.models.diffusion.load import load_diffuser

    folder = with_scheduler(tiny.write("stable_diffusion", tmp_path), diffusers.LCMScheduler(steps_offset=1))
    lcm = load_diffuser(folder)
    assert lcm.habits.steps == 4
    wanted = theirs(folder, num_inference_steps=4, guidance_scale=1.0)
    assert torch.equal(ours(lcm, Style(), steps=None), wanted)


def test_the_command_draws_several(folder: Path, tmp_path: Path) -> None:
    from torchwright.cli.imagine import command

    out = tmp_path / "a.png"
    words = ["a dog", "--model", str(folder), "--steps", "2", "--size", "16x24", "-o", str(out), "--quiet"]
    result = CliRunner().invoke(
        command, [*words, "--count", "2", "--guidance", "3", "--negative", "blue", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["pictures"]
    assert [(Path(row["file"]).name, row["seed"]) for row in found] == [("a-1.png", 0), ("a-2.png", 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1.png", "a-2.png"]
    result = CliRunner().invoke(command, [*words, "--seed", "1", "--guidance", "3", "--negative", "blue"])
    assert out.read_bytes() == (tmp_path / "a-2.png").read_bytes()
