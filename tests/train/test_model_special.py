"""Families with parts of their own against transformers: every gradient, rows of several documents, whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runs import assert_same, checkpoints, make_run, state
from safetensors.torch import load_file, save_file
from tiny import TOKENS, build, save, token_ids

from torchwright.core.errors import ModelError
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.folder import read_config
from torchwright.models.decoder import load_decoder, read_decoder_config
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.model import Transformer, explicit_attention, load_weights, save_folder
from torchwright.train.model.loss import shift_labels
from torchwright.train.model.weights import file_tensors
from torchwright.train.parallel import check_fits
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Experts
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.balancing import balanced

NAMES = ("gpt-oss", "gemma4", "gemma4-moe", "gemma4-one-size")
BEGINS = (0, 13, 27)
"""The positions at which a row's documents begin."""
DATA = {"train": ["a.npy", "b.npy"]}


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


def trainable(folder: Path) -> Transformer:
    model = Transformer(read_decoder_config(folder))
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("attention", [None, explicit_attention])
@pytest.mark.parametrize("begins", [BEGINS, (0,)], ids=["documents", "whole"])
def test_every_gradient_is_that_of_transformers(
    begins: tuple[int, ...], attention: Any, pair: tuple[Any, Path]
) -> None:
    """float32, 1e-4 of each tensor's largest: a row of documents is each of them alone."""
    theirs, folder = pair
    ids_BT = token_ids(2, TOKENS)
    documents = [ids_BT[:, begin:end] for begin, end in zip(begins, (*begins[1:], TOKENS), strict=True)]
    labels = [shift_labels(part) for part in documents]
    theirs.requires_grad_(True)
    logits = [theirs(part, use_cache=False).logits for part in documents]
    losses = [
        torch.nn.functional.cross_entropy(one.flatten(0, 1), other.flatten(), reduction="sum")
        for one, other in zip(logits, labels, strict=True)
    ]
    wanted = torch.stack(losses).sum()
    parameters = dict(theirs.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(wanted, list(parameters.values())), strict=True))
    theirs.requires_grad_(False)

    ours = trainable(folder)
    if attention is not None:
        ours.use_attention(attention)
    first_T = torch.tensor([max(begin for begin in begins if begin <= place) for place in range(TOKENS)])
    rows: tuple[Any, ...] = ()
    if len(begins) > 1:
        rows = (torch.arange(TOKENS) - first_T, first_T.expand(2, -1))
    torch.testing.assert_close(ours(ids_BT, *rows), torch.cat(logits, 1), rtol=0, atol=1e-4)
    total, _ = ours.loss(ids_BT, torch.cat(labels, 1), *rows)
    total.backward()
    seen = set()
    for tensor in file_tensors(ours.config):
        if tensor.name not in gradients:  # a buffer, which does not learn
            continue
        found = tensor.join([_gradient(ours.get_parameter(name)) for name in tensor.parameters])
        error = (found - gradients[tensor.name]).abs().max() / gradients[tensor.name].abs().max()
        assert error < 1e-4, f"{tensor.name}: {error}"
        seen.add(tensor.name)
    assert seen == set(gradients)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_transformers_reads_what_is_saved(pair: tuple[Any, Path], tmp_path: Path) -> None:
    theirs, folder = pair
    ours = trainable(folder)
    save_folder(ours, ours.config, tmp_path / "out", source=folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids_BT = token_ids(2, 8)
    with torch.no_grad():
        assert torch.equal(again(ids_BT).logits, theirs(ids_BT).logits)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 2, "merge": True}], ids=["whole", "lora"])
def test_a_run_resumes_bit_for_bit_and_is_served_as_it_was_trained(
    lora: dict[str, Any] | None, pair: tuple[Any, Path], tmp_path: Path
) -> None:
    folder = pair[1]
    changes: dict[str, Any] = {
        "model": {"folder": str(folder)},
        "data": DATA,
        "checkpoint": {"every_steps": 2},
    }
    changes |= {} if lora is None else {"lora": lora, "optimizer": {"lr": 0.05}}
    run = make_run(tmp_path / "whole", **changes)
    outcome = train(run, live=False)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    again = tmp_path / "again" / "run.toml"
    shutil.rmtree(checkpoints(again)[-1])
    shutil.rmtree(again.parent / "out" / "model")
    train(again, resume=True, live=False)
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(run)[-1]))

    assert outcome.model
    ids_BT = token_ids(1, TOKENS)
    with torch.no_grad():
        found = trainable(outcome.model)(ids_BT)
        assert (found - trainable(folder)(ids_BT)).abs().max() > 1e-3
        torch.testing.assert_close(load_decoder(outcome.model).logits(ids_BT), found, rtol=0, atol=1e-4)


def test_layouts_and_balances_that_gemma_does_not_have_are_refused_with_the_reason(tmp_path: Path) -> None:
    model = build("gemma4-moe", tie_word_embeddings=False)
    config = read_decoder_config(save(model, tmp_path))
    check_fits(config, Layout(dp_replicate=2, dp_shard=2, cp=2, ep=2))
    with pytest.raises(LayoutError, match=r"pp=2.*read inputs of their own.*residual stream alone"):
        check_fits(config, Layout(pp=2))
    with pytest.raises(LayoutError, match=r"tp=2.*multiples of 1"):
        check_fits(config, Layout(tp=2))
    with pytest.raises(RunError, match="has no place for them"):
        balanced(config, Experts(balance="bias"))
    assert balanced(config, Experts(balance=0.1)) is config


def test_experts_in_mxfp4_are_made_wide_and_other_integers_refused(tmp_path: Path) -> None:
    """gpt-oss is published in MXFP4 alone; what is written is float, and says so."""
    folder = save(build("gpt-oss", hidden_size=64, intermediate_size=32), tmp_path / "mxfp4")
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        X, K, N = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (X, N, K // 32, 16), generator=random).byte()
        tensors[f"{name}_scales"] = torch.randint(118, 124, (X, N, K // 32), generator=random).byte()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))

    ours = trainable(folder)
    checkpoint = Checkpoint(folder, read_config(folder))
    down = checkpoint.weight("model.layers.1.mlp.experts.down_proj", (4, 32, 64))
    found = ours.get_parameter("layers.1.mlp.experts.down").detach()
    torch.testing.assert_close(found, down.rows(0, 4).mT)
    ids_BT = token_ids(1, 12)
    wanted = load_decoder(folder, torch.float32, "none").logits(ids_BT)
    torch.testing.assert_close(ours(ids_BT).detach(), wanted, rtol=1e-4, atol=1e-4)
    save_folder(ours, ours.config, tmp_path / "out", source=folder)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    torch.testing.assert_close(trainable(tmp_path / "out")(ids_BT), ours(ids_BT), rtol=0, atol=0)

    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="training starts from float weights"):
        trainable(folder)
