"""EAGLE-3 heads over a decoder's features, in both layouts, against the formulas written out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import TOKENS, VOCABULARY, build, save

import drafts
from folders import byte_tokenizer
from torchwright.core.errors import ModelError
from torchwright.models.decoder import LoadedDecoder, load_decoder
from torchwright.models.decoder.batch import Batch, FeatureRows
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.draft import load_draft
from torchwright.models.decoder.draft.eagle import EagleDraft

HEADS, KV_HEADS, SIZE, THETA, EPS = 4, 2, 16, 10_000.0, 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedDecoder:
    return load_decoder(folder)


def rows(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def observed(loaded: LoadedDecoder, batch: Batch, layers: tuple[int, ...]) -> Batch:
    like = loaded.decoder.embedding
    values_TF = torch.full((len(batch.ids_T), len(layers) * like.shape[1]), math.nan, dtype=like.dtype)
    return replace(batch, features=FeatureRows(layers, values_TF))


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "qwen3-moe"])
def test_features_are_the_inputs_of_layers(name: str, tmp_path: Path) -> None:
    folder = save(build(name), tmp_path)
    loaded = load_decoder(folder)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = rows(TOKENS)
    with torch.inference_mode():
        states = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
        layers = (1, 2, 0, loaded.config.layers)
        cache = loaded.new_cache([len(ids)])
        batch = observed(loaded, cache.append([(cache.sequence(len(ids)), ids)]), layers)
        loaded.decoder(batch, cache)
    assert batch.features is not None
    wanted = torch.cat([states[layer][0] for layer in layers], dim=1)
    torch.testing.assert_close(batch.features.values_TF, wanted, rtol=1e-4, atol=1e-4)


def test_features_of_the_plan_are_those_of_the_layers(folder: Path) -> None:
    """Bit for bit, for hidden states and for logits, and whichever layers were observed before."""
    loaded = load_decoder(folder, torch.bfloat16)
    pieces = [rows(7, 1), rows(3, 2)]
    for layers in ((2, 0, 1), (3, 1)):
        found = {}
        for way in ("answer", "hidden", "layers"):
            cache = loaded.new_cache([16, 16])
            batch = cache.append([(cache.sequence(len(ids)), ids) for ids in pieces])
            batch = observed(loaded, batch, layers)
            handle = (
                loaded.decoder.layers[0].register_forward_hook(lambda *_: None) if way == "layers" else None
            )
            if way == "answer":
                loaded.decoder.answer(batch, cache, batch.last_rows_B)
            else:
                loaded.decoder(batch, cache)
            if handle:
                handle.remove()
            assert batch.features is not None
            found[way] = batch.features.values_TF
        assert not found["layers"].isnan().any()
        assert torch.equal(found["hidden"], found["layers"])
        assert torch.equal(found["answer"], found["layers"])


def norm(x_TE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
    return x_TE * torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + EPS) * weight_E


def turned(x_THD: torch.Tensor) -> torch.Tensor:
    half = SIZE // 2
    angle_TR = torch.arange(len(x_THD))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angle_TR.cos()[:, None], angle_TR.sin()[:, None]
    first, second = x_THD.split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def reference(
    tensors: dict[str, torch.Tensor], ids_T: list[int], states_TE: torch.Tensor, *, before: bool
) -> torch.Tensor:
    """Hidden states of a whole text whose tokens, and the states in front of them, are these."""
    named = {
        name.removeprefix("midlayer.").removeprefix("layers.0."): value for name, value in tensors.items()
    }
    embedded = norm(named["embed_tokens.weight"][ids_T], named["input_layernorm.weight"])
    normed = norm(states_TE, named["hidden_norm.weight"])
    x = torch.cat([embedded, normed], dim=1)
    q, k, v = (x @ named[f"self_attn.{part}_proj.weight"].T for part in "qkv")
    q, k = turned(q.unflatten(1, (HEADS, SIZE))), turned(k.unflatten(1, (KV_HEADS, SIZE)))
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v.unflatten(1, (KV_HEADS, SIZE))))
    scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -math.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    stream = (normed if before else states_TE) + mixed @ named["self_attn.o_proj.weight"].T
    x = norm(stream, named["post_attention_layernorm.weight"])
    wide = torch.nn.functional.silu(x @ named["mlp.gate_proj.weight"].T) * (x @ named["mlp.up_proj.weight"].T)
    return stream + wide @ named["mlp.down_proj.weight"].T


def head(target: LoadedDecoder, folder: Path, **options: Any) -> tuple[EagleDraft, dict[str, torch.Tensor]]:
    drafts.write_head(target.folder, folder, **options)
    draft = load_draft(folder, target)
    assert isinstance(draft, EagleDraft)
    return draft, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_head_computes_the_formulas(layout: str, target: LoadedDecoder, tmp_path: Path) -> None:
    """Two ragged texts in chunks, then two tokens of each on the head's own states."""
    draft, tensors = head(target, tmp_path, layout=layout)
    before = layout == "speculators"
    random = torch.Generator().manual_seed(1)
    texts = [rows(21, 3), rows(9, 4)]
    features = [torch.randn(len(ids), 3 * 64, generator=random) for ids in texts]
    cache = PagedCache(target.config, pages=8, dtype=torch.float32, draft=draft.page_shapes)
    sequences = [cache.sequence(len(ids)) for ids in texts]
    last = []
    with torch.inference_mode():
        for sequence, ids, states in zip(sequences, texts, features, strict=True):
            for chunk in (slice(0, 5), slice(5, None)):
                batch = cache.append([(sequence, ids[chunk])])
                hidden = draft(batch, states[chunk], cache.draft)
            last.append(hidden[-1])
        found, tokens = [[state] for state in last], []
        for offset in range(2):
            best, shares = drafts.most_likely(draft, torch.stack([states[-1] for states in found]))
            assert all(0 < share < 1 for share in shares)
            tokens.append(best)
            for sequence in sequences:
                cache.hold(sequence, offset + 1)
            batch = cache.ahead(list(zip(sequences, best, strict=True)), offset)
            hidden = draft(batch, torch.stack([states[-1] for states in found]), cache.draft)
            for states, state in zip(found, hidden, strict=True):
                states.append(state)
    for row, (ids, states) in enumerate(zip(texts, features, strict=True)):
        wanted = reference(tensors, ids, states @ tensors["fc.weight"].T, before=before)
        torch.testing.assert_close(found[row][0], wanted[-1], rtol=1e-4, atol=1e-4)
        chain_ids, chain = list(ids), states @ tensors["fc.weight"].T
        for step in range(2):
            logits = norm(wanted[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T
            place = int(logits.argmax())
            assert tokens[step][row] == place + int(tensors["d2t"][place])
            chain_ids, chain = [*chain_ids, tokens[step][row]], torch.cat([chain, wanted[-1:]])
            wanted = reference(tensors, chain_ids, chain, before=before)
            torch.testing.assert_close(found[row][1 + step], wanted[-1], rtol=1e-4, atol=1e-4)


def test_norms_of_eagle_3_1(target: LoadedDecoder, tmp_path: Path) -> None:
    """Each layer's features have a norm of their own, and the next step reads what is behind the final one."""
    drafts.write_head(target.folder, tmp_path, layout="speculators", fc_norm=True, norm_output=True)
    file = tmp_path / "model.safetensors"
    own = {f"fc_norm.{place}.weight": torch.rand(64) + 0.5 for place in range(3)}
    tensors = load_file(file) | own
    save_file(tensors, file)
    draft = load_draft(tmp_path, target)
    ids, features = rows(9, 4), torch.randn(9, 3 * 64, generator=torch.Generator().manual_seed(1))
    cache = PagedCache(target.config, pages=2, dtype=torch.float32, draft=draft.page_shapes)
    sequence = cache.sequence(len(ids))
    with torch.inference_mode():
        hidden = draft(cache.append([(sequence, ids)]), features, cache.draft)
        best, _ = drafts.most_likely(draft, hidden[-1:])
        cache.hold(sequence, 1)
        following = draft(cache.ahead([(sequence, best[0])], 0), hidden[-1:], cache.draft)
    parts = zip(features.chunk(3, dim=1), own.values(), strict=True)
    states = torch.cat([norm(part, weight) for part, weight in parts], dim=1) @ tensors["fc.weight"].T
    wanted = norm(reference(tensors, ids, states, before=True), tensors["norm.weight"])
    torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)
    place = int((wanted[-1] @ tensors["lm_head.weight"].T).argmax())
    assert best == [place + int(tensors["d2t"][place])]
    chained = reference(tensors, [*ids, *best], torch.cat([states, wanted[-1:]]), before=True)
    torch.testing.assert_close(following[0], norm(chained, tensors["norm.weight"])[-1], rtol=1e-4, atol=1e-4)


def test_observed_layers_are_counted_as_each_layout_does(target: LoadedDecoder, tmp_path: Path) -> None:
    """SpecForge and SGLang name a layer's output, speculators and vLLM the next one's input."""
    key = "eagle_aux_hidden_state_layer_ids"
    first, _ = head(target, tmp_path / "a", eagle_config={key: [0, 1, 2], "use_aux_hidden_state": True})
    second, _ = head(target, tmp_path / "b", layout="speculators", **{key: [0, 1, 3]})
    assert first.observed == (1, 2, 3)
    assert second.observed == (0, 1, 3)


def test_a_head_that_carries_the_models_embedding_shares_it(target: LoadedDecoder, tmp_path: Path) -> None:
    drafts.write_head(target.folder, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"embed_tokens.weight": target.decoder.embedding.clone()}, file)
    draft = load_draft(tmp_path, target)
    assert draft.get_buffer("embedding").data_ptr() == target.decoder.embedding.data_ptr()


@pytest.mark.parametrize(
    ("tensors", "fields", "words"),
    [
        ({}, {"target_hidden_size": 32}, "trained for another model"),
        ({}, {"vocab_size": 256}, "trained for another model"),
        ({}, {"num_hidden_layers": 2}, "heads of several layers"),
        ({}, {"norm_output": False}, "not computed here"),
        ({}, {"model_type": "qwen3"}, "not a Llama's"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "which has 3"),
        ({"fc.weight": torch.zeros(64, 64)}, {}, "'fc.weight'"),
        ({"norm.weight": torch.full((64,), math.nan)}, {}, "NaN"),
        ({"d2t": torch.full((64,), 1000)}, {}, "beyond the vocabulary"),
        ({"d2t": None}, {}, "does not say which"),
        ({"lm_head.weight": None}, {}, "no output layer"),
        ({"midlayer.mlp.down_proj.weight": None}, {}, "lack the tensor"),
        ({"more.weight": torch.zeros(3)}, {}, "more.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_words(
    tensors: dict[str, torch.Tensor | None],
    fields: dict[str, Any],
    words: str,
    target: LoadedDecoder,
    tmp_path: Path,
) -> None:
    drafts.write_head(target.folder, tmp_path, **fields)
    file = tmp_path / "model.safetensors"
    kept = load_file(file) | tensors
    save_file({name: value for name, value in kept.items() if value is not None}, file)
    with pytest.raises(ModelError, match=words):
        load_draft(tmp_path, target)


def test_a_damaged_file_is_refused(target: LoadedDecoder, tmp_path: Path) -> None:
    drafts.write_head(target.folder, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_draft(tmp_path, target)


def test_the_model_itself_is_no_draft(target: LoadedDecoder) -> None:
    with pytest.raises(ModelError, match="the model itself"):
        load_draft(target.folder, target)


def test_a_small_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    made = [save(build("llama"), tmp_path / name) for name in "ab"]
    tokenizer = byte_tokenizer()
    tokenizer.save(str(made[0] / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(made[1] / "tokenizer.json"))
    with pytest.raises(ModelError, match="other tokens"):
        load_draft(made[1], load_decoder(made[0]))


def test_a_small_model_of_another_vocabulary_is_refused(target: LoadedDecoder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="other tokens"):
        load_draft(save(build("llama", vocab_size=96), tmp_path), target)


def test_a_recurrent_model_is_refused_as_a_draft(target: LoadedDecoder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="layers with a state"):
        load_draft(save(build("lfm2"), tmp_path), target)


def test_a_config_of_another_kind_is_no_head(target: LoadedDecoder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle"]}))
    with pytest.raises(ModelError):
        load_draft(tmp_path, target)
