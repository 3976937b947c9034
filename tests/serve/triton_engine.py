"""The serving engine on Triton's kernels, in the interpreter or on a card (`test_engine_device.py` starts both)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_support import alone, answers, request, tiny_decoder, words

from recorded_steps import count_played
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.gpu import operators
from torchwright.models.decoder import LoadedDecoder, recorded
from torchwright.serve.wire.messages import Submit

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of what lies in rows of padding
]
DEVICE = "cpu" if operators.INTERPRETED else "cuda"
NEW = 4
"""Tokens of an answer: the interpreter takes a second for a few."""
SMALL = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    folder = tmp_path_factory.mktemp("model")
    made = tiny_decoder("qwen3", Path(folder), fields=SMALL, quantize="w8a8", kv="int8", device=DEVICE)
    assert ops.on(made.device, torch.bfloat16) is ops.triton
    return made


def requests() -> list[Submit]:
    """Greedy, drawn, with log-probabilities, and two answers to one prompt."""
    return [
        request("greedy", words(9, 1), NEW),
        request("drawn", words(5, 2), NEW, temperature=1.0, top_p=0.9, seed=7),
        request("reported", words(5, 3), NEW, logprobs=2),
        request("twice", words(6, 4), NEW, temperature=0.8, seed=3, n=2),
    ]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps that are played from recordings, which are made at once."""
    monkeypatch.setattr(recorded, "SEEN", 0)
    return count_played(monkeypatch)


def growing() -> list[Submit]:
    return [request(f"r{number}", words(4 + number, number), NEW) for number in range(3)]


@pytest.fixture
def wanted(loaded: LoadedDecoder, recording: list[int]) -> dict[tuple[str, int], list[int]]:
    """The answers of an engine that launches nothing ahead."""
    return {(submit.id, 0): alone(loaded, submit)[0].tokens for submit in growing()}


def test_steps_are_launched_ahead(
    loaded: LoadedDecoder,
    wanted: dict[tuple[str, int], list[int]],
    asynchronous: None,  # behind `wanted`
    ahead_rows: list[int],
) -> None:
    """From tokens on the device, into the tensors of a recording."""
    found = answers(loaded, growing(), prefix_cache=False, speculate="none")
    assert {key: result.tokens for key, result in found.items()} == wanted
    assert ahead_rows == [3] * (NEW - 1)


def test_answers_are_the_same_in_any_company(loaded: LoadedDecoder, recording: list[int]) -> None:
    """To the bit: prompts in chunks beside decoding sequences, steps played from recordings."""
    together = answers(loaded, requests(), step_tokens=8, max_running=5, deterministic=True)
    assert recording
    for submit in requests():
        for index, result in alone(loaded, submit).items():
            found = together[submit.id, index]
            assert (found.tokens, found.logprobs) == (result.tokens, result.logprobs)
            assert len(found.tokens) == NEW
    greedy = loaded.generate(words(9, 1), max_new_tokens=NEW, stop=[])
    assert together["greedy", 0].tokens == greedy
