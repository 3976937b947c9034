"""Drafts in the engine: they change how many steps an answer takes, and never the answer.

What rows cost is given, not measured, so that the proposals are the same everywhere.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Results, alone, drain, request, take, tiny_decoder, words
from test_draft_mtp import with_mtp

import drafts
from torchwright.core.errors import ModelError
from torchwright.models.decoder import LoadedDecoder, load_decoder
from torchwright.models.decoder.batch import FeatureRows
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.draft import Draft, load_draft
from torchwright.serve.engine import draft as draft_module
from torchwright.serve.engine.draft import JUDGED_STEPS
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize, cache_size
from torchwright.serve.engine.row_costs import RowCosts
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import Cancel, Submit

Costs = tuple[RowCosts, RowCosts]
"""Those of the model's rows, and those of the draft."""
FREE: Costs = RowCosts([1, 16], [1.0, 1.0]), RowCosts([1, 16], [0.01, 0.01])
"""Rows that cost nothing, and a draft next to nothing: everything is proposed."""


@pytest.fixture(scope="module", params=["llama", "gemma2", "lfm2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    return tiny_decoder(request.param, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    return tiny_decoder("llama", tmp_path_factory.mktemp("target"))


def twin(loaded: LoadedDecoder, folder: Path) -> Draft:
    """The same model from another folder, whose proposals are right."""
    return load_draft(shutil.copytree(loaded.folder, folder / "twin"), loaded)


def head(loaded: LoadedDecoder, folder: Path, **options: Any) -> Draft:
    return load_draft(drafts.write_head(loaded.folder, folder / "head", **options), loaded)


def engine(
    loaded: LoadedDecoder,
    draft: Draft | None,
    *,
    costs: Costs | None = FREE,
    pages: int = 256,
    **options: Any,
) -> ServingEngine:
    asked = EngineOptions(speculate=options.pop("speculate", "none"), **options)
    copies = asked.max_running * 8 if loaded.config.state_shapes else 0
    size = CacheSize(
        pages=pages, running=asked.max_running, copies=copies, draft=draft.page_shapes if draft else ()
    )
    rows, calls = costs or (None, None)
    return ServingEngine(loaded, size=size, options=asked, draft=draft, row_costs=rows, draft_costs=calls)


def answers(loaded: LoadedDecoder, draft: Draft | None, submits: list[Submit], **options: Any) -> Results:
    made = engine(loaded, draft, **options)
    for submit in submits:
        assert made.submit(submit) is None
    return drain(made)


def some(count: int, tokens: int = 24, **options: Any) -> list[Submit]:
    return [
        request(str(i), words(5 + 7 * i, seed=i), tokens, seed=i, temperature=[0.0, 0.9][i % 2], **options)
        for i in range(count)
    ]


@pytest.mark.plain("llama-head", "gemma2-twin", "lfm2-twin")
@pytest.mark.parametrize("kind", ["head", "twin"])
def test_answers_are_those_without_a_draft(kind: str, loaded: LoadedDecoder, tmp_path: Path) -> None:
    """Greedy and sampled ones, several at once, in chunks of a few tokens, with few pages."""
    if kind == "twin" and loaded.config.state_shapes:
        pytest.skip("a model with states is no draft")
    draft = {"head": head, "twin": twin}[kind](loaded, tmp_path)
    submits = some(5)
    found = answers(loaded, draft, submits, pages=16, step_tokens=16, max_running=8)
    for submit in submits:
        without = alone(loaded, submit)[0]
        assert found[submit.id, 0].tokens == without.tokens
        assert found[submit.id, 0].finish == without.finish


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe", "deepseek-v3"])
def test_a_models_own_mtp_layer_proposes(name: str, tmp_path: Path) -> None:
    """Over pages alone, and beside layers with a state."""
    with_mtp(name, tmp_path)
    loaded = load_decoder(tmp_path, torch.bfloat16)
    submits = some(3)
    found = answers(loaded, load_draft("mtp", loaded), submits)
    assert sum(result.timing.speculated_tokens for result in found.values() if result.timing) > 0
    for submit in submits:
        assert found[submit.id, 0].tokens == alone(loaded, submit)[0].tokens


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_draft_that_is_right_takes_fewer_steps(
    temperature: float, llama: LoadedDecoder, tmp_path: Path
) -> None:
    """Drawn tokens are proposed as surely as greedy ones: the draft draws with the sequence's own times."""
    made = engine(llama, twin(llama, tmp_path))
    made.submit(request("a", words(9, seed=3), 46, temperature=temperature))
    found = drain(made)["a", 0]
    assert found.timing is not None
    assert found.timing.accepted_tokens == found.timing.speculated_tokens > 30
    assert sum(found.timing.accepted_at) == found.timing.accepted_tokens
    assert made.stats().steps == 46 - found.timing.accepted_tokens


def test_half_a_page_is_not_shared_with_a_sibling(llama: LoadedDecoder, tmp_path: Path) -> None:
    """A draft writes behind the prompt that several answers begin with."""
    submit = request("a", words(21, seed=8), 20, n=3, temperature=0.9, seed=1)
    found = answers(llama, twin(llama, tmp_path), [submit])
    without = alone(llama, submit)
    for index in range(3):
        assert found["a", index].tokens == without[index].tokens


def test_a_cached_prompt_is_proposed_for_as_well(llama: LoadedDecoder, tmp_path: Path) -> None:
    """Its pages hold the draft's keys and values too."""
    made = engine(llama, twin(llama, tmp_path))
    ids = words(40, seed=4)
    for id in "ab":
        made.submit(request(id, ids, 18))
        found = drain(made)
    timing = found["b", 0].timing
    assert timing is not None
    assert timing.cached_tokens == 32
    assert timing.accepted_tokens == timing.speculated_tokens > 12


LOSING: Costs = RowCosts([1, 16], [1e-6, 1e-6]), RowCosts([1, 16], [1e-8, 1e-8])
"""Everything is proposed, and what is accepted by chance saves less than any call of the draft takes."""


def test_a_draft_that_is_never_right_rests(llama: LoadedDecoder, tmp_path: Path) -> None:
    """It is not even followed then; without anything to gain there is nothing to spend."""
    made = engine(llama, head(llama, tmp_path), costs=LOSING)
    results: Results = {}
    for number in range(4):
        made.submit(request(str(number), words(5, seed=number), 100))
    for _ in range(JUDGED_STEPS):
        take(results, made)
    before = made.stats().speculated_tokens
    assert before > 0
    made.submit(request("late", words(5, seed=9), 60))
    drain(made, results)
    assert made.stats().speculated_tokens == before, "those that were being answered go on without it, too"


def test_a_draft_that_loses_again_rests_longer(
    llama: LoadedDecoder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_module, "REST_STEPS", JUDGED_STEPS)
    monkeypatch.setattr(draft_module, "LONGEST_REST", 4 * JUDGED_STEPS)
    made = engine(llama, head(llama, tmp_path), costs=LOSING)
    with caplog.at_level("INFO", logger="torchwright.serve"):
        for number in range(16):
            made.submit(request(str(number), words(5, seed=number), 100))
            drain(made)
    rests = [record.args[0] for record in caplog.records if "rests" in record.msg]  # pyright: ignore
    assert rests[:4] == [JUDGED_STEPS * times for times in (1, 2, 4, 4)]


def test_nothing_is_proposed_where_rows_cost_more_than_they_bring(
    llama: LoadedDecoder, tmp_path: Path
) -> None:
    costs = RowCosts([1, 16], [1.0, 16.0]), RowCosts([1, 16], [1.0, 1.0])
    made = engine(llama, twin(llama, tmp_path), costs=costs)
    made.submit(request("a", words(9, seed=3), 30))
    drain(made)
    assert made.stats().speculated_tokens == 0


def test_a_cancelled_request_gives_everything_back(llama: LoadedDecoder, tmp_path: Path) -> None:
    made = engine(llama, twin(llama, tmp_path), prefix_cache=False)
    made.submit(request("a", words(9, seed=3), 60))
    results: Results = {}
    for _ in range(4):
        take(results, made)
    made.cancel(Cancel(id="a", reason="the client left"))
    drain(made, results)
    made.check_integrity()


def test_looked_up_tokens_and_a_draft_share_the_work(llama: LoadedDecoder, tmp_path: Path) -> None:
    """Whichever is more often right proposes; answers stay the same."""
    submits = [request("a", words(12, seed=1) * 4, 60), request("b", words(7, seed=2), 60, temperature=0.8)]
    found = answers(llama, twin(llama, tmp_path), submits, speculate="ngram")
    for submit in submits:
        assert found[submit.id, 0].tokens == alone(llama, submit)[0].tokens


def test_a_draft_wants_an_own_decoder_and_the_same_angles(tmp_path: Path) -> None:
    by_length = tiny_decoder("llama-dynamic", tmp_path / "target")
    draft = load_draft(drafts.write_head(by_length.folder, tmp_path / "head"), by_length)
    with pytest.raises(ModelError, match="depend on the prompt's length"):
        engine(by_length, draft)


def test_memory_counts_the_drafts_pages(llama: LoadedDecoder, tmp_path: Path) -> None:
    shapes = twin(llama, tmp_path).page_shapes
    plain, wide = (
        cache_size(llama.config, torch.bfloat16, context=128, max_running=1000, kv_memory=2**22, draft=draft)
        for draft in ((), shapes)
    )
    assert wide.pages == plain.pages // 2
    assert wide.bytes_of(llama.config, torch.bfloat16) <= 2**22


def test_costs_are_measured_where_none_are_given(llama: LoadedDecoder, tmp_path: Path) -> None:
    submit = request("a", words(9, seed=3), 30)
    found = answers(llama, twin(llama, tmp_path), [submit], costs=None)
    assert found["a", 0].tokens == alone(llama, submit)[0].tokens


def test_a_float32_model_takes_a_head(llama: LoadedDecoder, tmp_path: Path) -> None:
    """Layers of PyTorch, whose rows are not the same in any company: answers may differ, and end."""
    wide = load_decoder(llama.folder)
    made = engine(wide, head(wide, tmp_path), deterministic=False)
    made.submit(request("a", words(9, seed=3), 12))
    assert len(drain(made)["a", 0].tokens) == 12


def test_proposals_are_the_heads_own_chain(llama: LoadedDecoder, tmp_path: Path) -> None:
    """Each step's proposals, of several tokens, against the head over the whole text so far, computed afresh."""
    draft = head(llama, tmp_path, draft_vocabulary=8)
    made = engine(llama, draft, prefix_cache=False)
    made.submit(request("a", words(19, seed=5), 40))
    results: Results = {}
    compared = 0
    while not made.idle:
        (sequence,) = made._scheduler.running or [None]
        known = [] if sequence is None else list(sequence.tokens)
        take(results, made)
        if sequence is None or not sequence.proposals or len(known) <= 19:
            continue
        wanted = chain(llama, draft, known, len(sequence.proposals))
        assert sequence.proposals == wanted
        compared += len(wanted) > 1
    assert compared > 5


@pytest.mark.parametrize("kind", ["head", "mtp"])
def test_new_weights_give_a_draft_their_embedding(kind: str, tmp_path: Path) -> None:
    """Bit for bit the proposals of the same draft that was loaded beside the new weights."""
    path: Path | str = "mtp"
    if kind == "mtp":
        with_mtp("qwen3.5", tmp_path / "model")
    else:
        tiny_decoder("llama", tmp_path / "model")
        path = drafts.write_head(
            tmp_path / "model", tmp_path / "head", own_embedding=False, draft_vocabulary=8
        )
    models = [load_decoder(tmp_path / "model", torch.bfloat16) for _ in range(2)]
    random = torch.Generator().manual_seed(0)
    for tensor in models[1].decoder.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(torch.rand(tensor.shape, generator=random) + 0.5)
    moved, fresh = (load_draft(path, model) for model in models)
    moved.read_from(models[1].decoder)
    hidden = torch.randn(5, models[0].config.model, dtype=torch.bfloat16)
    assert torch.equal(moved.embedding, fresh.embedding)
    assert drafts.most_likely(moved, hidden) == drafts.most_likely(fresh, hidden)
    draft, asked = load_draft(path, models[0]), request("a", words(9, seed=1), 8)
    made = engine(models[0], draft)
    made.load_weights(models[1])
    made.submit(asked)
    assert draft.embedding is models[1].decoder.embedding
    assert drain(made)["a", 0].tokens == answers(models[1], None, [asked])["a", 0].tokens


def chain(loaded: LoadedDecoder, draft: Draft, ids: list[int], count: int) -> list[int]:
    """The head's proposals behind a text, without pages that anything was computed in before."""
    cache = PagedCache(loaded.config, pages=16, dtype=loaded.kv_dtype, draft=draft.page_shapes)
    sequence, like = cache.sequence(len(ids)), loaded.decoder.embedding
    with torch.inference_mode():
        batch = cache.append([(sequence, ids[:-1])])
        rows = FeatureRows(draft.observed, like.new_empty(len(ids) - 1, 3 * like.shape[1]))
        loaded.decoder(replace(batch, features=rows), cache)
        hidden = draft(replace(batch, ids_T=torch.tensor(ids[1:])), rows.values_TF, cache.draft)[-1:]
        found, _ = drafts.most_likely(draft, hidden)
        for offset in range(count - 1):
            cache.hold(sequence, offset + 1)
            hidden = draft(cache.ahead([(sequence, found[-1])], offset), hidden, cache.draft)
            found += drafts.most_likely(draft, hidden)[0]
    return found
