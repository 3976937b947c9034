"""Hybrids on the trainer's own layers: every gradient, packed documents, a run from folder to server, layouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from runs import assert_same, checkpoints, losses, make_run, state
from tiny import RECURRENT, TOKENS, build, save, token_ids

from torchwright.models.decoder import load_decoder, read_decoder_config
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.model import Transformer, load_weights
from torchwright.train.model.lora import add_adapters, merged
from torchwright.train.model.lora_files import decoder_targets
from torchwright.train.model.weights import file_tensors
from torchwright.train.parallel import check_fits
from torchwright.train.run.loop.train import train

PLAIN = ("lfm2", "qwen3-next", "granite-hybrid", "falcon-h1")


def trainable(folder: Path) -> Transformer:
    model = Transformer(read_decoder_config(folder))
    load_weights(model, folder)
    return model


@pytest.mark.plain(*PLAIN)
@pytest.mark.parametrize("name", RECURRENT)
def test_every_gradient_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """1e-4 of the largest of each tensor, or of 1, by the tensors' names in files."""
    theirs = build(name)
    ours = trainable(save(theirs, tmp_path))
    ids_BT = token_ids(2, TOKENS)
    weight = torch.randn(2, TOKENS, ours.config.vocabulary, generator=torch.Generator().manual_seed(2))
    theirs.requires_grad_(True)
    (theirs(ids_BT, use_cache=False).logits * weight).sum().backward()
    (ours(ids_BT) * weight).sum().backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    compared = 0
    for tensor in file_tensors(ours.config):
        if tensor.name not in wanted:  # stacked otherwise in files, or a bias that chooses experts
            continue
        gradients = [ours.get_parameter(part).grad for part in tensor.parameters]
        assert all(gradient is not None for gradient in gradients)
        found, target = tensor.join([g for g in gradients if g is not None]), wanted[tensor.name]
        # Of keys without positions a bias changes no softmax: its gradient is rounding alone.
        assert float((found - target).abs().max()) <= 1e-4 * max(1.0, float(target.abs().max())), tensor.name
        compared += 1
    assert compared >= 20


@pytest.mark.plain(*PLAIN)
@pytest.mark.parametrize("name", RECURRENT)
def test_packed_documents_are_those_alone(name: str, tmp_path: Path) -> None:
    """Neither convolutions nor states reach from one document into the next, in float64 to 1e-10."""
    model = trainable(save(build(name), tmp_path)).double()
    begins, tokens = [0, 1, 9, 30], 37
    ends, ids_BT = [*begins[1:], tokens], token_ids(1, tokens)
    documents_BT = torch.tensor([[max(b for b in begins if b <= t) for t in range(tokens)]])
    packed_BTV = model(ids_BT, torch.arange(tokens) - documents_BT, documents_BT)
    for begin, end in zip(begins, ends, strict=True):
        alone_BTV = model(ids_BT[:, begin:end])
        torch.testing.assert_close(packed_BTV[:, begin:end], alone_BTV, rtol=1e-10, atol=1e-10)


@pytest.mark.plain("granite-hybrid")
@pytest.mark.parametrize("name", ["lfm2", "lfm2-moe", "granite-hybrid", "falcon-h1", "qwen3.5", "qwen3-next"])
def test_a_run_moves_weights_resumes_bit_for_bit_and_is_served(name: str, tmp_path: Path) -> None:
    base = save(build(name), tmp_path / "base")
    run = make_run(
        tmp_path / "whole",
        model={"folder": str(base)},
        data={"train": ["a.npy"], "packing": "stream"},
        checkpoint={"every_steps": 2, "keep": 9},
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
    assert outcome.model
    served_and_reread(outcome.model)
    ids_BT = token_ids(1, TOKENS)
    before, after = (load_decoder(folder).logits(ids_BT) for folder in (base, outcome.model))
    assert (before - after).abs().max() > 1e-2


def served_and_reread(folder: Path) -> None:
    """The decoder that serves and transformers read a trained folder, with the trained model's logits."""
    ids_BT = token_ids(1, TOKENS)
    with torch.no_grad():
        wanted = trainable(folder)(ids_BT)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        torch.testing.assert_close(theirs(ids_BT).logits, wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(load_decoder(folder).logits(ids_BT), wanted, rtol=0, atol=1e-4)


@pytest.mark.plain("qwen3-next")
@pytest.mark.parametrize("name", ["lfm2-moe", "qwen3-next", "granite-hybrid", "falcon-h1"])
def test_adapters_are_trained_merged_and_served(name: str, tmp_path: Path) -> None:
    """Also from peft's files, whose rows lie as in the model's files."""
    base = save(build(name), tmp_path / "base")
    run = make_run(
        tmp_path / "run",
        model={"folder": str(base)},
        lora={"r": 2, "merge": True},
        optimizer={"lr": 0.02},
        tokens=3 * 256,
    )
    outcome = train(run, live=False)
    assert outcome.model
    assert outcome.adapter
    served_and_reread(outcome.model)
    ids_BT = token_ids(1, TOKENS)
    wanted = load_decoder(outcome.model).logits(ids_BT)
    assert (wanted - load_decoder(base).logits(ids_BT)).abs().max() > 1e-2
    found = load_decoder(base, adapter=outcome.adapter).logits(ids_BT)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_adapters_hang_on_every_projection_of_a_mixer(tmp_path: Path) -> None:
    model = trainable(save(build("qwen3-next"), tmp_path))
    targets = {target.leaf for target in decoder_targets(model.config)}
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"} <= targets
    modules = [module for target in decoder_targets(model.config) for module in target.modules]
    add_adapters(model, modules, r=2, alpha=4.0, dropout=0.0, dora=False)
    assert all(
        torch.is_tensor(merged(model)(name)) for name in ("layers.0.attention.delta.shift", "norm.weight")
    )


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("lfm2", {"cp": 2}, "cp divides tokens that a recurrence reads"),
        ("qwen3.5", {"tp": 4}, "2 key heads of the delta rule over tp=4"),
        ("granite-hybrid", {"tp": 4}, "2 groups of state-space heads with one key over tp=4"),
    ],
)
def test_layouts_that_do_not_divide_are_refused_with_the_reason(
    name: str, layout: dict[str, int], words: str, tmp_path: Path
) -> None:
    config = read_decoder_config(save(build(name), tmp_path))
    with pytest.raises(LayoutError, match="recurrent layers") as refused:
        check_fits(config, Layout(**layout))
    assert words in str(refused.value)
