"""Balancing of experts: a loss whose gradient is the formula's, a bias that only chooses, the same in every layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, MIXTURE, assert_same, checkpoints, losses, make_run, run_processes, state
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

from torchwright.core.errors import TorchwrightError
from torchwright.models.decoder import load_decoder, read_decoder_config
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import decoder_config
from torchwright.train.layout import Layout
from torchwright.train.model import Transformer, load_weights
from torchwright.train.model.balance import BalancingLoss, Load
from torchwright.train.model.blocks import MixtureOfExperts
from torchwright.train.parallel import make_mesh
from torchwright.train.run.config.run import Experts
from torchwright.train.run.loop.train import train
from torchwright.train.run.objectives.balancing import Balancing, balanced
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.processes import processes

CONFIG_OF_EXPERTS = CONFIG | MIXTURE
BIAS = {"balance": "bias", "bias_rate": 0.02}


def shape(*, biased: bool = False) -> DecoderConfig:
    config = decoder_config(CONFIG_OF_EXPERTS, "the test")
    return balanced(config, Experts(balance="bias")) if biased else config


def make_mixture(config: DecoderConfig) -> MixtureOfExperts:
    assert config.experts is not None
    mixture = MixtureOfExperts(config, config.experts).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return mixture


def test_the_gradient_is_that_of_the_formula_written_out() -> None:
    config = shape()
    assert config.experts is not None
    mixture = make_mixture(config)
    x_BTE = torch.randn(2, 7, config.model, dtype=torch.float64)
    factor, micro_batches = 0.3, 2

    out_BTE = mixture(x_BTE)
    share_TX = mixture.router(x_BTE.flatten(0, 1)).softmax(-1)
    chosen = share_TX.topk(config.experts.chosen).indices.flatten()
    f_X = torch.stack([(chosen == x).double().mean() for x in range(config.experts.count)])
    auxiliary = factor * config.experts.count * (f_X * share_TX.mean(0)).sum() / micro_batches
    (out_BTE.square().sum() + auxiliary).backward()
    wanted = {name: p.grad for name, p in mixture.named_parameters()}

    mixture.zero_grad()
    mixture.observers.append(BalancingLoss(factor, micro_batches, []))
    even = mixture(x_BTE)
    torch.testing.assert_close(even, out_BTE)
    even.square().sum().backward()
    for name, parameter in mixture.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-10, atol=1e-12, msg=name)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """Against each token by itself: the experts of the largest share plus bias, weighted by their shares alone."""
    config = shape(biased=True)
    assert config.experts is not None
    mixture = make_mixture(config)
    assert mixture.bias is not None
    mixture.bias.normal_()
    x_TE = torch.randn(9, config.model, dtype=torch.float64)
    share_TX = mixture.router(x_TE).softmax(-1)
    for x_E, share_X, out_E in zip(x_TE, share_TX, mixture(x_TE), strict=True):
        chosen = (share_X + mixture.bias).topk(config.experts.chosen).indices
        parts = []
        for expert in chosen.tolist():
            experts = mixture.experts
            hidden_F = torch.nn.functional.silu(experts.gate[expert] @ x_E) * (experts.up[expert] @ x_E)
            parts.append(share_X[expert] / share_X[chosen].sum() * (experts.down[expert] @ hidden_F))
        torch.testing.assert_close(out_E, torch.stack(parts).sum(0), rtol=1e-10, atol=1e-12)


def test_choices_are_counted_once_a_backward_pass() -> None:
    """Also where the forward pass is computed again, and not where there is no backward pass."""
    config = shape()
    assert config.experts is not None
    mixture = make_mixture(config)
    load = Load(config.experts.count, "cpu")
    mixture.observers.append(load)
    x_BTE = torch.randn(2, 7, config.model, dtype=torch.float64, requires_grad=True)
    mixture(x_BTE)
    assert load.counts_X.sum() == 0
    wanted = mixture.router(x_BTE).topk(config.experts.chosen).indices.flatten().bincount(minlength=4)
    for times in (1, 2):
        again: Any = checkpoint(mixture, x_BTE, use_reentrant=False)
        again.sum().backward()
        assert torch.equal(load.counts_X, times * wanted)


def test_biases_even_out_a_router_that_prefers_one_expert() -> None:
    """Every step draws other tokens; each expert is preferred by as much as three deviations of a token's scores."""
    config = shape(biased=True)
    assert config.experts is not None
    model = Transformer(replace(config, layers=1)).double()
    model.reset_parameters(0)
    (layer,) = model.layers
    mixture, count = layer.mlp, config.experts.count
    assert isinstance(mixture, MixtureOfExperts)
    with processes(60.0):
        mesh = make_mesh(Layout(), "cpu")
        balancing = Balancing(model, Experts(balance="bias", bias_rate=0.01), 1, mesh, "cpu")
    torch.nn.init.normal_(mixture.router.weight, std=config.model**-0.5)
    preferred_TX = torch.linspace(-1.5, 1.5, count)

    def prefer(_router: Any, _inputs: Any, score_TX: torch.Tensor) -> torch.Tensor:
        return score_TX + preferred_TX

    mixture.router.register_forward_hook(prefer)

    def load() -> float:
        mixture(torch.randn(1, 512, config.model, dtype=torch.float64)).sum().backward()
        return balancing.measure()["expert_load"]

    before = load()
    for _ in range(100):
        load()
        balancing.update()
    assert before > 1.6
    assert sum(load() for _ in range(10)) / 10 < 1.4


@pytest.mark.slow
@pytest.mark.parametrize("experts", [{"balance": 1.0}, BIAS], ids=["loss", "bias"])
def test_processes_count_together_what_one_counts(tmp_path: Path, experts: dict[str, Any]) -> None:
    """Expert parallelism over two processes against one, with a coefficient large enough to decide the gradient."""
    changes: dict[str, Any] = {
        "model": {"config": CONFIG_OF_EXPERTS},
        "micro_batches": 1,
        "experts": experts,
        "optimizer": {"lr": 3e-3, "eps": 1e-4},
    }
    alone = make_run(tmp_path / "alone", **changes)
    train(alone, live=False)
    two = make_run(tmp_path / "two", **changes, layout={"dp_shard": 2, "ep": 2})
    for code, told in run_processes(two, world=2):
        assert code == 0, told
    wanted = losses(alone)
    assert losses(two) == pytest.approx(wanted, rel=1e-5)
    ours, theirs = (load_file(run.parent / "out" / "model" / "model.safetensors") for run in (alone, two))
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, atol=3e-5, rtol=0, msg=name)
    plain = make_run(tmp_path / "plain", **(changes | {"experts": {"balance": 1e-9}}))
    train(plain, live=False)
    assert losses(plain) != pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_a_run_with_biases_resumes_bit_for_bit_and_is_served_as_it_was_trained(tmp_path: Path) -> None:
    # After an odd number of steps a bias cannot have gone as often up as down.
    changes: dict[str, Any] = {"model": {"config": CONFIG_OF_EXPERTS}, "experts": BIAS, "tokens": 7 * 256}
    whole = make_run(tmp_path / "whole", **changes)
    train(whole, live=False)
    shutil.copytree(whole.parent, tmp_path / "again")
    again = tmp_path / "again" / "run.toml"
    shutil.rmtree(checkpoints(again)[-1])
    shutil.rmtree(again.parent / "out" / "model")
    train(again, resume=True, live=False)
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(whole)[-1]))
    biases = {
        name: value for name, value in state(checkpoints(whole)[-1]).items() if name.endswith("mlp.bias")
    }
    assert len(biases) == 2
    assert all(bias.any() for bias in biases.values())

    folder = whole.parent / "out" / "model"
    assert json.loads((folder / "config.json").read_text())["topk_method"] == "noaux_tc"
    model = Transformer(read_decoder_config(folder))
    load_weights(model, folder)
    # Larger ones, so that it would be seen if they had no say.
    for layer in model.layers:
        layer.mlp.bias.mul_(20)  # type: ignore[union-attr]
    weights = load_file(folder / "model.safetensors")
    weights |= {name: 20 * value for name, value in weights.items() if name.endswith("correction_bias")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(0, CONFIG["vocab_size"], (1, 24))
    with torch.no_grad():
        torch.testing.assert_close(load_decoder(folder).logits(ids), model(ids), rtol=0, atol=1e-4)


def test_loads_are_told_of_every_layer(tmp_path: Path) -> None:
    run = make_run(tmp_path, model={"config": CONFIG_OF_EXPERTS}, tokens=512)
    train(run, live=False)
    for figures in read_figures(tmp_path / "out").values():
        layers = [figures["expert_load/0"], figures["expert_load/1"]]
        assert figures["expert_load"] == max(layers)
        assert all(
            1 <= load <= 2 for load in layers
        )  # two of four experts a token: half of them twice the mean


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts": {"balance": 0.01}}, "the model has none"),
        ({"experts": {"balance": 0.01, "bias_rate": 0.1}}, "bias_rate is for experts.balance 'bias'"),
        ({"experts": {"balance": "even"}}, "experts.balance"),
        (
            {"experts": {"balance": "bias"}, "lora": {}, "model": {"folder": "x"}},
            "does not go with \\[lora\\]",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = make_run(tmp_path, **changes)
    with pytest.raises(TorchwrightError, match=said):
        train(path, live=False)
