"""What runs on a card, on one that is not there: every tensor is brought to the model's device and fetched from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import folders
import torchwright as tw
from in_process import trials_in_process
from simulated_card import FACTS, OnCard, simulated_card
from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.core.records import Budget
from torchwright.hardware.devices import get_device
from torchwright.models.decoder.native import NativeModel
from torchwright.optimization import api, open_model
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.optimize import Request, optimize
from torchwright.optimization.techniques.base import parse_step
from torchwright.workloads.base import Workload
from torchwright.workloads.encoder import EncoderWorkload
from torchwright.workloads.image import ImageWorkload
from torchwright.workloads.language import LanguageWorkload

PROMPT, NEW = 16, 4


@pytest.fixture
def card() -> Iterator[None]:
    with simulated_card():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = folders.causal("Qwen2", hidden_size=64, head_dim=16)
    return folders.save(model, tmp_path_factory.mktemp("model"))


def sentences(folder: Path) -> Workload:
    text = folders.eval_text(folder / "text.txt")
    model = folders.save(folders.encoder(), folder)
    return EncoderWorkload(model, batch=8, tokens=50, eval_text=text)


def pictures(folder: Path) -> Workload:
    workload = ImageWorkload(folders.save(folders.image("ViT"), folder, tokenizer=False), batch=8)
    return workload.judged_by(range(4))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return folders.eval_text(tmp_path / "text.txt")


def observe(workload: Workload, device: str, *steps: str) -> tuple[Any, Any]:
    """The workload's model on `device` with these steps, and what its metric sees of it."""
    facts = FACTS if device == "cuda" else get_device("cpu").identify()
    target = make_target(workload, facts)
    apply_steps(target, [parse_step(step) for step in steps])
    model = target.model if steps else workload.adapt(target.model)
    with torch.no_grad():
        return target, workload.observe(lambda case: model(*case.args, **case.kwargs), target.compute_dtype)


def language(folder: Path, text: Path) -> LanguageWorkload:
    return LanguageWorkload(folder, batch=2, prompt_tokens=PROMPT, new_tokens=NEW, eval_text=text)


def test_it_refuses_what_a_card_refuses(card: None) -> None:
    layer = nn.Linear(4, 2).requires_grad_(False).to("cuda")
    assert layer.weight.is_cuda
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="same device"):
        layer(x)
    with pytest.raises(RuntimeError, match="numpy"):
        x.to("cuda").numpy()
    y = layer(x.to("cuda"))
    assert isinstance(y, OnCard)
    assert not y.cpu().is_cuda


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge a language model by few tokens, which are slow here."""
    for name, value in (("MAX_TOKENS", 64), ("DECODE_STEPS", 2)):
        monkeypatch.setattr(f"torchwright.workloads.language.{name}", value)


@pytest.mark.plain("steps0", "steps3")
@pytest.mark.parametrize("steps", [(), ("dtype",), ("native",), ("native", "w4a8", "kv8")])
def test_language(folder: Path, text: Path, steps: tuple[str, ...], few_tokens: None) -> None:
    workload = language(folder, text)
    _, wanted = observe(workload, "cpu")
    with simulated_card():
        target, found = observe(workload, "cuda", *steps)
        assert all(tensor.is_cuda for tensor in target.model.state_dict().values())
    assert workload.compare(wanted, found).drop_high < (0.5 if "w4a8" in steps else 0.02)


@pytest.mark.plain("sentences")
@pytest.mark.parametrize("make", [sentences, pictures])
def test_rows(make: Any, tmp_path: Path) -> None:
    workload = make(tmp_path)
    _, wanted = observe(workload, "cpu")
    with simulated_card():
        _, found = observe(workload, "cuda", "dtype")
    assert not found.is_cuda
    assert workload.compare(wanted, found).drop < 0.05


@pytest.mark.slow
def test_a_packed_decoder_is_kept_for_the_card(folder: Path, text: Path, tmp_path: Path) -> None:
    with simulated_card():
        target = make_target(language(folder, text), FACTS)
        apply_steps(target, [parse_step("native"), parse_step("w8a8")])
        model: Any = target.model
        wanted = model.loaded.generate([[3, 4, 5]], max_new_tokens=6, stop=[])
        model.save(tmp_path)
        again = NativeModel.load(tmp_path, folder, "cuda")
        assert all(tensor.is_cuda for tensor in again.state_dict().values())
        assert again.loaded.generate([[3, 4, 5]], max_new_tokens=6, stop=[]) == wanted
    with pytest.raises(ArtifactError, match="packed for a GPU, not for cpu"):
        NativeModel.load(tmp_path, folder, "cpu")


@pytest.mark.slow
def test_optimize_takes_and_gives_tensors_of_the_caller(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model and its inputs lie on the CPU, and so do those that the metric asks with."""
    trials_in_process(monkeypatch, 2.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    wanted = model(x)

    def closeness(candidate: nn.Module) -> float:
        return 1 - ((candidate(x) - wanted).norm() / wanted.norm()).item()

    result = tw.optimize(model, (x,), metric=closeness, max_drop=0.05, device="cuda", techniques=["dtype"])
    assert [rung.step.name for rung in result.steps if rung.kept] == ["dtype"]
    found = result.model(x)
    assert not found.is_cuda
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)
    assert result.model(x.to("cuda")).is_cuda
    assert not next(model.parameters()).is_cuda


@pytest.mark.slow
def test_generate_and_bench_run_where_they_are_told(card: None, folder: Path) -> None:
    opened = open_model.open_model(str(folder), quantize="w8a8", device="cuda")
    assert opened.model.device.type == "cuda"
    assert opened.notices == ()
    assert open_model.open_model(str(folder)).model.device.type == "cuda"
    assert open_model.open_model(str(folder), device="cpu").model.device.type == "cpu"
    found = api.bench(str(folder), quantize="w8a8", device="cuda", prompt_tokens=4, new_tokens=2, batch=1)
    assert (found["kernels"], found["peak_memory_bytes"]) == ("Triton", 1 << 30)


@pytest.mark.slow
def test_a_language_model_is_optimized_kept_and_loaded(
    folder: Path, text: Path, tmp_path: Path, few_tokens: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials_in_process(monkeypatch, 2.0, tried=("native", "w8a8"))
    with simulated_card():
        budget = Budget(max_drop=0.5, objective="latency", time_seconds=250.0)
        request = Request(workload=language(folder, text), budget=budget, device="cuda")
        recipe = optimize(request, tmp_path / "out", lambda event: None)
        assert [rung.step.name for rung in recipe.rungs if rung.kept] == ["native", "w8a8"]
        loaded = tw.load(tmp_path / "out")
        assert (loaded.how, loaded.model.device.type) == ("native decoder", "cuda")
        assert len(loaded.model.generate([[3, 4, 5]], max_new_tokens=3, stop=[])[0]) == 3
    with pytest.raises(TorchwrightError, match="the device 'cuda' was asked for, but it cannot be used here"):
        tw.load(tmp_path / "out")
