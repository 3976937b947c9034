"""One answer at a time on transformers' own code: the tokens of whole passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from folders import VOCABULARY, build, causal, save
from torchwright.core.errors import ModelError, WorkloadError
from torchwright.hub.architectures import recognize, runs_on_transformers
from torchwright.models.decoder.transformers_backend.load import load_on_transformers
from torchwright.models.decoder.transformers_backend.writer import TransformersWriter
from torchwright.optimization.artifact.folder import RECIPE
from torchwright.optimization.continuation import ask
from torchwright.optimization.open_model import open_model
from torchwright.serve.folder import find

IDS = [1, 70, 71, 72, 73]
NEW = 12
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mamba() -> Any:
    return build(transformers.MambaConfig(**SMALL, state_size=8, pad_token_id=0), "AutoModelForCausalLM")


def rwkv() -> Any:
    return build(transformers.RwkvConfig(**SMALL, attention_hidden_size=32), "AutoModelForCausalLM")


def openai_gpt() -> Any:
    config = transformers.OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
    )
    return build(config, "AutoModelForCausalLM")


MODELS = {
    "GPT-2": lambda: causal("GPT2", num_key_value_heads=4),
    "Cohere 2, past its sliding window": lambda: causal("Cohere2", sliding_window=8),
    "Mamba, a state-space model": mamba,
    "RWKV, with a state": rwkv,
    "GPT, without a cache": openai_gpt,
    "XLNet, whose context is -1, without a cache": lambda: build(
        transformers.XLNetConfig(
            vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=48, eos_token_id=2
        ),
        "AutoModelForCausalLM",
    ),
    "BLOOM": lambda: causal("Bloom", n_head=4),
}


@pytest.mark.plain("BLOOM")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = save(MODELS[name](), tmp_path)
    assert runs_on_transformers(json.loads((folder / "config.json").read_text()))
    writer: Any = load_on_transformers(folder, torch.float32, batched=False).model
    ids, tokens = list(IDS), list[int]()
    for _ in range(NEW):  # one whole pass for each token
        tokens.append(int(writer(torch.tensor([ids]))[0, -1].argmax()))
        ids.append(tokens[-1])
    written: list[int] = []
    writer.write(list(IDS), NEW, seed=0, on_token=written.append)
    ends = next((place for place, token in enumerate(tokens) if token in writer.stop), NEW)
    assert written == tokens[:ends]
    assert writer.cached == ("without a cache" not in name)
    assert (writer.cache_bytes > 0) == writer.cached


def test_a_cache_with_other_logits_is_not_used(tmp_path: Path) -> None:
    model = causal("GPT2", num_key_value_heads=4)
    honest = model.forward

    def forgetful(
        input_ids: Any = None, cache: Any = None, use_cache: Any = None, logits_to_keep: int = 0
    ) -> Any:
        return honest(input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep)

    folder = save(model, tmp_path)
    model.forward = forgetful
    writer = TransformersWriter(model, folder, context=64, stop=[2])
    assert not writer.cached
    written: list[int] = []
    writer.write(list(IDS), 3, seed=0, on_token=written.append)
    assert written[0] == int(writer(torch.tensor([IDS]))[0, -1].argmax())


def test_sampling_repeats_by_its_seed_and_errors_are_named(tmp_path: Path) -> None:
    folder = save(mamba(), tmp_path)
    opened = open_model(str(folder))
    sampled = [
        ask(
            opened.model,
            "ab",
            max_new_tokens=8,
            seed=seed,
            sampling={"temperature": 2.0, "top_k": 20},
            on_text=print,
        ).text
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    with pytest.raises(WorkloadError, match=r"8192 tokens together"):
        ask(opened.model, "ab", max_new_tokens=9000, on_text=print)
    with pytest.raises(WorkloadError, match=r"--adapter a is not for .*"):
        open_model(str(folder), adapter="a")


def test_an_artifact_of_one_pass_points_to_the_folder(tmp_path: Path) -> None:
    workload = {"kind": "forward", "architecture": "MambaForCausalLM", "model": "runs/mamba", "layout": None}
    (tmp_path / RECIPE).write_text(json.dumps({"workload": workload}))
    with pytest.raises(ModelError, match=r"is not served.*name the model's folder instead: runs/mamba"):
        find(str(tmp_path))


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["SomethingForCausalLM"], "model_type": "something"}
    assert not runs_on_transformers(config)
    with pytest.raises(ModelError, match="does not know the model"):
        recognize(config, tmp_path)
