"""Layers ranked by what they do to a picture, beside pictures of models with one layer changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.sensitivity import rank_modules
from torchwright.optimization.techniques.int8_dynamic import Int8Dynamic
from torchwright.optimization.techniques.shared.wrapping import replace_module

pytest.importorskip("diffusers", reason="pipelines are opened with diffusers")


@pytest.mark.slow
def test_layers_are_ranked_by_what_they_do_to_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pixart import write_pixart
    from torchwright.models.diffusion.workload import DiffusionWorkload

    workload = DiffusionWorkload(write_pixart(tmp_path, layers=1), steps=4)
    model = workload.build()

    def picture() -> torch.Tensor:
        """Two steps of the last prompt, which judges nothing."""
        from torchwright.models.diffusion.diffuser import Diffuser

        with torch.inference_mode():
            drawn = Diffuser(workload.opened, model).draw(
                workload.texts[-1], seed=len(workload.texts), steps=2
            )
        return drawn.picture_3HW

    target = make_target(workload, get_device("cpu").identify())
    ranking = rank_modules(target, [Step(name="int8_dynamic")])
    errors = [each.error for each in ranking]
    assert all(each.whole for each in ranking)
    assert errors == sorted(errors, reverse=True)
    assert {each.name.partition(".")[0] for each in ranking} == {"text_encoder", "transformer", "vae"}
    before = picture()
    for each in [ranking[0], ranking[len(ranking) // 2], ranking[-1]]:
        name, error = each.name, each.error
        layer = model.get_submodule(name)
        replacement = Int8Dynamic().stand_in(layer)
        assert replacement is not None
        replace_module(model, layer, replacement)
        wanted = ((picture() - before).norm() / (before - 0.5).norm()).item()
        replace_module(model, replacement, layer)
        assert error == pytest.approx(wanted, rel=1e-3, abs=1e-6), name
    target = make_target(workload, get_device("cpu").identify())
    by_own_output = rank_modules(target, [Step(name="int8_dynamic")], longest=-1.0)
    assert {each.name for each in by_own_output} == {each.name for each in ranking}
    assert not any(each.whole for each in by_own_output)
