"""GPTQ against nearest rounding: less error of the layer's output, and the same where features do not vary together."""

from __future__ import annotations

import pytest
import torch

from torchwright.core.scheme import GROUPS, W4A8
from torchwright.hardware.kernels import pack
from torchwright.hardware.kernels.gptq import gptq_w4
from torchwright.hardware.kernels.linear import PackedLinear


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, K: int) -> torch.Tensor:
    """Rows whose features share a few causes."""
    return randn(rows, 12, seed=1) @ randn(12, K, seed=2) + 0.2 * randn(rows, K, seed=3)


def wide(found: tuple[torch.Tensor, torch.Tensor, torch.Tensor], group: int) -> torch.Tensor:
    integers, multipliers, scale_N = (x.double() for x in found)
    return integers * multipliers.repeat_interleave(group, 1)[:, : integers.shape[1]] * scale_N[:, None]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("N", "K"), [(70, 256), (33, 200)])
def test_the_output_is_nearer(N: int, K: int, group: int) -> None:
    weight, x = randn(N, K), correlated(600, K)
    nearest = pack.quantize_w4(weight, group, x.square().mean(0))
    found = gptq_w4(weight, group, x.T @ x / len(x))
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in nearest]
    assert int(found[0].min()) >= -8
    assert int(found[0].max()) <= 7
    assert bool(((found[1].abs() >= 1) & (found[1].abs() <= 15)).all())
    unseen = correlated(600, K)
    error, floor = (
        (unseen.double() @ (wide(t, group) - weight.double()).T).square().sum() for t in (found, nearest)
    )
    assert error < 0.5 * floor


def test_without_correlation_it_is_nearest_rounding() -> None:
    """Nothing can be made up for; only ties of the search may fall to either side."""
    weight, importance = randn(20, 128), randn(128, seed=5).square() + 0.1
    found, nearest = gptq_w4(weight, 32, importance.diag()), pack.quantize_w4(weight, 32, importance)
    assert float((found[0] != nearest[0]).float().mean()) < 1e-3
    assert float((found[1] != nearest[1]).float().mean()) < 1e-2
    torch.testing.assert_close(found[2], nearest[2])


def test_features_that_were_never_seen_keep_their_weight() -> None:
    weight, x = randn(16, 64), correlated(300, 64)
    x[:, 5] = 0
    found = wide(gptq_w4(weight, 32, x.T @ x / len(x)), 32)
    assert bool(found.isfinite().all())
    assert float((found[:, 5] - weight[:, 5]).abs().max()) < 0.5


def test_a_layer_takes_the_products() -> None:
    weight, x = randn(70, 96), correlated(400, 96)
    moments = x.T @ x / len(x)
    layer = PackedLinear(weight, None, W4A8, importance=moments)
    torch.testing.assert_close(
        layer.wide_weight().double(), wide(gptq_w4(weight, 32, moments), 32), rtol=1e-6, atol=0
    )
