"""A request's tokens are the same bit for bit, whatever else the engine does at the same time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Results, alone, bundled, drain, engine, request, take, tiny_decoder, words

from torchwright.models.decoder import LoadedDecoder
from torchwright.serve.wire.messages import Cancel, Stats, Submit

FAMILIES = (
    *("gemma2", "qwen3", "mistral-window", "llama-dynamic", "phi3-longrope", "granite", "olmo2"),
    *("olmoe", "mixtral", "gpt-oss", "glm4-moe", "exaone4", "ernie"),
    *("gemma4", "gemma4-moe", "deepseek-v2", "deepseek-v3"),
)
AT_NIGHT = {
    "olmoe": "mixtral",
    "glm4-moe": "deepseek-v3",
    "gemma4": "gemma4-moe",
    "deepseek-v2": "deepseek-v3",
}
"""Family → one that is near it."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models wait for each other's threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LoadedDecoder:
    return bundled()


def random_request(id: str, draw: random.Random, vocabulary: int, longest: int) -> Submit:
    """Prompts that share beginnings, repeat themselves, and options of all kinds."""
    shared = words(48, seed=draw.randrange(3), vocabulary=vocabulary)[: draw.randrange(49)]
    own = words(draw.randrange(1, longest), seed=draw.randrange(100), vocabulary=vocabulary)
    ids = (shared + own * draw.choice((1, 1, 3)))[: 2 * longest]
    options: dict[str, Any] = draw.choice(
        (
            {},
            {"temperature": 1.0},
            {"temperature": 1.3, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 20, "min_p": 0.01},
            {"repetition_penalty": 1.2, "presence_penalty": 0.3},
            {"temperature": 0.9, "frequency_penalty": 0.4, "logit_bias": {5: 2.0, 9: -3.0}},
            {"logprobs": 3},
            {"min_tokens": 3, "stop_ids": [1, 2, 17, 40], "temperature": 1.5},
        )
    )
    return request(
        id,
        ids,
        max_tokens=draw.randrange(3, 24),
        n=draw.choice((1, 1, 1, 3)),
        seed=draw.randrange(9),
        **options,
    )


def check(model: LoadedDecoder, seed: int, count: int, longest: int, threads: int = 1) -> Stats:
    """All requests in one engine, arriving over several steps, some of them cancelled, against each alone."""
    torch.set_num_threads(threads)
    draw = random.Random(seed)
    vocabulary = min(model.config.vocabulary, 1000)
    submits = [random_request(f"r{i}", draw, vocabulary, longest) for i in range(count)]
    together = engine(
        model,
        pages=draw.choice((9, 9, 14, 200)),
        max_queue=1000,
        step_tokens=draw.choice((16, 40, 512)),
        max_running=draw.choice((3, 16)),
        speculate=draw.choice(("none", "ngram", "ngram")),
        prefix_cache=draw.choice((False, True, True)),
    )
    results: Results = {}
    waiting = list(submits)
    while waiting:
        for _ in range(min(len(waiting), draw.randrange(1, 4))):
            assert together.submit(waiting.pop()) is None
        take(results, together)
        if draw.random() < 0.2:
            together.cancel(
                Cancel(id=draw.choice(submits).id, index=draw.choice((None, 0, 1)), reason="a test")
            )
    drain(together, results)
    together.close()
    torch.set_num_threads(1)
    for submit in submits:
        for index, wanted in alone(model, submit).items():
            found = results[submit.id, index]
            if found.finish == "cancelled":
                wanted.tokens, wanted.logprobs = (
                    wanted.tokens[: len(found.tokens)],
                    wanted.logprobs[: len(found.logprobs)],
                )
            else:
                assert found.finish == wanted.finish
            assert found.tokens == wanted.tokens
            assert found.logprobs == wanted.logprobs
    return together.stats()


@pytest.mark.parametrize("seeds", [(3, 5), pytest.param(tuple(range(10)), marks=pytest.mark.slow)])
def test_any_company_gives_the_same_tokens(model: LoadedDecoder, seeds: tuple[int, ...]) -> None:
    stats = [check(model, seed, count=12, longest=60, threads=2 if seed == 5 else 1) for seed in seeds]
    # Each of the disturbances was there.
    assert sum(s.preemptions for s in stats) > 0
    assert sum(s.prefix_hits for s in stats) > 0
    assert sum(s.accepted_tokens for s in stats) > 0
    assert sum(s.speculated_tokens - s.accepted_tokens for s in stats) > 0


@pytest.mark.plain("qwen3", "gemma2")
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow) if name in AT_NIGHT else name for name in FAMILIES],
)
def test_every_family(family: str, tmp_path: Path) -> None:
    for seed, kv in ((1, None), (2, "int8")):
        check(tiny_decoder(family, tmp_path, kv=kv), seed, count=8, longest=20)


@pytest.mark.plain("w4a8")
@pytest.mark.parametrize("quantize", ["w8a8", "w4a8", "w4a16"])
def test_every_scheme(quantize: str, tmp_path: Path) -> None:
    check(tiny_decoder("llama", tmp_path, quantize=quantize), 3, count=8, longest=20)
