"""Generation: transformers' greedy answers, ragged prompts, seeds, streams of text, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCABULARY, build, save, token_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from torchwright.core.errors import TorchwrightError
from torchwright.models.decoder import LoadedDecoder, load_decoder
from torchwright.models.decoder.generation.text import FolderTokenizer, TextStream
from torchwright.workloads.language import BUNDLED


@pytest.fixture(scope="module")
def bundled() -> LoadedDecoder:
    return load_decoder(BUNDLED)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedDecoder]:
    model = build("llama")
    return model, load_decoder(save(model, tmp_path_factory.mktemp("llama")))


def hf_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.plain("llama", "mistral-window")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "olmoe"])
def test_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    ours = load_decoder(save(model, tmp_path))
    prompts = [token_ids(length, seed=length).tolist() for length in (4, 21, 11)]
    answers = ours.generate(prompts, max_new_tokens=20, stop=[], prefill_chunk=8)
    assert answers == [hf_greedy(model, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("prompt_tokens", [3, 15, 16, 17, 30])
def test_longrope_starts_afresh_beyond_the_trained_length(prompt_tokens: int, tmp_path: Path) -> None:
    """Trained on 16 positions: an answer that grows past them is what transformers answers."""
    model = build("phi3-longrope")
    ours = load_decoder(save(model, tmp_path))
    prompt = token_ids(prompt_tokens).tolist()
    assert ours.generate(prompt, max_new_tokens=20, stop=[]) == hf_greedy(model, prompt, 20)


def test_an_answer_does_not_depend_on_the_batch(tiny: tuple[Any, LoadedDecoder]) -> None:
    _, ours = tiny
    prompts = [token_ids(length, seed=length).tolist() for length in (9, 30, 2)]
    options: dict[str, Any] = {"max_new_tokens": 16, "stop": [], "temperature": 1.0, "top_p": 0.9}
    together = ours.generate(prompts, seed=[5, 6, 7], **options)
    alone = [
        ours.generate(prompt, seed=[seed], **options) for prompt, seed in zip(prompts, (5, 6, 7), strict=True)
    ]
    assert together == alone


def test_one_seed_gives_each_row_its_own(tiny: tuple[Any, LoadedDecoder]) -> None:
    _, ours = tiny
    options: dict[str, Any] = {"max_new_tokens": 16, "stop": [], "temperature": 2.0}
    one, two = ours.generate([[5, 6], [5, 6]], seed=3, **options)
    assert one != two
    assert ours.generate([5, 6], seed=3, **options) == one
    assert ours.generate([5, 6], seed=4, **options) != one


def test_stop_ids_end_an_answer_and_are_left_out(tiny: tuple[Any, LoadedDecoder]) -> None:
    _, ours = tiny
    prompts = [[7, 8, 9], [20, 21]]
    first, second = ours.generate(prompts, max_new_tokens=12, stop=[])
    stop = first[5]
    expected = [answer[: answer.index(stop)] if stop in answer else answer for answer in (first, second)]
    assert ours.generate(prompts, max_new_tokens=12, stop=[stop]) == expected


def test_stop_ids_come_from_both_configurations(tmp_path: Path) -> None:
    save(build("llama"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [50, 60]}))
    assert load_decoder(tmp_path).stop == (2, 50, 60)


def test_forms_of_prompts_and_answers(bundled: LoadedDecoder) -> None:
    text = bundled.generate("The", max_new_tokens=4)
    assert isinstance(text, str)
    assert bundled.generate(["The"], max_new_tokens=4) == [text]
    ids = bundled.text.encode("The")
    answer = bundled.generate(ids, max_new_tokens=4)
    assert bundled.text.decode(answer) == text
    assert bundled.generate(torch.tensor([ids]), max_new_tokens=4) == [answer]
    assert bundled.generate([ids], max_new_tokens=0) == [[]]


def test_stream_is_the_generated_text_in_pieces(bundled: LoadedDecoder) -> None:
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3}
    pieces = list(bundled.stream("for line in", **options))
    assert len(pieces) > 5
    assert "".join(pieces) == bundled.generate("for line in", **options)


def test_stream_takes_one_prompt(bundled: LoadedDecoder) -> None:
    with pytest.raises(TorchwrightError, match=r"one prompt.*a list of 2"):
        bundled.stream(["a", "b"])
    pieces = bundled.stream(torch.tensor(bundled.text.encode("The")), max_new_tokens=4)
    assert "".join(pieces) == bundled.generate("The", max_new_tokens=4)


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TorchwrightError, match=r"tokenizer\.json cannot be read"):
        FolderTokenizer(tmp_path, None)
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TorchwrightError, match=r"tokenizer_config\.json is not a JSON object"):
        FolderTokenizer(tmp_path, None)


def test_stream_checks_before_the_first_piece(bundled: LoadedDecoder) -> None:
    with pytest.raises(TorchwrightError, match="token id -1 is out of range"):
        bundled.stream([-1])


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    """One token a byte."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    return FolderTokenizer(folder, None)


def test_stream_holds_characters_back_until_they_are_whole(byte_text: FolderTokenizer) -> None:
    stream = TextStream(byte_text)
    pieces = [stream.put(token) for token in byte_text.encode("aé€😀")]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    assert stream.rest() == ""


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 255), max_size=20))
def test_pieces_and_rest_are_the_whole_text(byte_text: FolderTokenizer, tokens: list[int]) -> None:
    stream = TextStream(byte_text)
    pieces = [stream.put(token) for token in tokens]
    assert "".join(pieces) + stream.rest() == byte_text.decode(tokens)


def test_begin_of_text_where_the_tokenizer_configuration_asks_for_it(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, tmp_path / name)
    plain = FolderTokenizer(tmp_path, 0).encode("text")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    assert FolderTokenizer(tmp_path, 0).encode("text") == [0, *(plain[1:] if plain[0] == 0 else plain)]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    assert FolderTokenizer(tmp_path, 0).encode("text") == plain


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[]], {}, "the prompt is empty"),
        ([[1], []], {}, "the prompt is empty"),
        ([], {}, "there is no prompt"),
        ([[1, VOCABULARY]], {}, rf"token id {VOCABULARY} is out of range. Allowed: 0 to {VOCABULARY - 1}"),
        ([[-3]], {}, "token id -3 is out of range"),
        ([[1] * 129], {}, "129 tokens and 64 new ones exceed the model's context.*Allowed: 128"),
        ([[1] * 120], {"max_new_tokens": 9}, "exceed the model's context"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens -1"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk 0"),
        ([[1]], {"temperature": -1}, "temperature -1"),
        ([[1]], {"topk": 3}, "unknown sampling option 'topk'; did you mean 'top_k'"),
        ([[1], [2]], {"seed": [1]}, "1 seeds for 2 prompts"),
        ("text", {}, "has no tokenizer.json"),
        ([1.5], {}, "neither texts nor token ids"),
    ],
)
def test_bad_input_is_refused(
    tiny: tuple[Any, LoadedDecoder], prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TorchwrightError, match=message):
        tiny[1].generate(prompts, **options)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "neither of them 0"),
        (torch.zeros(3, dtype=torch.long), "token ids"),
        (torch.zeros(1, 3), "float32"),
        (torch.full((1, 3), VOCABULARY), "out of range"),
        (torch.zeros(1, 129, dtype=torch.long), "exceed the model's context"),
    ],
)
def test_bad_ids_have_no_logits(tiny: tuple[Any, LoadedDecoder], ids: torch.Tensor, message: str) -> None:
    with pytest.raises(TorchwrightError, match=message):
        tiny[1].logits(ids)


def test_its_own_number_of_threads_ends_with_the_call(tiny: tuple[Any, LoadedDecoder]) -> None:
    model = tiny[1]
    seen: list[int] = []
    handle = model.decoder.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    model.threads = 1
    try:
        ids = model.generate([1, 2, 3], max_new_tokens=2, stop=[])
        model.logits(torch.tensor([[1, 2, 3]]))
    finally:
        model.threads = None
        handle.remove()
    assert set(seen) == {1}
    assert torch.get_num_threads() == before
    assert ids == model.generate([1, 2, 3], max_new_tokens=2, stop=[])
