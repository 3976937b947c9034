"""A pipeline through a whole search: what is told before it, and what is drawn with the artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwright.core.records import Budget, Event


@pytest.mark.slow
def test_a_pipeline_is_optimized_and_draws(pixart: Path, tmp_path: Path) -> None:
    import torchwright as tw
    from torchwright.core.records import Step
    from torchwright.models.diffusion.workload import DiffusionWorkload
    from torchwright.optimization.optimize import optimize
    from torchwright.optimization.search.state import Request

    told: list[Event] = []
    request = Request(
        workload=DiffusionWorkload(pixart, steps=6),
        budget=Budget(max_drop=1.0, time_seconds=300.0),
        device="cpu",
        wanted=[Step(name="step_caching", options={"reused": ["2", "3"]})],
        only=True,
    )
    recipe = optimize(request, tmp_path / "out", told.append)
    assert recipe.final.quality is not None
    if recipe.steps:  # what was loaded and timed at the end leaves the steps out, too
        assert recipe.final.quality.drop > 0
        assert {case.name: case.repeat for case in recipe.final.cases}["transformer"] == 4
    drawn = tw.load(tmp_path / "out").model.draw("a red dog", seed=1, steps=6)
    assert drawn.pixels_HW3.shape == (16, 16, 3)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Time by part" in page
    assert "times as strong" in page or not recipe.steps


@pytest.mark.slow
def test_a_pipeline_that_was_compiled_ahead_of_time_draws(pixart: Path, tmp_path: Path) -> None:
    """Its package holds the weights, and the artifact's folder none: it could not be opened at all."""
    import torchwright as tw
    from torchwright.core.records import Step
    from torchwright.models.diffusion.workload import DiffusionWorkload
    from torchwright.optimization.optimize import optimize
    from torchwright.optimization.search.state import Request

    request = Request(
        workload=DiffusionWorkload(pixart, steps=3),
        budget=Budget(max_drop=1.0, time_seconds=600.0),
        device="cpu",
        wanted=[Step(name="compile")],
        only=True,
    )
    recipe = optimize(request, tmp_path / "out", lambda event: None)
    assert not any("is not to be had" in note for note in recipe.notes)
    assert not any(recipe.steps and (tmp_path / "out" / "model").rglob("*.safetensors"))
    drawn = tw.load(tmp_path / "out").model.draw("a red dog", seed=1, steps=3)
    assert drawn.pixels_HW3.shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("steps", "size", "texts", "judged"),
    [
        (20, "64x64", 40, 16),
        (20, "64x64", 21, 10),
        (20, "128x128", 40, 6),
        (20, "512x512", 40, 4),
        (2, None, 3, 3),
    ],
)
def test_small_pictures_are_judged_by_more_of_them(
    pixart: Path, tmp_path: Path, steps: int, size: str | None, texts: int, judged: int
) -> None:
    """Of four pictures of 64x64 a search kept steps that cost others more than the budget."""
    from torchwright.models.diffusion.workload import DiffusionWorkload

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"the number {n}\n" for n in range(texts)))
    workload = DiffusionWorkload(pixart, steps=steps, size=size, prompts=prompts)
    assert workload._judged() == range(judged)  # pyright: ignore[reportPrivateUsage]
    unseen = workload.unseen()
    others = range(judged, min(2 * judged, texts - 1))
    assert unseen is None if len(others) < 2 else unseen is not None and unseen.sample == others


def test_what_a_user_should_know_is_told_first(
    pixart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchwright.models.diffusion.workload import DiffusionWorkload
    from torchwright.optimization import optimize as module
    from torchwright.optimization.search.state import Request

    told: list[Event] = []

    class Began(Exception):
        pass

    def begin(search: object) -> None:
        raise Began

    monkeypatch.setattr(module, "run", begin)
    request = Request(workload=DiffusionWorkload(pixart, steps=2), budget=Budget(), only=True)
    with pytest.raises(Began):
        module.optimize(request, tmp_path / "out", told.append)
    notices = [event.text for event in told if event.kind == "notice"]
    assert any("nobody looks at the pictures" in text for text in notices)
    assert any("judged by multi-scale SSIM: LPIPS needs sides of 31 pixels" in text for text in notices)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_steps_that_are_left_out_are_left_out_of_what_is_timed_and_judged(
    pixart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchwright.core.records import Step
    from torchwright.models.diffusion.workload import DiffusionWorkload
    from torchwright.optimization.trial.session import TrialSession

    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def prepared(*steps: Step) -> tuple[TrialSession, int]:
        session = TrialSession()
        session.workload = DiffusionWorkload(pixart, steps=6)
        session.init(device="cpu", threads=1, seed=0, scratch=str(tmp_path))
        return session, session.prepare(steps=steps).repeats["transformer"]

    original, calls = prepared()
    assert calls == 6
    fewer, calls = prepared(Step(name="step_caching", options={"reused": ["2", "3"]}))
    assert calls == 4
    assert fewer.compare(reference=original.observe()).drop > 0


@pytest.mark.slow
def test_step_caching_without_steps_proposes_those_of_its_thresholds(
    pixart: Path,
) -> None:
    from torchwright.hardware.devices import get_device
    from torchwright.models.diffusion.workload import DiffusionWorkload
    from torchwright.optimization.engines.apply import make_target
    from torchwright.optimization.engines.describe import describe_target
    from torchwright.optimization.techniques.step_caching import StepCaching

    def proposed(changes: list[float]) -> list[tuple[list[str], str | None]]:
        class Measured(DiffusionWorkload):
            def changes(self, model: object) -> list[float]:
                return changes

        target = make_target(Measured(pixart, steps=6), get_device("cpu").identify())
        found = describe_target(target, ["step_caching"])
        assert found.features.pipeline
        return [(step.options.get("reused", []), reason) for step, reason in found.variants]

    assert StepCaching().is_open
    found = proposed([0.0, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert found == [(["1", "2", "3"], None), (["1", "2", "4"], None), (["1", "3"], None)]
    ((reused, reason),) = proposed([0.0, *[2.0] * 5])
    assert reused == []
    assert "no step of the 6" in str(reason)
