"""The native decoder in the place of transformers' model, and its layers in fewer bits."""

from __future__ import annotations

import functools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import folders
from torchwright.core.errors import ArtifactError, ModelError, RefusedTechnique, UnknownName
from torchwright.core.records import Step
from torchwright.core.scheme import W4A8
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.native import NativeModel
from torchwright.models.decoder.packed import FORMS, TENSORS
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.sensitivity import rank_modules
from torchwright.optimization.techniques import techniques
from torchwright.optimization.techniques.base import from_step, parse_step
from torchwright.workloads.language import LanguageWorkload

PROMPT, NEW = 24, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = folders.causal("Qwen2", hidden_size=64, head_dim=16)
    return folders.save(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(folders.SENTENCES * 40))
    return path


def target_of(folder: Path, text: Path, *steps: str, batch: int = 2) -> Any:
    workload = LanguageWorkload(folder, batch=batch, prompt_tokens=PROMPT, new_tokens=NEW, eval_text=text)
    target = make_target(workload, get_device("cpu").identify())
    apply_steps(target, [parse_step(step) for step in steps])
    return target


def test_a_family_that_the_decoder_does_not_know_is_refused_in_words(tmp_path: Path, text: Path) -> None:
    config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    folder = folders.save(transformers.GPT2LMHeadModel(config), tmp_path / "gpt2")
    reason = from_step(Step(name="native")).refuse(target_of(folder, text))
    assert (
        reason == f"the native decoder does not know the model of {folder / 'config.json'}: GPT2LMHeadModel"
    )


def observe(target: Any) -> Any:
    with torch.inference_mode():
        return target.workload.observe(
            lambda case: target.model(*case.args, **case.kwargs), target.compute_dtype
        )


@functools.cache
def original(folder: Path, text: Path) -> tuple[LanguageWorkload, Any]:
    workload = LanguageWorkload(folder, batch=2, prompt_tokens=PROMPT, new_tokens=NEW, eval_text=text)
    model = workload.adapt(workload.build())
    with torch.inference_mode():
        return workload, workload.observe(lambda case: model(*case.args, **case.kwargs), torch.float32)


@pytest.mark.plain("steps1-0.02")
@pytest.mark.parametrize(
    ("steps", "allowed"),
    [
        (("native",), 0.01),
        (("native", "kv8"), 0.02),
        (("native", "w8a8"), 0.02),
        (("native", "w4a8:group_size=64"), 0.5),
        (("native", "w4a16", "kv8"), 0.5),
    ],
)
def test_prompt_and_decode_answer_as_the_original_does(
    folder: Path, text: Path, steps: tuple[str, ...], allowed: float
) -> None:
    """Perplexity over prompts with decode steps after each, which read what the prompt left in the cache."""
    workload, reference = original(folder, text)
    target = target_of(folder, text, *steps)
    quality = workload.compare(reference, observe(target))
    assert abs(quality.drop) < allowed
    assert target.settings.engine == "native"
    assert [c.technique for c in target.coverage] == [step.partition(":")[0] for step in sorted_steps(steps)]


def sorted_steps(steps: tuple[str, ...]) -> list[str]:
    return sorted(steps, key=lambda text: techniques.get(text.partition(":")[0]).phase)


def test_a_call_timed_by_itself_needs_no_call_before_it(folder: Path, text: Path) -> None:
    target = target_of(folder, text, "native")
    decode = target.workload.cases(torch.bfloat16)[1]
    with torch.inference_mode():
        logits = target.model(*decode.args)
        assert torch.equal(target.model(*decode.args), logits)
    assert logits.shape == (2, 1, folders.VOCABULARY)
    assert logits.isfinite().all()


def test_sensitive_layers_keep_more_bits(folder: Path, text: Path) -> None:
    target = target_of(folder, text, "native", "w4a8:skip=decoder.head+decoder.layers.0.mlp.down")
    schemes = {n: m.scheme.name for n, m in target.model.named_modules() if isinstance(m, PackedLinear)}
    assert {name for name, scheme in schemes.items() if scheme == "w8a8"} == {
        "decoder.head",
        "decoder.layers.0.mlp.down",
    }
    assert set(schemes.values()) == {"w8a8", "w4a8"}
    assert set(target.coverage[-1].skipped) == {"decoder.head", "decoder.layers.0.mlp.down"}


def test_layers_are_ranked_on_the_decoder_itself(folder: Path, text: Path) -> None:
    workload = LanguageWorkload(folder, batch=1, prompt_tokens=PROMPT, new_tokens=NEW, eval_text=text)
    target = make_target(workload, get_device("cpu").identify())
    ranking = rank_modules(target, (Step(name="native"), Step(name="w4a8")))
    assert len(ranking) == 2 * 4 + 1
    assert all(each.name.startswith("decoder.") and 0 < each.error < 0.5 for each in ranking)
    milder = from_step(Step(name="w4a8")).retreat((ranking[0].name,))
    assert milder is not None
    assert milder.step().options == {"skip": [ranking[0].name]}


def test_calibration_lowers_what_counts(folder: Path, text: Path) -> None:
    """The error of the outputs on calibration inputs, against rounding that weighs all inputs alike."""
    target = target_of(folder, text, "native")
    layers = {n: m for n, m in target.model.named_modules() if isinstance(m, PackedLinear)}
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            inputs[name] = args[0].float()

        return hook

    for name, layer in layers.items():
        layer.register_forward_pre_hook(keep(name))
    case = target.workload.calibration(torch.bfloat16)[0]
    with torch.inference_mode():
        target.model(*case.args)
    plain = weighed = 0.0
    for name, layer in layers.items():
        x, wide = inputs[name], layer.wide_weight()
        importance = x.square().mean(0)
        for weights in (None, importance):
            packed = PackedLinear(wide, None, W4A8, importance=weights)
            error = ((packed.wide_weight() - wide).square() * importance).sum().item()
            plain, weighed = (plain + error, weighed) if weights is None else (plain, weighed + error)
    assert weighed < plain


def test_what_was_packed_answers_the_same_after_saving(folder: Path, text: Path, tmp_path: Path) -> None:
    target = target_of(folder, text, "native", "w4a8", "kv8")
    before = observe(target)
    target.model.save(tmp_path)
    again = NativeModel.load(tmp_path, folder)
    target.model = again
    assert torch.equal(observe(target)["nll"], before["nll"])
    assert again.loaded.kv_dtype == torch.int8


@pytest.mark.plain("cut")
@pytest.mark.parametrize("damage", ["cut", "form", "missing", "shape", "kv"])
def test_a_damaged_decoder_is_refused_in_words(folder: Path, text: Path, tmp_path: Path, damage: str) -> None:
    target_of(folder, text, "native", "w8a8").model.save(tmp_path)
    described = json.loads((tmp_path / FORMS).read_text())
    if damage == "cut":
        data = (tmp_path / TENSORS).read_bytes()
        (tmp_path / TENSORS).write_bytes(data[: len(data) // 2])
    elif damage == "missing":
        (tmp_path / FORMS).unlink()
    else:
        if damage == "form":
            described["layers"]["head"]["scheme"] = "w4a8"
        elif damage == "shape":
            described["layers"]["head"]["out_features"] = 10**6
        else:
            described["kv"] = "int3"
        (tmp_path / FORMS).write_text(json.dumps(described))
    with pytest.raises(ArtifactError, match="cannot be read"):
        NativeModel.load(tmp_path, folder)


def test_an_unknown_architecture_falls_back_to_the_other_techniques(tmp_path: Path, text: Path) -> None:
    folder = folders.save(folders.causal("GPTNeoX", hidden_size=64, intermediate_size=64), tmp_path / "m")
    workload = LanguageWorkload(folder, batch=1, prompt_tokens=PROMPT, new_tokens=NEW, eval_text=text)
    target = make_target(workload, get_device("cpu").identify())
    reason = techniques.get("native")().refuse(target)
    assert reason is not None
    assert "GPTNeoX" in reason
    with pytest.raises(RefusedTechnique, match="GPTNeoX"):
        apply_steps(target, (Step(name="native"),))


def test_without_kernels_it_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torchwright.hardware.kernels.cpu.build.load_fault", lambda: "no C++ compiler was found"
    )
    assert techniques.get("native").available(get_device("cpu").identify()) == "no C++ compiler was found"


def test_the_originals_weights_are_gone_before_the_decoders_come(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once would be more than two originals take, which is what a search needs anyway."""
    target = target_of(folder, text)
    first, left = weakref.ref(next(target.model.parameters())), []

    def load(*arguments: Any, **options: Any) -> Any:
        left.append(first())
        return load_decoder(*arguments, **options)

    monkeypatch.setattr("torchwright.optimization.techniques.native.load_decoder", load)
    apply_steps(target, [parse_step("native")])
    assert left == [None]


@pytest.mark.slow
def test_a_prompt_beyond_longropes_trained_length_is_judged_as_it_is_answered(
    text: Path, tmp_path: Path
) -> None:
    """Trained on 16 positions: short factors beyond them would agree on a few percent of the tokens."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.5 + 0.5 * i for i in range(8)]}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors}
    model = folders.causal(
        "Phi3", hidden_size=64, rope_parameters=longrope, original_max_position_embeddings=16
    )
    folder = folders.save(model, tmp_path / "model")
    workload, reference = original(folder, text)
    quality = workload.compare(reference, observe(target_of(folder, text, "native")))
    assert quality.extras["top1_agreement"] > 0.95
    assert abs(quality.drop) < 0.01


def test_a_layer_to_skip_that_is_not_there_is_refused(folder: Path, text: Path) -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'decoder\.layers\.0\.mlp\.down'"):
        target_of(folder, text, "native", "w4a8:skip=decoder.layers.0.mlp.dwn")


@pytest.mark.plain("nan-w4a8")
@pytest.mark.parametrize("scheme", ["w4a8", "w4a16"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_not_packed(
    text: Path, tmp_path: Path, scheme: str, bad: float
) -> None:
    model = folders.causal("Qwen2", hidden_size=64, head_dim=16)
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = bad
    folder = folders.save(model, tmp_path / "model")
    with pytest.raises(ModelError, match=r"'decoder.layers.1.mlp.down'.*Found: 1 of its"):
        target_of(folder, text, "native", scheme)
    with pytest.raises(ModelError, match=r"'model.layers.1.mlp.down_proj.weight'.*Found: 1 of its"):
        load_decoder(folder, torch.bfloat16, quantize=scheme)
    load_decoder(folder, torch.bfloat16)
