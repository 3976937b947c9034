"""The trainable decoder of every family: logits and gradients against transformers, and its folders read back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import TOKENS, TRAINED, build, save, token_ids

from torchwright.core.errors import ModelError
from torchwright.models.decoder import load_decoder, read_decoder_config
from torchwright.train.model import (
    Transformer,
    check_shapes,
    explicit_attention,
    load_weights,
    save_folder,
)
from torchwright.train.model.loss import shift_labels
from torchwright.train.model.vocabulary import IGNORE

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=TRAINED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


def trainable(folder: Path) -> Transformer:
    model = Transformer(read_decoder_config(folder))
    load_weights(model, folder)
    return model


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCE)


def test_logits_and_gradients_are_those_of_transformers(pair: tuple[Any, Path]) -> None:
    theirs, folder = pair
    ours = trainable(folder)
    ids_BT = token_ids(2, TOKENS)
    labels_BT = shift_labels(ids_BT, torch.tensor([TOKENS, 11]))
    table = theirs.model.embed_tokens.weight.requires_grad_(True)
    theirs(torch.tensor([[1]]), use_cache=False)  # dynamic rotary embeddings forget the longest sequence
    wanted = theirs(ids_BT, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), labels_BT.flatten(), reduction="sum")
    gradient = torch.autograd.grad(loss, table)[0]
    table.requires_grad_(False)

    close(ours(ids_BT), wanted)
    for attention in (None, explicit_attention):
        if attention:
            ours.use_attention(attention)
        total, valid = ours.loss(ids_BT, labels_BT)
        assert valid == TOKENS - 1 + 10
        torch.testing.assert_close(total, loss, rtol=1e-5, atol=0)
        ours.zero_grad()
        total.backward()
        torch.testing.assert_close(ours.embedding.weight.grad, gradient, rtol=1e-3, atol=1e-3)
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_sizes_that_the_files_do_not_have_are_refused_before_memory_is_taken(
    mixtral: tuple[Any, Path], tmp_path: Path
) -> None:
    _, folder = mixtral
    with torch.device("meta"):
        check_shapes(Transformer(read_decoder_config(folder)), folder)
    wrong = Path(shutil.copytree(folder, tmp_path / "wrong"))
    config = json.loads((wrong / "config.json").read_text())
    tables = {key: 2**24 for key in config if key.startswith("vocab_size")}
    (wrong / "config.json").write_text(json.dumps({**config, **tables}))
    with torch.device("meta"):
        model = Transformer(read_decoder_config(wrong))
    with pytest.raises(ModelError, match=r"has another shape than config.json says"):
        check_shapes(model, wrong)


def test_a_saved_folder_is_read_back_exactly(pair: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = pair
    ours = trainable(folder)
    out = tmp_path / "out"
    save_folder(ours, ours.config, out, source=folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    ids_BT = token_ids(1, TOKENS)
    close(load_decoder(out).logits(ids_BT), ours(ids_BT).detach())


def test_a_tied_table_is_read_under_either_name_and_never_dropped(tmp_path: Path) -> None:
    folder = save(build("llama-tied-biases"), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": table}, file, metadata={"format": "pt"})
    assert torch.equal(trainable(folder).embedding.weight, table)
    both = {"model.embed_tokens.weight": table, "lm_head.weight": table.flip(0).contiguous()}
    save_file(tensors | both, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"ties the output layer.*the files hold two.*tie_word_embeddings"):
        trainable(folder)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build("mixtral")
    return model, save(model, tmp_path_factory.mktemp("mixtral"))


def test_transformers_reads_a_saved_folder_of_several_files(
    mixtral: tuple[Any, Path], tmp_path: Path
) -> None:
    theirs, folder = mixtral
    ours = trainable(folder)
    save_folder(ours, ours.config, tmp_path / "out", source=folder, shard_bytes=100_000)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert sum(name.endswith(".safetensors") for name in names) > 3
    assert "model.safetensors.index.json" in names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing is left beside it
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids_BT = token_ids(2, 8)
    with torch.no_grad():
        assert torch.equal(again(ids_BT).logits, theirs(ids_BT).logits)
    reread = trainable(tmp_path / "out")
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, reread.get_parameter(name)), name


def test_config_is_told_the_dtype_that_was_written(mixtral: tuple[Any, Path], tmp_path: Path) -> None:
    ours = trainable(mixtral[1]).bfloat16()
    save_folder(ours, ours.config, tmp_path / "out", source=mixtral[1])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_a_folder_that_holds_something_is_refused(mixtral: tuple[Any, Path]) -> None:
    ours = trainable(mixtral[1])
    before = sorted(mixtral[1].iterdir())
    with pytest.raises(ModelError, match="is not empty"):
        save_folder(ours, ours.config, mixtral[1])
    assert sorted(mixtral[1].iterdir()) == before


def test_a_process_that_is_late_does_not_refuse_what_the_first_one_wrote(
    mixtral: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two compiled processes with whole models one looked when the other's folder was there, and ended the run."""
    ours = trainable(mixtral[1])
    before = sorted(mixtral[1].iterdir())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    save_folder(ours, ours.config, mixtral[1])
    assert sorted(mixtral[1].iterdir()) == before


def test_random_weights_depend_on_the_seed_alone(mixtral: tuple[Any, Path]) -> None:
    config = read_decoder_config(mixtral[1])
    models = []
    for seed, device in ((3, "cpu"), (3, "meta"), (4, "cpu")):
        with torch.device(device):
            model = Transformer(config)
        model = model.to_empty(device="cpu")
        model.tie()
        model.reset_parameters(seed)
        models.append(dict(model.named_parameters()))
    first, again, other = models
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    down, gate = first["layers.0.mlp.experts.down"], first["layers.0.mlp.experts.gate"]
    assert float(gate.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(down.detach().std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert torch.equal(first["norm.weight"], torch.ones(64))


def test_labels_are_the_following_tokens_and_none_follows_the_last() -> None:
    ids_BT = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    assert shift_labels(ids_BT).tolist() == [[6, 7, 8, IGNORE], [6, 0, 0, IGNORE]]
    valid_B = torch.tensor([4, 2])
    assert shift_labels(ids_BT, valid_B).tolist() == [[6, 7, 8, IGNORE], [6, IGNORE, IGNORE, IGNORE]]
