"""Chunked recurrences and short convolutions: outputs and gradients against the same token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchwright.hardware.kernels import recurrent as kernels
from torchwright.train.mixer_shape import CHUNK, SEGMENT
from torchwright.train.model.convolution import convolve
from torchwright.train.model.recurrence import recurrence

Parts = list[torch.Tensor]
KINDS = pytest.mark.parametrize("corrects", [False, True], ids=["state space", "delta rule"])


def drawn(B: int, T: int, *, G: int = 2, H: int = 4, M: int = 3, D: int = 5, seed: int = 0) -> Parts:
    """Queries, keys, values, logarithms of decays and gains in float64; some tokens forget almost everything."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    log_decay = -F.softplus(2 * normal(B, T, H)) - 20.0 * (normal(B, T, H) > 2)
    parts = [normal(B, T, G, M), normal(B, T, G, M), normal(B, T, H, D), log_decay, normal(B, T, H).sigmoid()]
    return [part.requires_grad_() for part in parts]


def token_by_token(parts: Parts, documents: torch.Tensor | None, *, corrects: bool) -> torch.Tensor:
    """The definition, differentiable: the state of every head after every token."""
    q, k, v, log_decay, gain = parts
    if corrects:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + kernels.KEY_EPS) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
    each = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(each, 2) for x in (q, k))
    state, outs = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[1]):
        if documents is not None:
            state = state * (documents[:, t] < t)[:, None, None, None]
        state = state * log_decay[:, t].exp()[..., None, None]
        change = v[:, t]
        if corrects:
            change = change - (state * k[:, t, ..., None]).sum(2)
        state = state + k[:, t, ..., None] * (gain[:, t, :, None] * change)[:, :, None]
        outs.append((state * q[:, t, ..., None]).sum(2))
    return torch.stack(outs, 1)


def packed(B: int, T: int) -> torch.Tensor:
    """Documents of other lengths in each row: of one token, over chunks' borders, and begun at one."""
    rows = []
    for row in range(B):
        begins = sorted({0, 1, 3 + row, T // 2, 8 * (T // 16), T - 1 - row} & set(range(T)))
        rows.append(torch.tensor([max(b for b in begins if b <= t) for t in range(T)]))
    return torch.stack(rows)


def assert_same(
    parts: Parts,
    documents: torch.Tensor | None,
    *,
    corrects: bool,
    chunk: int = CHUNK,
    segment: int = SEGMENT,
) -> None:
    found = recurrence(*parts, documents_BT=documents, corrects=corrects, chunk=chunk, segment=segment)
    wanted = token_by_token(parts, documents, corrects=corrects)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    weight = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((out * weight).sum(), parts) for out in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@KINDS
@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 8, 9, 16, 37])
def test_chunks_compute_what_tokens_one_by_one_do(tokens: int, documents: bool, corrects: bool) -> None:
    """Chunks of 4 in segments of 8: within one, over borders, and at them."""
    reach = packed(2, tokens) if documents else None
    assert_same(drawn(2, tokens), reach, corrects=corrects, chunk=4, segment=8)


@KINDS
def test_real_sizes_of_chunks_and_segments(corrects: bool) -> None:
    assert_same(drawn(1, SEGMENT + CHUNK + 5, G=1, H=2), None, corrects=corrects)


@KINDS
def test_gradients_are_those_of_finite_differences(corrects: bool) -> None:
    documents = torch.tensor([[0, 0, 2, 2, 2, 5]])
    parts = drawn(1, 6, G=1, H=2, M=2, D=2)
    assert torch.autograd.gradcheck(
        lambda *given: recurrence(*given, documents_BT=documents, corrects=corrects, chunk=2, segment=4),
        parts,
    )


@KINDS
def test_the_kernels_of_the_decoder_compute_the_same(corrects: bool) -> None:
    q, k, v, log_decay, gain = (part.detach()[0] for part in drawn(1, 70))
    heads, starts, none = (
        v.shape[1],
        torch.tensor([0, 70], dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
    )
    state = torch.zeros(1, heads, 3, 5)
    rows = (starts, torch.zeros(1, dtype=torch.int64), none, none)
    wanted = kernels._recur(  # pyright: ignore[reportPrivateUsage]
        *((kernels._unit(q) * 3**-0.5, kernels._unit(k)) if corrects else (q, k)),  # pyright: ignore[reportPrivateUsage]
        v.flatten(1),
        log_decay.exp(),
        gain,
        state,
        rows,
        corrects=corrects,
    )
    found = recurrence(*(part[None] for part in (q, k, v, log_decay, gain)), corrects=corrects)
    torch.testing.assert_close(found[0].flatten(1), wanted, rtol=1e-9, atol=1e-10)


@KINDS
def test_nothing_is_kept_but_inputs_and_states_at_segments(corrects: bool) -> None:
    T, H, M, D = 3 * SEGMENT, 2, 16, 16
    parts = [part.detach().float().requires_grad_() for part in drawn(1, T, G=1, H=H, M=M, D=D)]
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        recurrence(*parts, corrects=corrects)
    assert sum(kept.values()) == sum(part.nbytes for part in parts) + 4 * 3 * H * M * D


@KINDS
def test_bfloat16_rounds_what_goes_in_and_out_alone(corrects: bool) -> None:
    """States and decays are float32, under autocast too."""
    wide = [part.detach().float() for part in drawn(1, 90)]
    narrow = [part.bfloat16() for part in wide[:3]] + wide[3:]
    exact = recurrence(*(part.float() for part in narrow), corrects=corrects)
    with torch.autocast("cpu", torch.bfloat16):
        found = recurrence(*narrow, corrects=corrects)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("bias", [False, True])
def test_taps_are_a_convolution_of_each_channel(bias: bool) -> None:
    x, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 11, 3), (3, 4)))
    offset = torch.randn(3, dtype=torch.float64) if bias else None
    wanted = F.conv1d(x.mT, weight[:, None], offset, padding=3, groups=3)[..., :11].mT
    torch.testing.assert_close(convolve(x, weight, offset, None), wanted)
    documents = torch.tensor([0, 0, 0, 3, 4, 4, 4, 4, 4, 9, 9]).expand(2, -1)
    found = convolve(x, weight, offset, documents)
    for first, last in ((0, 3), (3, 4), (4, 9), (9, 11)):
        torch.testing.assert_close(found[:, first:last], convolve(x[:, first:last], weight, offset, None))


@pytest.mark.slow
@KINDS
def test_a_compiled_layer_goes_around_it(corrects: bool) -> None:
    """The eager back end of the compiler: what is asked of it is that the layer can be traced at all."""
    parts = drawn(1, 9)

    def around(*given: Any) -> torch.Tensor:
        return recurrence(*(2 * part for part in given), corrects=corrects) + 1

    found = torch.compile(around, backend="aot_eager", dynamic=False)(*parts)
    torch.testing.assert_close(found, around(*parts))
    gradients = [torch.autograd.grad(out.sum(), parts) for out in (found, around(*parts))]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
