"""Techniques for some of a pipeline's components: what they change, how they stand together, and what is refused."""

# pyright: basic
from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchwright.core.errors import ModelError, RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.base import Target, from_step, parse_step


@functools.cache
def workload_of(folder: Path) -> Any:
    """One for all targets: it finds its calls once."""
    from torchwright.models.diffusion.workload import DiffusionWorkload

    return DiffusionWorkload(folder, steps=2)


def target_of(folder: Path, *steps: str) -> Target:
    target = make_target(workload_of(folder), get_device("cpu").identify())
    target.properties |= {"compiled"}
    apply_steps(target, [parse_step(text) for text in steps])
    return target


def types(target: Target) -> dict[str, set[torch.dtype]]:
    from torchwright.models.diffusion.parts import PipelineModules

    parts = next(module for module in target.model.modules() if isinstance(module, PipelineModules))
    return {name: {p.dtype for p in part.parameters()} for name, part in parts.named_children()}


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


def test_one_component_takes_half_precision_then_another(pixart: Path) -> None:
    half, full = {torch.bfloat16}, {torch.float32}
    original = target_of(pixart)
    one = target_of(pixart, "dtype:parts=vae")
    assert types(one) == {"text_encoder": full, "transformer": full, "vae": half}
    found = errors(one, original)
    assert 0 < found["vae"] < 3e-2
    assert found["transformer"] == found["text_encoder"] == 0
    both = target_of(pixart, "dtype:parts=vae", "dtype:parts=transformer")
    assert types(both) == {"text_encoder": full, "transformer": half, "vae": half}
    found = errors(both, original)
    assert 0 < found["transformer"] < 3e-2
    assert found["text_encoder"] == 0


def test_components_and_the_whole_answer_alike(pixart: Path) -> None:
    """Half precision of each component by itself is that of all of them, to the bit."""
    whole = target_of(pixart, "dtype")
    apart = target_of(pixart, *(f"dtype:parts={part}" for part in ("text_encoder", "transformer", "vae")))
    assert set(errors(apart, whole).values()) == {0.0}


@pytest.mark.plain("int8_weight_only")
@pytest.mark.parametrize("technique", ["int8_dynamic", "int8_weight_only", "int4_weight_only"])
def test_quantization_keeps_to_its_component(pixart: Path, technique: str) -> None:
    fault = from_step(Step(name=technique)).available(get_device("cpu").identify())
    if fault:
        pytest.skip(fault)
    group = ":group_size=32," if technique.startswith("int4") else ":"
    try:
        target = target_of(pixart, f"{technique}{group}parts=transformer")
    except RefusedTechnique as refusal:
        pytest.skip(str(refusal))
    linear = [name for name, module in target.model.named_modules() if type(module) is nn.Linear]
    assert [name for name in linear if "text_encoder." in name]
    (coverage,) = target.coverage
    left = [name for name in linear if "transformer." in name]
    assert {name.partition("transformer.")[2] for name in left} == {
        name.partition("transformer.")[2] for name in coverage.skipped
    }
    assert coverage.changed > 0
    assert errors(target, target_of(pixart))["text_encoder"] == 0


def test_channels_last_and_half_precision_stand_together(pixart: Path) -> None:
    """The one wraps the model before the other looks for its components."""
    original = target_of(pixart)
    for steps in (["channels_last", "dtype"], ["channels_last:parts=vae", "dtype:parts=vae"]):
        assert all(error < 3e-2 for error in errors(target_of(pixart, *steps), original).values())
    last = target_of(pixart, "channels_last:parts=vae")
    convolutions = {
        name: module.weight.is_contiguous(memory_format=torch.channels_last)
        for name, module in last.model.named_modules()
        if isinstance(module, nn.Conv2d) and min(module.weight.shape[1:]) > 1
    }
    assert {found for name, found in convolutions.items() if name.startswith("vae.")} == {True}
    assert not any(found for name, found in convolutions.items() if name.startswith("transformer."))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ("dtype:parts=decoder", "no component 'decoder': it has text_encoder, transformer, vae"),
        ("dtype:parts=vae,autocast=true", "it takes no parts"),
        ("compile:parts=vae", "engine=jit with parts"),
        ("compile:engine=jit,parts=nose", "no component 'nose'"),
        ("step_caching:reused=1", "a picture of 2 steps has none between the first and the last"),
    ],
)
def test_what_cannot_be_is_said(pixart: Path, step: str, why: str) -> None:
    with pytest.raises(RefusedTechnique, match=why):
        target_of(pixart, step)


def test_a_model_that_is_one_has_no_components() -> None:
    from torchwright.workloads.module import ModuleWorkload

    workload = ModuleWorkload(nn.Linear(4, 4), torch.ones(1, 4))
    target = make_target(workload, get_device("cpu").identify())
    with pytest.raises(RefusedTechnique, match="it is one, and parts are a pipeline's"):
        apply_steps(target, [parse_step("dtype:parts=vae")])


def test_a_search_proposes_each_component_by_itself(pixart: Path) -> None:
    target = target_of(pixart)

    def parts(name: str) -> Sequence[tuple[str, ...]]:
        return [each.components for each in from_step(Step(name=name)).variants(target)]

    apart = [(), ("text_encoder",), ("transformer",), ("vae",)]
    assert parts("int8_dynamic") == apart
    assert list(dict.fromkeys(parts("dtype"))) == apart
    assert ("transformer",) in parts("compile")


def test_only_the_named_components_are_compiled(pixart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchwright.optimization.engines.compiled.packaging import build_packages
    from torchwright.optimization.engines.jit import Jit

    compiled: list[str] = []

    def fake(model: nn.Module, **options: Any) -> Any:
        def call(part: str, *args: Any, **kwargs: Any) -> Any:
            compiled.append(part)
            return model(part, *args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", fake)
    target = target_of(pixart, "compile:engine=jit,parts=transformer+vae")
    engine = Jit.prepare(target)
    with torch.inference_mode():
        for case in target.workload.cases(torch.float32):
            engine(case)
    assert set(compiled) == {"transformer", "vae"}
    with pytest.raises(RefusedTechnique, match="packages hold the whole model"):
        build_packages(target, Path("nowhere"))


def test_half_precision_finds_the_components_inside_of_a_wrapper(pixart: Path) -> None:
    original = target_of(pixart)
    found = errors(target_of(pixart, "channels_last", "dtype"), original)
    assert all(0 < error < 3e-2 for error in found.values())


def test_layers_kept_in_float32_are_given_it_inside_of_a_wrapper(pixart: Path) -> None:
    """The components have their plain names there, so that what they keep is found."""
    step = "dtype:keep_float32=transformer.adaln_single"
    apart = target_of(pixart, step)
    found = errors(target_of(pixart, "channels_last", step), apart)
    assert all(error < 2e-2 for error in found.values())  # sums in another order, in bfloat16


@pytest.mark.plain("others2")
@pytest.mark.parametrize("others", [(), ("dtype",), ("channels_last", "dtype")])
def test_a_pipeline_in_4_bits_still_reads_its_weights(pixart: Path, others: tuple[str, ...]) -> None:
    """A text encoder's feed-forward casts what it passes on to the type of the next layer's weight."""
    target = target_of(pixart, *others, "int4_weight_only:group_size=32")
    assert target.coverage[-1].changed > 0
    found = errors(target, target_of(pixart))
    # 4 bits lose about 8% of a layer of random weights, and a few layers follow one another.
    assert all(error < 0.5 for error in found.values()), found
    assert found["text_encoder"] > 0


def test_a_config_of_endless_layers_is_refused_before_it_is_built(pixart: Path, tmp_path: Path) -> None:
    from torchwright.models.diffusion.workload import DiffusionWorkload

    copy = Path(shutil.copytree(pixart, tmp_path / "pipeline"))
    file = copy / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 100_000}))
    with pytest.raises(
        ModelError, match=r"transformer/config\.json describes more layers.*num_layers = 100,000"
    ):
        DiffusionWorkload(copy, steps=2)
