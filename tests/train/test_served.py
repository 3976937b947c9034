"""A run ends in what is served: quantized as it was trained, adapters added, named by its folder alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from runs import CONFIG, VOCABULARY, make_run
from safetensors.torch import load_file, save_file

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.adapter import CONFIG as ADAPTER_CONFIG
from torchwright.hub.adapter import WEIGHTS
from torchwright.hub.run_folder import ADAPTER, MODEL
from torchwright.hub.trained import FILE, trained_scheme
from torchwright.models.decoder import read_decoder_config
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.decoder.generation.generate import LoadedDecoder
from torchwright.models.decoder.load import load_decoder
from torchwright.optimization.open_model import open_model
from torchwright.serve.engine.process import Channel, ServedDecoder, open_served
from torchwright.serve.folder import find
from torchwright.serve.options import EngineOptions
from torchwright.serve.preflight import preflight
from torchwright.serve.wire.messages import SamplingOptions, Submit
from torchwright.train.model import Transformer, load_weights
from torchwright.train.run.config.run import Qat
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.qat import RECEIPT, fake_quantize

NEW = 24
DATA = {"train": ["a.npy", "b.npy"], "validation": ["held.npy"]}


def trained_quantized(folder: Path, steps: int) -> Path:
    """The run folder of quantization-aware training, with groups that are not the default."""
    qat = {"scheme": "w4a8", "group_size": 64, "receipt_tokens": 256}
    train(make_run(folder, tokens=steps * 256, qat=qat, data=DATA), live=False)
    return folder / "out"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_quantized(tmp_path_factory.mktemp("qat"), 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outcome = train(make_run(tmp_path_factory.mktemp("base"), tokens=512), live=False)
    assert outcome.model
    return outcome.model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """The run folder of adapters alone."""
    return adapted(tmp_path_factory.mktemp("lora"), base)


@pytest.fixture
def run(tmp_path: Path, trained: Path) -> Path:
    """A copy of it to spoil."""
    return shutil.copytree(trained, tmp_path / "out")


def adapted(folder: Path, base: Path, **lora: Any) -> Path:
    run = make_run(folder, model={"folder": str(base)}, lora={"r": 4, **lora}, tokens=8 * 256, data=DATA)
    train(run, live=False)
    return folder / "out"


def prompts() -> list[list[int]]:
    return torch.randint(2, VOCABULARY, (6, 5)).tolist()


@pytest.mark.slow  # sixty steps, after which first choices lead; `test_qat` compares logits after twelve
def test_greedy_tokens_are_those_of_the_trained_model(tmp_path: Path) -> None:
    """In float32, wherever the trained model's first choice leads by three times the receipt's largest difference."""
    quantized = trained_quantized(tmp_path, 60)
    config = read_decoder_config(quantized / MODEL)
    trained = Transformer(config)
    load_weights(trained, quantized / MODEL)
    fake_quantize(trained, Qat(scheme="w4a8", group_size=64))
    slack = 3 * json.loads((quantized / RECEIPT).read_text())["served"]["largest"]
    served = open_model(str(quantized), dtype="fp32").model
    compared = 0
    for prompt in prompts():
        (told,) = cast("LoadedDecoder", served).generate([prompt], max_new_tokens=NEW)
        with torch.no_grad():
            logits_TV = trained(torch.tensor([prompt + told]))[0, len(prompt) - 1 : -1].float()
        lead_T = logits_TV.topk(2).values.diff().abs()[:, 0]
        sure_T = lead_T > slack
        assert torch.equal(logits_TV.argmax(-1)[sure_T], torch.tensor(told)[sure_T])
        compared += int(sure_T.sum())
    assert compared > 0.8 * 6 * NEW


def test_the_server_rounds_as_the_run_did_without_being_told(quantized: Path) -> None:
    class Heard:
        def send(self, message: object) -> None: ...

    target = find(str(quantized))
    assert (target.name, target.folder) == ("out", quantized / MODEL)
    served = open_served(EngineOptions(model=str(quantized)), cast("Channel", Heard()))
    assert isinstance(served, ServedDecoder)
    packed = [part for part in served.engine.loaded.decoder.modules() if isinstance(part, PackedLinear)]
    assert packed
    assert {str(part.scheme) for part in packed} == {"w4a8:group_size=64"}
    assert any("for which it was trained" in notice for notice in served.ready.notices)
    said, asked = (
        preflight(target, EngineOptions(model=str(quantized), quantize=quantize))
        for quantize in (None, "w4a8:group_size=64")
    )
    assert said
    assert asked
    assert said.weight_bytes == asked.weight_bytes
    prompt = prompts()[0]
    greedy = SamplingOptions(temperature=0.0)
    served.engine.submit(Submit(id="a", ids=prompt, max_tokens=NEW, sampling=greedy))
    told = list[int]()
    while not served.engine.idle:
        told += [token for output in served.engine.step().outputs for token in output.tokens]
    served.engine.close()
    generated = cast("LoadedDecoder", open_model(str(quantized)).model).generate([prompt], max_new_tokens=NEW)
    assert told == generated[0]


def test_another_rounding_can_be_asked_for(quantized: Path) -> None:
    plain = cast("LoadedDecoder", open_model(str(quantized), quantize="none").model)
    kinds = {str(part.scheme) for part in plain.decoder.modules() if isinstance(part, PackedLinear)}
    assert kinds <= {"bf16"}


@pytest.mark.parametrize(
    "text", ['{"format": 2, "quantize": "w4a8"}', '{"format": 1, "quantize": "w9"}', '{"format": 1}', "[]"]
)
def test_words_that_name_no_rounding_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ModelError, match=FILE):
        trained_scheme(tmp_path)


@pytest.mark.slow
def test_other_training_does_not_inherit_the_rounding(tmp_path: Path, quantized: Path) -> None:
    out = adapted(tmp_path, quantized / MODEL, merge=True)
    assert not (out / MODEL / FILE).exists()


@pytest.mark.plain("False-False")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_an_adapter_on_its_model_is_the_merged_model(
    tmp_path: Path, base: Path, dora: bool, fused: bool
) -> None:
    """To 1e-6: where files keep q, k and v as one, the adapter is one of their ranks together."""
    if fused:
        config = CONFIG | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
        run = make_run(tmp_path / "base", model={"config": config}, tokens=512)
        base = cast("Path", train(run, live=False).model)
    out = adapted(tmp_path / "lora", base, dora=dora, merge=True)
    given = load_decoder(base, adapter=out / ADAPTER).decoder.state_dict()
    merged, plain = (load_decoder(folder).decoder.state_dict() for folder in (out, base))
    assert given.keys() == merged.keys()
    for name, value in given.items():
        torch.testing.assert_close(value, merged[name], atol=1e-6, rtol=0)
    assert any((given[name] - plain[name]).abs().max() > 1e-4 for name in given)
    if not dora:  # `serve --adapter NAME=DIR`: for single requests
        loaded, ids = load_decoder(base), torch.arange(40)[None]
        own = read_adapter(out / ADAPTER, loaded.decoder, base)
        found, wanted = loaded.logits(ids, adapter=own), load_decoder(out).logits(ids)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_dora_is_merged_where_other_adapters_stay_next_to_the_weights(tmp_path: Path, base: Path) -> None:
    """`generate --adapter` opens a model in this way."""
    adapter, ids = adapted(tmp_path, base, dora=True) / ADAPTER, torch.arange(40)[None]
    opened = open_model(str(base), dtype="fp32", adapter=str(adapter), merge=False)
    assert opened.adapter is None
    assert f"--adapter {adapter} is merged into the weights" in opened.notices[0]
    wanted = load_decoder(base, adapter=adapter).logits(ids)
    assert torch.equal(cast("LoadedDecoder", opened.model).logits(ids), wanted)


def test_settings_of_peft_are_read(run: Path, base: Path) -> None:
    """`use_rslora` divides by the root of the rank, and `alpha_pattern` names layers by the ends of their names."""
    described = run / ADAPTER / ADAPTER_CONFIG
    settings = json.loads(described.read_text())
    settings |= {"use_rslora": True, "alpha_pattern": {"0.self_attn.q_proj": 3.0}}
    described.write_text(json.dumps(settings))
    given, plain = load_decoder(base, adapter=run / ADAPTER), load_decoder(base)
    tensors = load_file(run / ADAPTER / WEIGHTS)
    for layer, alpha in ((0, 3.0), (1, 8.0)):
        a, b = (
            tensors[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{x}.weight"] for x in "AB"
        )
        new, old = (
            model.decoder.state_dict()[f"layers.{layer}.attention.qkv.weight"][:64]
            for model in (given, plain)
        )
        torch.testing.assert_close(new - old, alpha / 2 * b @ a, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora"),
    ],
)
def test_adapters_of_other_kinds_are_refused(tmp_path: Path, base: Path, changes: dict, match: str) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "lora_alpha": 8, **changes}
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file({f"{name}A.weight": torch.ones(2, 64), f"{name}B.weight": torch.ones(64, 2)}, adapter / WEIGHTS)
    with pytest.raises(ModelError, match=match):
        load_decoder(base, adapter=adapter)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "does not have"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "not read here"),
        ("base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight", "lack the tensor"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "does not fit"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(run: Path, base: Path, name: str, match: str) -> None:
    kept = {name: value for name, value in load_file(run / ADAPTER / WEIGHTS).items() if "o_proj" not in name}
    save_file(kept | {name: torch.ones(3, 64)}, run / ADAPTER / WEIGHTS)
    with pytest.raises(ModelError, match=match):
        load_decoder(base, adapter=run / ADAPTER)


def test_a_run_without_a_model_says_what_to_type(tmp_path: Path, run: Path, base: Path) -> None:
    with pytest.raises(ModelError, match=r"--adapter .*--merge"):
        find(str(run))
    shutil.rmtree(run / ADAPTER)
    with pytest.raises(ModelError, match="not reached its end"):
        open_model(str(run))
    with pytest.raises(ModelError, match=ADAPTER_CONFIG):
        load_decoder(base, adapter=tmp_path)


def test_an_artifact_takes_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(WorkloadError, match="--adapter"):
        open_model(str(tmp_path), adapter="somewhere")
