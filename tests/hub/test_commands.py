"""Quantized folders and GGUF files through the commands: generate, serve's figures, bench, optimize's own parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf_files as files
import pytest
import quantized as made
import torch
import transformers

from lora_files import write_adapter
from torchwright.cli import main
from torchwright.hardware.kernels import ops
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.decoder.packed import read_packed, write_packed
from torchwright.optimization import open_model
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.process import ServedDecoder, open_served
from torchwright.serve.folder import find
from torchwright.serve.offline.engine import Silent
from torchwright.serve.options import EngineOptions
from torchwright.serve.preflight import preflight
from torchwright.serve.wire.messages import SamplingOptions, Submit
from torchwright.workloads.detect import from_target

BUNDLED = Path(__file__).parents[2] / "src/torchwright/workloads/bundled"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))


def bundled() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


def vocabulary() -> dict[str, Any]:
    data = json.loads((BUNDLED / "tokenizer.json").read_text())
    tokens = data["model"]["vocab"]
    special = {token["content"] for token in data["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(tokens, key=tokens.get),
        "tokenizer.ggml.token_type": [
            3 if token in special else 1 for token in sorted(tokens, key=tokens.get)
        ],
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": files.U32(0),
        "tokenizer.ggml.eos_token_id": files.U32(1),
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "bundled.gguf"
    return files.model_file(path, bundled(), lambda name: "BF16", vocabulary())


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made.write(bundled(), tmp_path_factory.mktemp("awq"), *made.awq(128))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    return folder


def test_generate_says_which_way_it_went(gguf: Path, awq: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(target: Path | None) -> tuple[str, str]:
        words = ["generate", *([str(target)] if target else []), "--prompt", "Once upon a time"]
        assert main([*words, "--max-new-tokens", "12"]) == 0
        return capsys.readouterr()

    own, told = said(gguf)
    assert own == said(None)[0]  # the same weights and the same tokens
    assert "GGUF BF16: read as" in told
    text, told = said(awq)
    assert text
    became = "dequantized to float32" if ops.fault("cpu") else "repacked as w4bf16"
    assert f"torchwright: AWQ int4, group 128: {became}" in told


def test_requests_take_adapters_on_a_gguf_or_awq_base(gguf: Path, awq: Path, tmp_path: Path) -> None:
    folder = write_adapter(BUNDLED, tmp_path, r=8, std=0.05)
    ids = torch.arange(5, 65)[None]
    wanted, plain = load_decoder(BUNDLED, adapter=folder).logits(ids), load_decoder(BUNDLED).logits(ids)
    for base, off in ((gguf, 0.01), (awq, None)):
        loaded = load_decoder(base, torch.bfloat16)
        found = loaded.logits(ids, adapter=read_adapter(folder, loaded.decoder, loaded.folder))
        if off is None:  # what the rounded weights are off by without an adapter
            off = 1.2 * float((loaded.logits(ids) - plain).norm() / plain.norm())
        assert (
            float((found - wanted).norm() / wanted.norm())
            < off
            < float((plain - wanted).norm() / wanted.norm())
        )


def served(options: EngineOptions, prompt: str, count: int) -> str:
    """Return the text of the engine that `serve` starts, for a request that names its adapter."""
    found = open_served(options, Silent())
    assert isinstance(found, ServedDecoder)
    assert isinstance(found.engine, ServingEngine)
    loaded, tokens = found.engine.loaded, list[int]()
    greedy, [(name, _)] = SamplingOptions(temperature=0.0), options.adapters
    stops = list(loaded.stop)
    submit = Submit(
        id="a", ids=loaded.encode(prompt), max_tokens=count, sampling=greedy, stop_ids=stops, adapter=name
    )
    assert found.engine.submit(submit) is None
    while not found.engine.idle:
        for output in found.engine.step().outputs:
            tokens += output.tokens
    found.engine.close()
    return loaded.decode([token for token in tokens if token not in stops])


@pytest.mark.plain("gguf")
@pytest.mark.parametrize("base", ["gguf", "awq", "w4a8"])
def test_generate_adds_an_adapter_as_the_served_engine_does(
    base: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights stay quantized, and the tokens are the same."""
    adapter, prompt = write_adapter(BUNDLED, tmp_path, r=8, std=0.1), "Once upon a time"
    rounds = base == "w4a8"
    model, quantize = (BUNDLED, base) if rounds else (request.getfixturevalue(base), None)
    words = ["generate", str(model), "--prompt", prompt, "--max-new-tokens", "12", "--json"]
    words += ["--quantize", base] if rounds else []
    texts = []
    for more in ([], ["--adapter", str(adapter)]):
        assert main([*words, *more]) == 0
        said = capsys.readouterr()
        assert "merged" not in said.err
        texts.append(json.loads(said.out)["text"])
    named = (("mine", str(adapter)),)
    options = EngineOptions(model=str(model), quantize=quantize, adapters=named, kv_memory=2**24)
    assert texts[1] == served(options, prompt, 12) != texts[0]


def test_serve_finds_a_file_and_knows_its_size(gguf: Path, awq: Path) -> None:
    target = find(str(gguf))
    assert target.name == "bundled.gguf"
    assert (target.folder / "tokenizer.json").is_file()
    plain = preflight(find(None), EngineOptions(max_running=8))
    assert plain
    for path, low, high in ((gguf, 0.9, 1.5), (awq, 0.3, 0.8)):
        found = preflight(find(str(path)), EngineOptions(max_running=8))
        assert found
        assert low < found.weight_bytes / plain.weight_bytes < high
        assert found.token_bytes == plain.token_bytes


def test_optimize_starts_from_a_file(gguf: Path) -> None:
    workload: Any = from_target(str(gguf), prompt_tokens=16, new_tokens=4)
    assert {"config.json", "tokenizer.json", "model.gguf"} <= workload.files(weights=True).keys()
    assert "model.gguf" not in workload.files(weights=False)
    ids_BT = torch.randint(3, 4096, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = workload.build()(ids_BT).logits
        wanted = bundled()(ids_BT).logits
    torch.testing.assert_close(theirs, wanted, rtol=0, atol=1e-4)


def test_kept_integers_travel_in_an_artifact(awq: Path, tmp_path: Path) -> None:
    if ops.fault("cpu"):
        pytest.skip(f"no kernels: {ops.fault('cpu')}")
    model = load_decoder(awq, torch.bfloat16)
    (out := tmp_path / "out").mkdir()
    write_packed(model, out)
    ids_BT = torch.randint(3, 4096, (1, 16), generator=torch.Generator().manual_seed(1))
    assert torch.equal(read_packed(out, awq).logits(ids_BT), model.logits(ids_BT))


def test_an_opened_model_has_the_format_among_its_notices(awq: Path) -> None:
    assert any("AWQ" in notice for notice in open_model.open_model(str(awq), dtype="fp32").notices)
