"""Weights are swapped under load: a request goes on as a new one with its tokens so far, and no step sees both."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_support import drain, engine, request, take, tiny_decoder

from torchwright.core.errors import ModelError
from torchwright.models.decoder import LoadedDecoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.wire.messages import Cancel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedDecoder, LoadedDecoder]:
    """One architecture, two sets of weights."""
    one, other = (tiny_decoder("llama", tmp_path_factory.mktemp(name)) for name in ("one", "other"))
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    for tensor in (other.decoder.norm, *(layer.pre_attention for layer in other.decoder.layers)):
        assert isinstance(tensor, torch.Tensor)
        tensor.mul_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return one, other


def prompts(made: ServingEngine, count: int) -> list[list[int]]:
    vocabulary = made.loaded.config.vocabulary
    return [[random.randrange(2, vocabulary) for _ in range(random.randint(3, 70))] for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"speculate": "none", "prefix_cache": False}, {"step_tokens": 16}])
def test_what_follows_a_swap_is_the_new_weights_own(
    models: tuple[LoadedDecoder, LoadedDecoder], options: dict
) -> None:
    """Bit for bit: each token after the swap is what a fresh engine of the new weights answers to what stood before."""
    made, fresh = (engine(model, max_running=4, **options) for model in models)
    asked = prompts(made, 8)
    for place, ids in enumerate(asked):
        assert made.submit(request(str(place), ids, 20, logprobs=0, n=1 + place % 2)) is None
    results = {}
    for _ in range(random.randint(1, 25)):
        take(results, made)
    before = {key: len(result.tokens) for key, result in results.items()}
    named = made.fingerprint
    made.load_weights(models[1])
    assert made.fingerprint == fresh.fingerprint != named
    made.check_integrity()
    drain(made, results)
    for (id, index), result in results.items():
        kept = before.get((id, index), 0)
        assert len(result.tokens) == 20
        if kept < 20:
            name = f"{id}.{index}"
            assert (
                fresh.submit(request(name, asked[int(id)] + result.tokens[:kept], 20 - kept, logprobs=0))
                is None
            )
            (again,) = drain(fresh).values()
            assert again.tokens == result.tokens[kept:]
            assert again.logprobs == result.logprobs[kept:]
    made.close()
    fresh.close()


def test_a_prompt_is_scored_by_one_set_of_weights(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    one, other = models
    made, fresh = engine(one, step_tokens=16, max_running=4), engine(other, step_tokens=16, max_running=4)
    ids = [random.randrange(2, made.loaded.config.vocabulary) for _ in range(60)]
    for one_engine in (made, fresh):
        assert one_engine.submit(request("a", ids, 2, prompt_logprobs=0)) is None
    made.step()
    made.step()  # half of the prompt
    made.load_weights(other)
    (swapped,), (whole,) = drain(made).values(), drain(fresh).values()
    assert swapped.prompt_logprobs == whole.prompt_logprobs
    assert swapped.tokens == whole.tokens
    made.close()
    fresh.close()


def test_the_prefix_cache_forgets(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    made = engine(models[0])
    ids = [random.randrange(2, made.loaded.config.vocabulary) for _ in range(64)]
    for name in ("cold", "warm"):
        assert made.submit(request(name, ids)) is None
        drain(made)
    hits = made.stats().prefix_hits
    assert hits > 0
    made.load_weights(models[1])
    assert made.stats().pages_cached == 0
    made.submit(request("after", ids))
    drain(made)
    assert made.stats().prefix_hits == hits
    made.close()


def test_cancelled_and_idle_engines_swap_too(models: tuple[LoadedDecoder, LoadedDecoder]) -> None:
    one, other = models
    made = engine(one)
    made.load_weights(other)
    made.submit(request("a", [5, 6, 7], 20, n=3))
    made.step()
    made.load_weights(one)
    made.cancel(Cancel(id="a", reason="enough"))
    drain(made)
    assert made.stats().pages_used == 0
    made.close()


def test_another_model_is_refused_and_nothing_changes(
    models: tuple[LoadedDecoder, LoadedDecoder], tmp_path: Path
) -> None:
    made = engine(models[0])
    made.submit(request("a", [5, 6, 7], 6))
    made.step()
    named, stats = made.fingerprint, made.stats()
    with pytest.raises(ModelError, match="another config"):
        made.load_weights(tiny_decoder("qwen2", tmp_path))
    assert (made.fingerprint, made.stats()) == (named, stats)
    (result,) = drain(made).values()
    assert result.finish == "length"
    made.close()
