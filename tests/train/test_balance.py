"""The balancing loss of experts: its gradient against the formula, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, MIXTURE, losses, make_run, run_processes
from safetensors.torch import load_file

from torchwright.decoder.families import decoder_config
from torchwright.errors import TorchwrightError
from torchwright.train.model.balance import BalancingLoss
from torchwright.train.model.blocks import MixtureOfExperts
from torchwright.train.run.loop import train

CONFIG_OF_EXPERTS = CONFIG | MIXTURE


def test_the_gradient_is_that_of_the_formula_written_out() -> None:
    config = decoder_config(CONFIG_OF_EXPERTS, "the test")
    assert config.experts is not None
    mixture = MixtureOfExperts(config, config.experts).double()
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
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
    mixture.balance = BalancingLoss(factor, micro_batches, [])
    balanced = mixture(x_BTE)
    torch.testing.assert_close(balanced, out_BTE)
    balanced.square().sum().backward()
    for name, parameter in mixture.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
def test_processes_count_together_what_one_counts(tmp_path: Path) -> None:
    """Expert parallelism over two processes against one, with a coefficient large enough to decide the gradient."""
    changes: dict[str, Any] = {
        "model": {"config": CONFIG_OF_EXPERTS},
        "micro_batches": 1,
        "experts": {"balance": 1.0},
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


def test_a_dense_model_has_nothing_to_balance(tmp_path: Path) -> None:
    with pytest.raises(TorchwrightError, match="the model has none"):
        train(make_run(tmp_path, experts={"balance": 0.01}), live=False)
