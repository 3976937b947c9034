"""A draft's calls as operators against the same calls token by token in Python."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import tiny_decoder, words
from test_draft_mtp import with_mtp

import drafts
from torchwright.core.errors import ModelError
from torchwright.models.decoder import LoadedDecoder, load_decoder
from torchwright.models.decoder.batch import FeatureRows
from torchwright.models.decoder.cache import CacheSequence, PagedCache
from torchwright.models.decoder.draft import Draft, load_draft
from torchwright.models.decoder.draft.plan import Worth
from torchwright.serve.engine.draft_calls import Chain, DraftCalls, Followed
from torchwright.serve.engine.sampling import Chooser
from torchwright.serve.wire.messages import SamplingOptions, Submit

LONG = 6
"""Proposals of a chain."""
EAGER = Worth(acceptance=[[1.0] * 11] * 2, call_s=[0.0] * 9, tokens=1, seconds=1, row=0)
"""Nothing costs anything: chains are as long as they may be."""
HEADS: dict[str, dict[str, Any]] = {
    "specforge": {},
    "speculators": {"layout": "speculators"},
    "few tokens": {"draft_vocabulary": 9},
    "all tokens": {"draft_vocabulary": 128},
    "biases": {"biased": True},
    "narrow": {"sizes": {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}},
    "norms": {
        "layout": "speculators",
        "fc_norm": True,
        "norm_output": True,
        "tensors": {f"fc_norm.{place}.weight": torch.linspace(0.5, 1.5, 64) for place in range(3)},
    },
    "norm before": {"norm_before_fc": True, "tensors": {"input_norm.weight": torch.linspace(0.5, 1.5, 192)}},
}
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.3, "top_k": 40, "top_p": 0.95},
]


@dataclass(eq=False)
class Text:
    """A sequence whose tokens a draft is given."""

    tokens: list[int]
    cache: CacheSequence
    chooser: Chooser


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    return tiny_decoder("llama", tmp_path_factory.mktemp("target"))


def texts(cache: PagedCache) -> list[Text]:
    """Sequences of several lengths and options, of which the cache has all tokens but the newest."""
    found = []
    for place, options in enumerate(SAMPLING):
        ids = words(3 + 5 * place, seed=place)
        sampling = SamplingOptions(seed=place, **options)
        submit = Submit(id=str(place), ids=ids, max_tokens=32, sampling=sampling)
        sequence = cache.sequence(len(ids))
        cache.append([(sequence, ids[:-1])])
        cache.hold(sequence, LONG)
        found.append(Text(ids, sequence, Chooser(submit, 0)))
    return found


@torch.inference_mode()
def proposals(
    loaded: LoadedDecoder, draft: Draft, *, planned: bool, worth: Worth = EAGER
) -> list[Chain[Text]]:
    """Chains behind a step of all tokens, and the draft's states behind the first proposals."""
    cache = PagedCache(
        loaded.config, pages=16, dtype=loaded.kv_dtype, states=len(SAMPLING), draft=draft.page_shapes
    )
    calls = DraftCalls(draft, cache, planned=planned)
    assert (calls.plan is not None) == planned
    rows, pieces = 0, list[Followed]()
    for text in texts(cache):
        pieces.append(Followed(text, rows, 0, text.cache.length, text.cache.length != 7))
        rows += text.cache.length
    wide = len(draft.observed) * loaded.config.model
    random = torch.Generator().manual_seed(5)
    values_TF = torch.randn(rows, wide, generator=random).to(loaded.decoder.embedding.dtype)
    chains = calls.follow(pieces, FeatureRows(draft.observed, values_TF))
    for place, chain in enumerate(chains):
        chain.most = LONG - place
    calls.grow(chains, worth)
    return chains


def same(found: list[Chain[Text]], wanted: list[Chain[Text]]) -> None:
    """Equal tokens; confidences differ where logits tie at the edge of what a draw keeps, and either is kept."""
    assert [chain.tokens for chain in found] == [chain.tokens for chain in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.confidence == pytest.approx(other.confidence, rel=0.02)


@pytest.mark.parametrize("name", HEADS)
def test_a_heads_plan_proposes_what_the_head_does(name: str, llama: LoadedDecoder, tmp_path: Path) -> None:
    """Greedy and drawn proposals of several sequences at once, along chains of several lengths."""
    draft = load_draft(drafts.write_head(llama.folder, tmp_path, **HEADS[name]), llama)
    found, wanted = (proposals(llama, draft, planned=planned) for planned in (True, False))
    same(found, wanted)
    assert [len(chain.tokens) for chain in found] == [LONG - place for place in range(len(found))]


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "w4a16"])
def test_a_quantized_heads_plan_proposes_what_the_head_does(
    scheme: str, llama: LoadedDecoder, tmp_path: Path
) -> None:
    draft = load_draft(drafts.write_head(llama.folder, tmp_path), llama, scheme)
    same(*(proposals(llama, draft, planned=planned) for planned in (True, False)))


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe", "deepseek-v3"])
def test_an_mtp_layers_plan_proposes_what_the_layer_does(name: str, tmp_path: Path) -> None:
    with_mtp(name, tmp_path)
    loaded = load_decoder(tmp_path, torch.bfloat16)
    draft = load_draft("mtp", loaded)
    if draft.unplanned:
        pytest.skip(draft.unplanned)
    same(*(proposals(loaded, draft, planned=planned) for planned in (True, False)))


def test_a_plan_ends_chains_where_they_stop_paying(llama: LoadedDecoder, tmp_path: Path) -> None:
    """By the acceptance of each confidence, the mean of all, and the time of calls."""
    draft = load_draft(drafts.write_head(llama.folder, tmp_path), llama)
    shares = [(place + 1) / 11 for place in range(10)]
    lengths = set[tuple[int, ...]]()
    for call_s, row in ((0.0, 0.0), (0.02, 0.0), (0.3, 0.0), (0.0, 0.4)):
        worth = Worth(
            acceptance=[[*shares, 0.7], [*shares, 0.5]], call_s=[call_s] * 9, tokens=2, seconds=1, row=row
        )
        found, wanted = (proposals(llama, draft, planned=planned, worth=worth) for planned in (True, False))
        same(found, wanted)
        lengths.add(tuple(len(chain.tokens) for chain in found))
    assert len(lengths) > 2


def test_a_chains_proposals_do_not_depend_on_the_others(llama: LoadedDecoder, tmp_path: Path) -> None:
    draft = load_draft(drafts.write_head(llama.folder, tmp_path), llama)
    together = proposals(llama, draft, planned=True)
    cache = PagedCache(llama.config, pages=16, dtype=llama.kv_dtype, draft=draft.page_shapes)
    calls = DraftCalls(draft, cache)
    random = torch.Generator().manual_seed(5)
    row, alone = 0, list[Chain[Text]]()
    for text in texts(cache):
        count = text.cache.length
        values_TF = torch.randn(count, 3 * llama.config.model, generator=random).bfloat16()
        if count != 7:
            (chain,) = calls.follow(
                [Followed(text, 0, 0, count, True)], FeatureRows(draft.observed, values_TF)
            )
            chain.most = LONG - row
            calls.grow([chain], EAGER)
            alone.append(chain)
            row += 1
    same(together, alone)


def test_logits_that_are_no_numbers_are_proposed_without_confidence(
    llama: LoadedDecoder, tmp_path: Path
) -> None:
    draft = load_draft(drafts.write_head(llama.folder, tmp_path), llama)
    draft.final_norm.fill_(torch.nan)
    for chain in proposals(llama, draft, planned=True):
        assert set(chain.confidence) == {0.0}


def test_a_plan_refuses_what_does_not_fit(llama: LoadedDecoder, tmp_path: Path) -> None:
    """In words, and without writing anywhere."""
    draft = load_draft(drafts.write_head(llama.folder, tmp_path), llama)
    cache = PagedCache(llama.config, pages=4, dtype=llama.kv_dtype, draft=draft.page_shapes)
    native = draft.program(cache.draft, observes=False).native
    cos, sin = draft.angles(16)
    one = torch.ones(1, dtype=torch.int64)
    good: dict[str, Any] = {
        "ids": one,
        "states": torch.zeros(1, llama.config.model, dtype=torch.bfloat16),
        "cos": cos,
        "sin": sin,
        "places": one,
        "tables": torch.zeros(1, 1, dtype=torch.int32),
        "choice": torch.zeros(1, 4, dtype=torch.float64),
        "keys": torch.zeros(1, 3, dtype=torch.int64),
        "most": 3 * one,
        "reach": torch.ones(1, dtype=torch.float64),
        "acceptance": torch.ones(2, 11, dtype=torch.float64),
        "call": torch.zeros(2, dtype=torch.float64),
    }

    def grow(**other: torch.Tensor) -> torch.Tensor:
        return native.grow(*(good | other).values(), 1.0, 1.0, 0.0, 64)[0]

    assert grow().shape == (1, 3)
    for name, value, fault in [
        ("ids", 1000 * one, "token 1000 is beyond"),
        ("states", torch.zeros(1, 8, dtype=torch.bfloat16), "is given rows of shape"),
        ("places", 14 * one, "is beyond 3 keys"),
        ("tables", torch.full((1, 1), 9, dtype=torch.int32), "page 9"),
        ("most", 4 * one, "a chain of 4 tokens"),
        ("call", torch.zeros(1, dtype=torch.float64), "call must be"),
        ("choice", torch.zeros(1, 3, dtype=torch.float64), "options of shape"),
    ]:
        with pytest.raises((ValueError, IndexError), match=fault):
            grow(**{name: value})


def test_heads_of_other_sizes_are_named(llama: LoadedDecoder, tmp_path: Path) -> None:
    """A narrow head must have an embedding of its own."""
    with pytest.raises(ModelError, match="no embedding of its own"):
        load_draft(drafts.write_head(llama.folder, tmp_path, **HEADS["narrow"], own_embedding=False), llama)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_small_models_plan_proposes_what_the_model_does(name: str, tmp_path: Path) -> None:
    """Chains begin with the sequence's newest token; no step of the decoder gives the first proposal."""
    loaded = tiny_decoder(name, tmp_path / "target")
    draft = load_draft(shutil.copytree(loaded.folder, tmp_path / "twin"), loaded)
    found = list[list[Chain[Text]]]()
    for planned in (True, False):
        cache = PagedCache(loaded.config, pages=16, dtype=loaded.kv_dtype, draft=draft.page_shapes)
        calls = DraftCalls(draft, cache, planned=planned)
        assert (calls.plan is not None) == planned
        with torch.inference_mode():
            given = texts(cache)
            pieces = [Followed(text, 0, 0, text.cache.length, True) for text in given]
            assert calls.follow(pieces, None) == []
            chains = [Chain(text, most=LONG - place) for place, text in enumerate(given)]
            calls.grow(chains, EAGER)
        found.append(chains)
    same(*found)
    assert [len(chain.tokens) for chain in found[0]] == [LONG - place for place in range(len(SAMPLING))]
