"""Models that no family describes, by transformers' own code: full, adapted and sharded, resumed bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from runs import assert_same, checkpoints, losses, make_run, run_processes, state
from safetensors.torch import load_file

from torchwright.core.errors import ModelError, TorchwrightError
from torchwright.train.model.foreign import Foreign, build_foreign, linear_names
from torchwright.train.model.lora import add_adapters
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.run.loop.train import train

SMALL: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "phi": (
        "Phi",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        },
    ),
    "mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}
try:
    from transformers import GPT2LMHeadModel  # noqa: F401
except ImportError as error:
    pytestmark = pytest.mark.skip(reason=f"transformers cannot import its models here: {error}")


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a small random model."""
    name, config = CONFIGS[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**SMALL, **config)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


each = pytest.mark.parametrize("model", list(CONFIGS), indirect=True)
gpt2 = pytest.mark.parametrize("model", ["gpt2"], indirect=True)


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.plain("gpt2")
@each
def test_a_model_of_transformers_learns_and_resumes_bit_for_bit(tmp_path: Path, model: Path) -> None:
    data = {"train": ["a.npy"], "validation": ["held.npy"]}
    keep = {"every_steps": 2, "keep": 9}
    run = make_run(
        tmp_path / "whole",
        model={"folder": str(model)},
        data=data,
        evaluation={"every_steps": 1},
        checkpoint=keep,
    )
    outcome = train(run, live=False)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    again = tmp_path / "again" / "run.toml"
    for later in checkpoints(again)[1:]:
        shutil.rmtree(later)
    (tmp_path / "again" / "out" / "metrics.jsonl").unlink()
    train(again, live=False)
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(run)[-1]))
    assert losses(again) == {step: loss for step, loss in losses(run).items() if step > 2}
    # What is written is what was evaluated.
    assert outcome.model
    held = torch.from_numpy(np.load(tmp_path / "whole" / "held.npy").astype(np.int64))
    rows = held[: 32 * (len(held) // 32)].view(-1, 32)
    logits = loaded(outcome.model)(rows).logits[:, :-1].flatten(0, 1)
    nll = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
    assert nll.item() == pytest.approx(
        outcome.validation_loss, rel=0.03
    )  # windows that begin one token apart


@pytest.mark.plain("gpt2")
@each
def test_adapters_hang_on_linear_layers_and_are_merged(tmp_path: Path, model: Path) -> None:
    lora = {"r": 2, "merge": True, "dora": True}
    outcome = train(
        make_run(tmp_path, model={"folder": str(model)}, lora=lora, optimizer={"lr": 0.05}), live=False
    )
    assert outcome.adapter
    assert outcome.model
    config = json.loads((outcome.adapter / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] is ("GPT2" in type(loaded(model)).__name__)
    ids = torch.arange(40)[None] % 128
    before, after = loaded(model)(ids).logits, loaded(outcome.model)(ids).logits
    assert (before - after).abs().max() > 1e-3
    try:
        import peft
    except ImportError:
        return
    theirs = peft.PeftModel.from_pretrained(loaded(model), outcome.adapter).eval()
    torch.testing.assert_close(theirs(ids).logits, after, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", ["gpt2", "phi"], indirect=True)
def test_packed_documents_are_those_alone(model: Path) -> None:
    """Loss and every gradient of a row of three documents against one after the other, float64: 1e-10."""
    foreign = build_foreign(model, "cpu").double().eval()
    begins, tokens = [0, 9, 13], 24
    ids_BT = torch.randint(0, SMALL["vocab_size"], (1, tokens))
    ends = [*begins[1:], tokens]
    documents_BT = torch.cat(
        [torch.full((1, end - begin), begin) for begin, end in zip(begins, ends, strict=True)], 1
    )
    labels_BT = ids_BT.roll(-1, 1)
    labels_BT[:, [end - 1 for end in ends]] = IGNORE
    total, count = foreign.loss(ids_BT, labels_BT, torch.arange(tokens) - documents_BT, documents_BT)
    total.backward()
    found = {name: parameter.grad for name, parameter in foreign.named_parameters()}
    foreign.zero_grad()
    alone = [
        foreign.loss(ids_BT[:, begin:end], labels_BT[:, begin:end])[0]
        for begin, end in zip(begins, ends, strict=True)
    ]
    assert int(count) == tokens - 3
    torch.testing.assert_close(total, sum(alone, total.new_zeros(())), rtol=1e-10, atol=0)
    sum(alone, total.new_zeros(())).backward()
    for name, parameter in foreign.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-10, msg=name)


def test_one_mask_does_not_stand_for_layers_with_windows(tmp_path: Path) -> None:
    config = transformers.Starcoder2Config(
        **SMALL,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert not build_foreign(tmp_path, "cpu").apart


@each
def test_documents_are_packed_for_models_that_keep_them_apart(tmp_path: Path, model: Path) -> None:
    """Attention is masked; a state runs on from one document into the next, and that is said before a step is made."""
    run = make_run(
        tmp_path,
        model={"folder": str(model)},
        data={"train": ["docs.npy"], "packing": "documents"},
        precision="bf16",
        tokens=512,
    )
    ids = np.random.default_rng().integers(2, 128, 600)
    ids[::7] = 1
    np.save(tmp_path / "docs.npy", ids.astype(np.uint16))
    if "mamba" in (model / "config.json").read_text():
        with pytest.raises(ModelError, match="rows of one text each"):
            train(run, live=False)
    else:
        train(run, live=False)
        assert list(losses(run)) == [1, 2]


@gpt2
@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
@pytest.mark.parametrize("lora", [{}, {"lora": {"r": 2, "merge": True}}], ids=["full", "lora"])
def test_sharded_equals_one_process(
    tmp_path: Path, model: Path, layout: dict[str, int], lora: dict[str, Any]
) -> None:
    """Losses to 1e-5 and weights to 3e-5: float32 in another order. No dropout, whose draws are a process's own."""
    config = json.loads((model / "config.json").read_text())
    none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    (model / "config.json").write_text(json.dumps(config | none))
    alone, two = (
        make_run(tmp_path / name, model={"folder": str(model)}, **lora, **changes)
        for name, changes in (("one", {}), ("two", {"layout": layout}))
    )
    train(alone, live=False)
    for code, told in run_processes(two, world=2):
        assert code == 0, told
    assert list(losses(two).values()) == pytest.approx(list(losses(alone).values()), rel=1e-5)
    one, other = (load_file(run.parent / "out" / "model" / "model.safetensors") for run in (alone, two))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=3e-5, rtol=0, msg=name)


@gpt2
def test_what_it_does_not_do_is_said(tmp_path: Path, model: Path) -> None:
    folder = {"model": {"folder": str(model)}}
    for changes, words in (
        ({"compile": True}, "does not go with this `compile`"),
        ({"optimizer": {"name": "muon"}}, "`optimizer`.*any other"),
        ({"qat": {"scheme": "w8a8"}}, "`qat`"),
        ({"context": 128, "batch_tokens": 256}, "windows of 128 tokens.*max_position_embeddings = 64"),
        ({"lora": {"targets": ["c_atn"]}}, "did you mean 'c_attn'"),
        ({"lora": {"base": "nf4"}}, "Conv1D"),
    ):
        with pytest.raises(TorchwrightError, match=words):
            train(make_run(tmp_path, **folder, **changes), live=False)


@gpt2
def test_no_code_from_a_folder_is_run(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "stranger", "architectures": ["Stranger"]}
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="neither the decoder nor transformers"):
        train(make_run(tmp_path, model={"folder": str(model)}), live=False)
    assert not (tmp_path / "ran").exists()


def test_layers_are_found_with_their_adapters() -> None:
    """An adapter replaces the forward of a plain linear layer, and nothing was written of it."""
    config = transformers.OPTConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        ffn_dim=32,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
    )
    model = Foreign(transformers.OPTForCausalLM(config))
    names = list(linear_names(model))
    add_adapters(model, names, r=2, alpha=4.0, dropout=0.0, dora=False)
    assert len(names) == 6
    assert list(linear_names(model)) == names
