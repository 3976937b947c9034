"""Pictures of a small pipeline, beside diffusers' own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from torchwright.core.errors import ModelError, TorchwrightError, WorkloadError


@pytest.fixture(scope="module")
def diffuser(pixart: Path):
    from torchwright.models.diffusion.load import load_diffuser

    return load_diffuser(pixart)


def test_pictures_are_diffusers_own_to_the_bit(pixart: Path, diffuser) -> None:
    import diffusers

    pipe = diffusers.PixArtSigmaPipeline.from_pretrained(pixart)
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 3, "use_resolution_binning": False, "clean_caption": False}
    theirs = pipe(
        "a red dog",
        height=24,
        width=16,
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
        **given,
    )
    ours = diffuser.draw("a red dog", seed=7, steps=3, size=(24, 16))
    assert torch.equal(ours.picture_3HW, theirs.images[0])
    assert ours.pixels_HW3.shape == (24, 16, 3)


def test_seeds_decide_and_previews_change_nothing(diffuser) -> None:
    told, seen = [], []
    one = diffuser.draw("a house", seed=1, steps=3, on_step=lambda done, total: told.append((done, total)))
    again = diffuser.draw("a house", seed=1, steps=3, preview=lambda step, pixels: seen.append(pixels))
    other = diffuser.draw("a house", seed=2, steps=3)
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert (one.pixels_HW3 == again.pixels_HW3).all()
    assert not torch.equal(one.picture_3HW, other.picture_3HW)
    assert [p.shape for p in seen] == [one.pixels_HW3.shape] * 3
    assert (seen[-1] == one.pixels_HW3).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"size": (18, 16)},
        {"size": (0, 16)},
        {"size": (65536, 65536)},
        {"steps": 0},
        {"steps": 10**6},
        {"seed": -1},
        {"prompt": "x" * 10_001},
        {"prompt": "half of \udcff"},
        {"prompt": 5},
        {"prompt": ["a dog"]},
    ],
)
def test_what_no_picture_is_made_of_is_refused(diffuser, bad: dict) -> None:
    from torchwright.models.diffusion.diffuser import ImagineError

    with pytest.raises(ImagineError, match="Allowed"):
        diffuser.draw(**({"prompt": "a dog"} | bad))


def test_a_picture_that_is_too_large_is_not_called_a_film(diffuser) -> None:
    from torchwright.models.diffusion.diffuser import ImagineError

    with pytest.raises(ImagineError, match=r"a picture of 99996x99996 pixels.*16,777,216 pixels together"):
        diffuser.draw("a dog", size=(99_996, 99_996))


def test_one_step_of_pixart_alpha(pixart: Path, tmp_path: Path) -> None:
    """It takes the clean picture that a scheduler tells of its only step: DPM-Solver tells none, DDPM does."""
    import diffusers

    from torchwright.models.diffusion.diffuser import ImagineError
    from torchwright.models.diffusion.load import load_diffuser
    from torchwright.models.diffusion.workload import DiffusionWorkload

    folder = shutil.copytree(pixart, tmp_path / "alpha")
    index = json.loads((folder / "model_index.json").read_text())
    for scheduler in ("DPMSolverMultistepScheduler", "DDPMScheduler"):
        getattr(diffusers, scheduler)().save_pretrained(folder / "scheduler")
        index |= {"_class_name": "PixArtAlphaPipeline", "scheduler": ["diffusers", scheduler]}
        (folder / "model_index.json").write_text(json.dumps(index))
        one = load_diffuser(folder)
        if scheduler == "DDPMScheduler":
            assert one.draw("a dog", steps=1, size=(16, 16)).pixels_HW3.shape == (16, 16, 3)
            continue
        with pytest.raises(ImagineError, match=r"in one step.*DPMSolver.*2 steps or more"):
            one.draw("a dog", steps=1, size=(16, 16))
        with pytest.raises(ImagineError, match="in one step"):
            DiffusionWorkload(folder, steps=1).cases(torch.float32)
        assert one.draw("a dog", steps=2, size=(16, 16)).pixels_HW3.shape == (16, 16, 3)


def test_an_error_of_many_lines_says_what_it_found(pixart: Path, tmp_path: Path) -> None:
    from torchwright.models.diffusion.load import load_diffuser

    folder = shutil.copytree(pixart, tmp_path / "heads")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    config["num_attention_heads"] += 1
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"transformer.*[sS]ize mismatch for "):
        load_diffuser(folder)


def test_weights_that_are_missing_are_named(pixart: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from torchwright.models.diffusion.load import load_diffuser

    broken = shutil.copytree(pixart, tmp_path / "broken")
    file = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors.pop("proj_out.weight")
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"transformer.*proj_out"):
        load_diffuser(broken)


@pytest.mark.slow
def test_the_calls_of_a_picture(pixart: Path) -> None:
    from torchwright.models.diffusion.sampling import Plan
    from torchwright.models.diffusion.workload import DiffusionWorkload

    workload = DiffusionWorkload(pixart, steps=6, size="24x16")
    calls = {case.name: case.repeat for case in workload.cases(torch.float32)}
    assert calls == {"text_encoder": 2, "transformer": 6, "vae": 1}
    planned = workload.planned(Plan(reused=frozenset({2, 3}), unguided=2))
    calls = {case.name: case.repeat for case in planned.cases(torch.float32)}
    assert calls == {"text_encoder": 2, "transformer": 2, "transformer 2": 2, "vae": 1}
    tensors = [
        value for case in planned.cases(torch.float32) for value in (*case.args, *case.kwargs.values())
    ]
    assert all(0 not in t.stride() for t in tensors if isinstance(t, torch.Tensor))


def test_what_chooses_steps_and_layers_judges_nothing(pixart: Path, tmp_path: Path) -> None:
    from torchwright.models.diffusion.workload import DiffusionWorkload

    prompts = tmp_path / "prompts.txt"
    for count, judged, others in [
        (2, 2, 0),
        (4, 4, 0),
        (5, 4, 0),
        (6, 4, 0),
        (7, 4, 2),
        (9, 4, 4),
        (20, 9, 9),
    ]:
        prompts.write_text("".join(f"picture {number}\n" for number in range(count)))
        workload = DiffusionWorkload(pixart, steps=2, prompts=prompts)
        unseen = workload.unseen()
        seen = [*workload._judged(), *(unseen._judged() if unseen else ())]
        assert seen == list(range(judged + others))
        assert workload.calibrates_apart() == (count - 1 not in seen)
    assert DiffusionWorkload(pixart).calibrates_apart()
    assert len(DiffusionWorkload(pixart).unseen()._judged()) == 4


def test_bfloat16_keeps_the_numbers_of_steps(pixart: Path) -> None:
    """984 and 980 are neighbours in bfloat16."""
    from torchwright.models.diffusion.workload import DiffusionWorkload

    workload = DiffusionWorkload(pixart, steps=2)
    model, seen = workload.build(), []
    model.transformer.adaln_single.emb.time_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    )
    cast = workload.cast(model, torch.bfloat16, lambda name, module: False)
    case = next(case for case in workload.cases(torch.bfloat16) if case.name == "transformer")
    timestep = torch.full((2,), 983.0)
    with torch.inference_mode():
        output = cast(*case.args, **(case.kwargs | {"timestep": timestep}))
    assert seen[0].tolist() == [983.0, 983.0]
    assert output.dtype == torch.float32
    assert model.transformer.proj_out.weight.dtype == torch.bfloat16


def test_what_a_budget_leaves_out_is_refused_in_words(pixart: Path, tmp_path: Path) -> None:
    from torchwright.models.diffusion.workload import DiffusionWorkload

    with pytest.raises(WorkloadError, match="HxW"):
        DiffusionWorkload(pixart, size="large")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one alone\n")
    with pytest.raises(WorkloadError, match="1 prompts"):
        DiffusionWorkload(pixart, prompts=prompts)


def test_the_command(pixart: Path, tmp_path: Path) -> None:
    from torchwright.cli.imagine import command

    out = tmp_path / "picture.png"
    words = ["a dog", "--model", str(pixart), "--steps", "2", "--size", "16x24", "-o", str(out)]
    result = CliRunner().invoke(command, [*words, "--json"])
    assert result.exit_code == 0, result.output
    from PIL import Image

    with Image.open(out) as picture:
        assert picture.size == (24, 16)
    assert json.loads(result.stdout)["height"] == 16
    assert "nobody looks at the pictures" in result.stderr
    assert CliRunner().invoke(command, [*words[:-1], str(tmp_path / "picture.tiff")]).exit_code == 2
    with pytest.raises(WorkloadError, match="nothing can be written"):
        CliRunner().invoke(command, [*words[:-1], "/proc/self/a.png"], catch_exceptions=False)
    with pytest.raises(TorchwrightError, match="multiples of 4"):
        CliRunner().invoke(command, [*words, "--size", "15x16"], catch_exceptions=False)


@pytest.mark.slow
def test_a_scheduler_may_ask_more_often_than_it_was_told_steps(pixart: Path, tmp_path: Path) -> None:
    """PNDM makes one prediction more; without a plan none of them goes without guidance."""
    import diffusers

    from torchwright.models.diffusion.load import load_diffuser
    from torchwright.models.diffusion.workload import DiffusionWorkload

    folder = shutil.copytree(pixart, tmp_path / "pndm")
    diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1).save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "PNDMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    told = []
    load_diffuser(folder).draw("a dog", steps=3, on_step=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    calls = {case.name: case.repeat for case in DiffusionWorkload(folder, steps=3).cases(torch.float32)}
    assert calls == {"text_encoder": 2, "transformer": 4, "vae": 1}
