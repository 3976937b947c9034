"""The decoder on Triton's kernels, in the interpreter or on a card (`test_decoder_triton.py` starts both)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import token_ids

from recorded_steps import count_played
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.gpu import operators
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder import LoadedDecoder, load_decoder, recorded

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DEVICE = "cpu" if operators.INTERPRETED else "cuda"
TOKENS, PROMPT = 12, 10
"""Beyond the windows of nine of the models below."""
LAYERS = 2
"""What the interpreter can afford; local and global attention are one each."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name → (transformers' model, its folder), each made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(tiny.COMMON, "num_hidden_layers", LAYERS)
                model = tiny.build(name)
            made[name] = model, tiny.save(model, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def stepwise(model: LoadedDecoder, ids_T: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits (T, V) on the CPU: a prompt in chunks, then token by token through the cache."""
    cache = model.new_cache([len(ids_T)])
    sequence, parts = cache.sequence(PROMPT), []
    with torch.inference_mode():
        for part in (*ids_T[:PROMPT].split(chunk), *ids_T[PROMPT:].split(1)):
            batch = cache.append([(sequence, part.tolist())])
            parts.append(model.decoder.logits(model.decoder(batch, cache)).cpu())
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "qwen3"])
def test_float32_logits(models: Any, name: str) -> None:
    """Sliding window; soft caps, norms after blocks, local and global layers; norms of queries and keys."""
    model, folder = models(name)
    ids_T = token_ids(TOKENS)
    with torch.no_grad():
        wanted = model(ids_T[None], use_cache=False).logits[0]
    assert wanted.std() > 0.3, "the logits are too much alike for the test to fail"
    ours = load_decoder(folder, device=DEVICE)
    assert ops.on(ours.decoder.embedding.device, torch.float32) is ops.triton
    torch.testing.assert_close(stepwise(ours, ids_T, 7), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("scheme", "kv", "tolerance"), [("w8a8", "fp32", 2e-3), ("w4a16", "int8", 2e-2)])
def test_quantized_logits(
    models: Any, scheme: str, kv: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the plain PyTorch of the same layers: relative error of the median token.

    Activations that round the other way, and in w4a16 and cached keys bfloat16 for more digits, are all of it.
    """
    ids_T = token_ids(TOKENS)
    ours = load_decoder(models("gemma2")[1], quantize=scheme, kv=kv, device=DEVICE)
    assert sum(isinstance(layer, PackedLinear) for layer in ours.decoder.modules()) == 4 * LAYERS + 1
    found = stepwise(ours, ids_T, 7)
    monkeypatch.setattr(ops, "on", lambda device, dtype: None)
    wanted = stepwise(ours, ids_T, 7)
    error = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median()
    assert 0 < error < tolerance


@pytest.mark.parametrize(
    ("name", "scheme", "kv"), [("mistral-window", "w8a8", "int8"), ("mixtral", "none", "bf16")]
)
def test_company_and_chunks_do_not_change_a_bit(models: Any, name: str, scheme: str, kv: str) -> None:
    """bfloat16 throughout, and a router that packs its weights where there are experts."""
    ours = load_decoder(models(name)[1], torch.bfloat16, scheme, kv, device=DEVICE)
    ids_BT = token_ids(2, TOKENS)
    wanted = ours.logits(ids_BT).cpu()
    assert torch.equal(stepwise(ours, ids_BT[1], 4), wanted[1])


def test_generates(models: Any) -> None:
    """Greedy tokens of prompts together are those of each alone."""
    ours = load_decoder(models("qwen3")[1], torch.bfloat16, "w4a8", device=DEVICE)
    prompts = [token_ids(5).tolist(), token_ids(9, seed=2).tolist()]
    together = ours.generate(prompts, max_new_tokens=2, stop=[])
    assert [len(tokens) for tokens in together] == [2, 2]
    assert ours.generate(prompts[1], max_new_tokens=2, stop=[]) == together[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what lies in rows of padding
@pytest.mark.parametrize(("name", "scheme", "kv"), [("gemma2", "w8a8", "int8"), ("qwen3", "none", "bf16")])
def test_recorded_steps_are_the_calls(
    models: Any, name: str, scheme: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five sequences, then three of them, then one, to the bit."""
    played = count_played(monkeypatch)
    ours = load_decoder(models(name)[1], torch.bfloat16, scheme, kv, device=DEVICE)
    wanted, found = (_decoded(ours, monkeypatch, steps=steps) for steps in (recorded.SEEN + 99, 0))
    assert len(played) == len(found)
    for of_calls, of_recording in zip(wanted, found, strict=True):
        assert torch.equal(of_recording, of_calls)


def _decoded(ours: LoadedDecoder, monkeypatch: pytest.MonkeyPatch, *, steps: int) -> list[torch.Tensor]:
    """Logits of steps of fewer and fewer sequences, recorded once a size was seen in so many `steps`."""
    monkeypatch.setattr(recorded, "SEEN", steps)
    lengths = (3, 20, 17, 9, 14)
    cache = ours.new_cache([length + 8 for length in lengths])
    sequences = [cache.sequence(length) for length in lengths]
    found = []
    with torch.inference_mode():
        for row, length in enumerate(lengths):
            batch = cache.append([(sequences[row], token_ids(length, seed=row).tolist())])
            ours.decoder(batch, cache)
        for step, rows in enumerate((5, 5, 3, 3, 1)):
            batch = cache.append([(sequences[row], [step + row]) for row in range(rows)])
            found.append(ours.decoder.answer(batch, cache, batch.last_rows_B).values_NV.cpu())
    return found
