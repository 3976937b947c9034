"""A small random pipeline of each family: the same pictures as diffusers' own, its calls, and one calls' counts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="pipelines are opened with diffusers")
tiny = importlib.import_module("tiny_families")
STEPS = 2


@pytest.fixture(scope="module", params=sorted(tiny.FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A family's folder, and the size to draw at."""
    return tiny.write(request.param, tmp_path_factory.mktemp(request.param)), tiny.FAMILIES[request.param][1]


def theirs(
    folder: Path, size: tuple[int, int], arguments: dict[str, Any], frames: int | None
) -> torch.Tensor:
    """diffusers' own picture (3, H, W), or a film's frames below one another."""
    import diffusers

    kind = json.loads((folder / "model_index.json").read_text())["_class_name"]
    missing = {"text_encoder_3": None, "tokenizer_3": None} if kind == "StableDiffusion3Pipeline" else {}
    pipe = getattr(diffusers, kind).from_pretrained(folder, **missing)
    pipe.set_progress_bar_config(disable=True)
    film = {} if frames is None else {"num_frames": frames}
    with torch.no_grad():
        given = pipe(
            "a red dog",
            height=size[0],
            width=size[1],
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(7),
            output_type="pt",
            **arguments,
            **film,
        )
    return given.images[0] if frames is None else torch.cat(list(given.frames[0]), dim=1)


@pytest.mark.plain("sana")
def test_pictures_are_diffusers_own_to_the_bit(made: tuple[Path, Any]) -> None:
    from torchwright.models.diffusion.load import load_diffuser

    folder, size = made
    diffuser, told = load_diffuser(folder), []
    drawn = diffuser.draw(
        "a red dog", seed=7, steps=STEPS, size=size, on_step=lambda *done: told.append(done)
    )
    family = diffuser.folder.family
    arguments = {name: value for name, value in family.arguments if name != "clean_caption"}
    wanted = theirs(folder, size, arguments, diffuser.frames if family.video else None)
    assert torch.equal(drawn.picture_3HW, wanted.float())
    assert drawn.frames_FHW3.shape == (diffuser.frames, *size, 3)
    assert drawn.picture_3HW.std() > 1e-3
    assert told[-1][0] == told[-1][1] == len(told)


@pytest.mark.plain("flux", "stable_diffusion", "sana")
def test_all_of_it_is_float32(made: tuple[Path, Any]) -> None:
    """A table of places in float64 had kept bfloat16 from being tried on films at all."""
    from torchwright.models.diffusion.folder import open_pipeline
    from torchwright.models.diffusion.parts import build_parts

    parts = build_parts(open_pipeline(made[0]))
    tensors = [*parts.parameters(), *parts.buffers()]
    assert {each.dtype for each in tensors if each.is_floating_point()} == {torch.float32}


@pytest.mark.plain("stable_diffusion_3")
def test_calls_are_found_without_computing(made: tuple[Path, Any]) -> None:
    from torchwright.models.diffusion.workload import DiffusionWorkload

    folder, (height, width) = made
    workload = DiffusionWorkload(folder, steps=4, size=f"{height}x{width}")
    cases = workload.cases(torch.float32)
    model = workload.build()
    with torch.inference_mode():
        for case in cases:
            model(*case.args, **case.kwargs)
    family = workload.opened.family
    calls = sum(case.repeat for case in cases if case.args[0] == family.denoiser)
    assert calls in (4 * family.turns, 5)  # PNDM predicts once more than it steps
    assert {case.args[0] for case in cases} == set(workload.opened.models)


@pytest.mark.slow
def test_guidance_of_a_second_call_is_left_out(tmp_path: Path) -> None:
    from torchwright.models.diffusion.sampling import Plan
    from torchwright.models.diffusion.workload import DiffusionWorkload

    workload = DiffusionWorkload(tiny.write("qwen_image", tmp_path), steps=4, size="16x24")
    assert workload.guided()
    for plan, calls in ((Plan(), 8), (Plan(unguided=2), 6), (Plan(unguided=1, reused=frozenset({1})), 5)):
        cases = workload.planned(plan).cases(torch.float32)
        assert sum(case.repeat for case in cases if case.args[0] == "transformer") == calls
    assert not DiffusionWorkload(tiny.write("flux", tmp_path / "flux"), steps=4, size="16x24").guided()


def test_lengths_of_films_are_held_to_the_vae(tmp_path: Path) -> None:
    from torchwright.core.errors import ModelError
    from torchwright.models.diffusion.diffuser import ImagineError
    from torchwright.models.diffusion.load import load_diffuser
    from torchwright.serve.engine.paint import ServedDiffuser

    film = load_diffuser(tiny.write("cogvideox", tmp_path / "film"))
    assert film.draw("a dog", steps=1, size=(32, 48), frames=1).frames_FHW3.shape == (1, 32, 48, 3)
    with pytest.raises(ImagineError, match="1 and 8 more each time"):
        film.draw("a dog", steps=1, size=(32, 48), frames=5)
    with pytest.raises(ImagineError, match=r"^CogVideoXPipeline has no previews"):
        film.draw("a dog", steps=1, size=(32, 48), preview=lambda step, pixels: None)
    with pytest.raises(ModelError, match="films, which are not served"):
        ServedDiffuser(film, max_queue=1)
    picture = load_diffuser(tiny.write("pixart", tmp_path / "picture"))
    with pytest.raises(ImagineError, match="makes pictures"):
        picture.draw("a dog", steps=1, frames=9)
