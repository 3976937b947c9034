"""Public reports on speculative decoding, tried with a draft here: what a request gets is what it gets without one.

The draft is the bundled model from another folder, whose proposals are nearly always right, and a random head, whose
proposals never are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import (
    Results,
    alone,
    answered,
    bundled,
    compiled,
    drain,
    request,
    take,
    tiny_decoder,
    words,
)
from safetensors.torch import load_file, save_file
from test_engine_draft import FREE, chain, engine

import drafts
from torchwright.core.errors import ModelError
from torchwright.models.decoder import LoadedDecoder
from torchwright.models.decoder.draft import Draft, load_draft
from torchwright.serve.wire.messages import Submit
from torchwright.workloads.language import BUNDLED


@pytest.fixture(scope="module")
def model() -> LoadedDecoder:
    return bundled()


@pytest.fixture(scope="module", params=["right", "wrong"])
def draft(
    request: pytest.FixtureRequest, model: LoadedDecoder, tmp_path_factory: pytest.TempPathFactory
) -> Draft:
    folder = tmp_path_factory.mktemp("draft")
    if request.param == "wrong":
        return load_draft(drafts.write_head(BUNDLED, folder / "head"), model)
    ignored = shutil.ignore_patterns("speech", "*.txt")
    return load_draft(shutil.copytree(BUNDLED, folder / "twin", ignore=ignored), model)


def served(model: LoadedDecoder, draft: Draft, *submits: Submit, **options: Any) -> Results:
    return answered(engine(model, draft, **options), submits)


PROMPT = words(24, seed=7, vocabulary=4096)


@pytest.mark.plain("right")
def test_a_stop_token_among_accepted_ones_ends_the_answer(model: LoadedDecoder, draft: Draft) -> None:
    """sglang#31599 and #33758, koboldcpp#1276, transformers#47912: before the limit, and nothing comes behind."""
    whole = alone(model, request("a", PROMPT, 30))[0].tokens
    place = next(place for place in range(3, 30) if whole[place] not in whole[:place])
    for limit in (place + 1, place + 2, 30):
        found = served(model, draft, request("a", PROMPT, limit, stop_ids=[whole[place]]))["a", 0]
        assert (found.tokens, found.finish) == (whole[: place + 1], "stop")
    found = served(model, draft, request("a", PROMPT, place, stop_ids=[whole[place]]))["a", 0]
    assert (found.tokens, found.finish) == (whole[:place], "length")


def test_scores_are_those_without_a_draft(model: LoadedDecoder, draft: Draft) -> None:
    """vllm#17876 and #6306, sglang#17349 and #14046: of the answer and of the prompt, bit for bit."""
    submit = request("a", PROMPT, 20, logprobs=2, prompt_logprobs=1, temperature=0.7, seed=2)
    found, wanted = served(model, draft, submit)["a", 0], alone(model, submit)[0]
    assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
    assert found.prompt_logprobs == wanted.prompt_logprobs


@pytest.mark.plain("right")
def test_penalties_and_the_least_number_of_tokens_hold(model: LoadedDecoder, draft: Draft) -> None:
    """vllm#26317: what changes logits changes those that verify too."""
    whole = alone(model, request("a", PROMPT, 12))[0].tokens
    submits = [
        request("min", PROMPT, 20, min_tokens=9, stop_ids=sorted({*whole[:6]})),
        request("penalized", PROMPT, 20, repetition_penalty=1.3, frequency_penalty=0.4),
        request("narrow", PROMPT, 20, temperature=0.9, top_k=5, min_p=0.05, seed=4),
    ]
    found = served(model, draft, *submits)
    for submit in submits:
        wanted = alone(model, submit)[0]
        assert (found[submit.id, 0].tokens, found[submit.id, 0].finish) == (wanted.tokens, wanted.finish)
    assert len(found["min", 0].tokens) >= 9


@pytest.mark.plain("right")
def test_answers_keep_to_a_grammar(model: LoadedDecoder, draft: Draft) -> None:
    """sglang#9187, #20148, #24283 and #21723, vllm#11484: they end, and are those without a draft."""
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}}}
    grammar = compiled(model, schema | {"required": ["sure", "n"], "additionalProperties": False})
    submits = [
        request(str(seed), PROMPT, 40, grammar=grammar, temperature=temperature, seed=seed)
        for seed, temperature in enumerate((0.0, 1.2, 1.2))
    ]
    found = served(model, draft, *submits)
    for submit in submits:
        assert found[submit.id, 0].finish == "stop"
        assert found[submit.id, 0].tokens == alone(model, submit)[0].tokens
        assert json.loads(model.text.decode(found[submit.id, 0].tokens)).keys() == {"sure", "n"}


def test_cached_prompts_stay_cached(model: LoadedDecoder, draft: Draft) -> None:
    """sglang#32459, vllm#53670 and #54360: a draft costs no hit, not even that of the last page."""
    counts = []
    for one in (draft, None):
        made = engine(model, one)
        for turn in range(3):
            made.submit(request(str(turn), words(40 + 24 * turn, seed=5), 10))
            timing = drain(made)[str(turn), 0].timing
            assert timing is not None
            counts.append(timing.cached_tokens)
    assert counts[:3] == counts[3:] == [0, 32, 64]


def test_a_prompt_in_pieces_is_followed_as_one_in_whole(tmp_path: Path) -> None:
    """sglang#26329: the first proposal comes from the prompt's own tokens at every border of a piece."""
    loaded = tiny_decoder("llama", tmp_path / "target")
    draft = load_draft(drafts.write_head(loaded.folder, tmp_path / "head", draft_vocabulary=8), loaded)
    made = engine(loaded, draft, prefix_cache=False, step_tokens=8, max_running=4)
    made.submit(request("a", words(37, seed=5), 20))
    compared = 0
    while not made.idle:
        (sequence,) = made._scheduler.running or [None]
        known = [] if sequence is None else list(sequence.tokens)
        made.step()
        if sequence is not None and sequence.proposals and len(known) > 37:
            assert sequence.proposals == chain(loaded, draft, known, len(sequence.proposals))
            compared += 1
    assert compared > 2


def test_a_text_may_be_longer_than_the_drafts_own_context(tmp_path: Path) -> None:
    """AEON-7/Qwen3.6-27B-AEON-Ultimate-Uncensored-DFlash#6: proposals go on behind it, and answers are the model's."""
    loaded = tiny_decoder("llama", tmp_path / "target")
    folder = shutil.copytree(loaded.folder, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    submit = request("a", words(40, seed=1), 40)
    found = served(loaded, load_draft(folder, loaded), submit)["a", 0]
    assert found.tokens == alone(loaded, submit)[0].tokens
    assert found.timing is not None
    assert found.timing.accepted_tokens == found.timing.speculated_tokens > 20


def test_nothing_proposed_is_no_division_by_zero(tmp_path: Path) -> None:
    """vllm#24322: of one token there is nothing to propose."""
    loaded = tiny_decoder("llama", tmp_path / "target")
    draft = load_draft(drafts.write_head(loaded.folder, tmp_path / "head"), loaded)
    made = engine(loaded, draft, costs=FREE)
    made.submit(request("a", words(5, seed=1), 1))
    found = drain(made)["a", 0]
    assert found.timing is not None
    assert (found.timing.speculated_tokens, found.timing.accepted_at) == (0, [])


def test_steps_without_proposals_leave_no_gap_in_what_a_draft_has_read(tmp_path: Path) -> None:
    """vllm#49548: while many answer at once nothing is proposed; later proposals are as right as ever."""
    model = tiny_decoder("llama", tmp_path / "model")
    twin = load_draft(shutil.copytree(model.folder, tmp_path / "twin"), model)
    made = engine(model, twin, speculate_rows=3)
    for place in range(3):
        assert made.submit(request(str(place), words(9, seed=place), [40, 12, 12][place])) is None
    found: Results = {}
    while made.stats().running != 1:
        take(found, made)
    assert made.stats().speculated_tokens == 0
    drain(made, found)
    assert made.stats().accepted_tokens == made.stats().speculated_tokens > 15


def test_fewer_tokens_than_a_draw_looks_at_may_be_proposed(tmp_path: Path) -> None:
    """sglang#4153: a head of nine tokens, of which a sampled answer is proposed some."""
    model = tiny_decoder("llama", tmp_path / "model")
    head = load_draft(drafts.write_head(model.folder, tmp_path / "head", draft_vocabulary=9), model)
    submits = [request(str(seed), words(8, seed=1), 30, temperature=1.5, seed=seed) for seed in range(3)]
    found = served(model, head, *submits)
    assert sum(result.timing.speculated_tokens for result in found.values() if result.timing) > 30
    for submit in submits:
        assert found[submit.id, 0].tokens == alone(model, submit)[0].tokens


@pytest.mark.parametrize("d2t", ["absent", "ids"])
def test_a_reduced_vocabulary_without_offsets_is_refused(d2t: str, tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel#2447 and verl-project/verl-SpeCo#67: neither guessed, nor read beyond the vocabulary."""
    model = tiny_decoder("llama", tmp_path / "model")
    folder = drafts.write_head(model.folder, tmp_path / "head", draft_vocabulary=100)
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    if d2t == "ids":
        tensors["d2t"] = torch.arange(100)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="d2t"):
        load_draft(folder, model)


@pytest.mark.slow
def test_five_hundred_requests_are_those_without_a_draft(model: LoadedDecoder, draft: Draft) -> None:
    """Greedy and sampled, of all lengths, in whatever company they meet."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 60, (500,), generator=random).tolist()
    submits = [
        request(
            str(i), words(length, seed=i, vocabulary=4096), 4 + i % 21, seed=i, temperature=[0.0, 0.8][i % 2]
        )
        for i, length in enumerate(lengths)
    ]
    with_draft, without = (
        served(model, one, *submits, max_running=24, speculate=speculate)
        for one, speculate in ((draft, "ngram"), (None, "none"))
    )
    for key, result in without.items():
        assert (with_draft[key].tokens, with_draft[key].finish) == (result.tokens, result.finish)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_drawn_tokens_have_the_models_distribution(kind: str, tmp_path: Path) -> None:
    """Chi-squared over the second and third token of 4,000 answers, which are accepted or refused proposals."""
    loaded = tiny_decoder("llama", tmp_path / "target")
    draft = (
        load_draft(drafts.write_head(loaded.folder, tmp_path / "head"), loaded)
        if kind == "wrong"
        else load_draft(shutil.copytree(loaded.folder, tmp_path / "twin"), loaded)
    )
    prompt, count, temperature = words(11, seed=2), 4000, 0.8
    submits = [request(str(i), prompt, 3, seed=i, temperature=temperature) for i in range(count)]
    found = served(loaded, draft, *submits, max_running=64, pages=1024, max_queue=count)
    drawn = torch.tensor([found[str(i), 0].tokens for i in range(count)])
    V = loaded.config.vocabulary
    first_V = distribution(loaded, torch.tensor([prompt]), temperature)[0]
    second_VV = distribution(loaded, torch.tensor([[*prompt, token] for token in range(V)]), temperature)
    expected_V = count * (first_V @ second_VV)
    assert chi_squared(drawn[:, 1], expected_V) < 5
    likeliest = int(drawn[:, 0].mode().values)
    after = drawn[drawn[:, 0] == likeliest]
    third_V = second_VV[likeliest] @ distribution(
        loaded, torch.tensor([[*prompt, likeliest, token] for token in range(V)]), temperature
    )
    assert chi_squared(after[:, 2], len(after) * third_V) < 5


def distribution(loaded: LoadedDecoder, ids_BT: torch.Tensor, temperature: float) -> torch.Tensor:
    return (loaded.logits(ids_BT)[:, -1].double() / temperature).softmax(-1)


def chi_squared(drawn: torch.Tensor, expected_V: torch.Tensor) -> float:
    """Pearson's statistic in deviations from its mean; rare tokens are one bin."""
    counts_V = torch.bincount(drawn, minlength=len(expected_V)).double()
    often_V = expected_V >= 5
    counts = torch.cat([counts_V[often_V], counts_V[~often_V].sum()[None]])
    expected = torch.cat([expected_V[often_V], expected_V[~often_V].sum().clamp(min=1e-9)[None]])
    free = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / (2 * free) ** 0.5)
