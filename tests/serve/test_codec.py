"""Text in and out of token ids: an answer's text is what the prompt's grows by, for every kind of tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizer_support import KINDS, save

from torchwright.hub.text_stream import INCOMPLETE, TextStream
from torchwright.serve.text.codec import CONTEXT, StopStrings, Tokenizer

TEXTS = [
    "Hello world again",
    "Hello  world\n  a b",
    " a",
    "Hello",
    "a😀b é😀😀 world",
    "日本語😀 Hello",
    "Hello." * 20 + "日本" * 20 + " world",
]


def stream_of(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """The answer's text, token by token, after the prompt."""
    stream = TextStream(tokenizer, *tokenizer.context(prompt))
    return "".join(stream.put(token) for token in answer) + stream.rest()


@pytest.mark.plain("text6-metaspace always", "text6-metaspace never")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_is_what_the_text_of_the_prompt_grows_by(tmp_path: Path, kind: str, text: str) -> None:
    save(kind, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    for split in range(1, len(ids) + 1):
        prompt, answer = ids[:split], ids[split:]
        whole = tokenizer.decode(ids)
        before = tokenizer.whole(prompt)
        assert INCOMPLETE not in before or kind == "word piece"
        found = stream_of(tokenizer, prompt, answer)
        assert before + found == whole if answer else found == ""
        # Pieces of an answer that come together are the same text.
        stream = TextStream(tokenizer, *tokenizer.context(prompt))
        assert stream.put(*answer) + stream.rest() == found


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_any_order_are_decoded_as_after_the_prompt(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path)
    tokenizer, draw = Tokenizer(tmp_path), random.Random(0)
    parts = [tokenizer.encode(word, special=False) for word in ("Hello world", "a b!", "again", " é", "😀")]
    parts += [[0], [1], [2]]  # special tokens are no text, wherever they stand
    for _ in range(60):
        ids = tokenizer.encode("Hello") + [id for part in draw.choices(parts, k=30) for id in part]
        split = draw.randrange(1, len(ids))
        prompt, answer = ids[:split], ids[split:]
        if tokenizer.decode(ids).startswith(tokenizer.decode(prompt)):
            assert tokenizer.whole(prompt) + stream_of(tokenizer, prompt, answer) == tokenizer.decode(ids)


def test_a_first_word_keeps_its_space_after_a_prompt_and_has_none_alone(tmp_path: Path) -> None:
    save("sentencepiece", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    hello, world = tokenizer.encode("Hello"), tokenizer.encode("world", special=False)
    assert stream_of(tokenizer, hello, world) == " world"
    assert stream_of(tokenizer, [1], world) == "world"  # as the text of both is
    chat = TextStream(tokenizer)
    assert chat.put(*world) == "world"  # a text of its own, as transformers decodes an answer


def test_a_prompt_that_ends_inside_of_a_character_leaves_it_to_the_answer(tmp_path: Path) -> None:
    for kind in ("sentencepiece", "byte level"):
        save(kind, tmp_path)
        tokenizer = Tokenizer(tmp_path)
        ids = tokenizer.encode("a😀")
        assert tokenizer.whole(ids[:-1]) == "a"
        assert stream_of(tokenizer, ids[:-1], ids[-1:]) == "😀"
        unknown = tokenizer.encode("a\ufffd")
        assert tokenizer.whole(unknown) == "a\ufffd"  # which the prompt's own text has
        assert stream_of(tokenizer, unknown, tokenizer.encode(".", special=False)[-1:]) == "."


def test_a_long_prompt_is_not_decoded_from_its_beginning(tmp_path: Path) -> None:
    save("sentencepiece", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("Hello world " * 1000)
    assert len(tokenizer.context(ids)[0]) == CONTEXT
    assert tokenizer.context([1] * 100)[0] == [1] * 100  # nothing to see before it


def test_a_stop_text_is_found_across_tokens_from_the_first_space_on(tmp_path: Path) -> None:
    save("sentencepiece", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    stream = TextStream(tokenizer, *tokenizer.context(tokenizer.encode("Hello")))
    stops = StopStrings([" world a"])
    found = [stops.put(stream.put(token)) for token in tokenizer.encode("world again", special=False)]
    assert found[-1] == ("", " world a")


@pytest.mark.parametrize("token", ["\ud800", {"content": "\ud800"}, 7])
def test_a_special_token_that_cannot_be_one_is_none(tmp_path: Path, token: object) -> None:
    save("sentencepiece", tmp_path)
    assert Tokenizer(tmp_path)._id(token) is None
