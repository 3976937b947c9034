"""Text that comes token by token: whole characters, stop strings, tokens as bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchwright.core.errors import ModelError
from torchwright.hub.text_stream import HELD_TOKENS, INCOMPLETE, TextStream
from torchwright.serve.folder import find
from torchwright.serve.text.codec import StopStrings, Tokenizer

TOKENIZER = Tokenizer(find(None).folder)
TEXT = "Zwölf Boxkämpfer 🥊 jagen\n\tVictor; naïve 日本語 \\x"


def pieces(ids: list[int], sizes: list[int]) -> list[str]:
    """A stream's pieces, with as many tokens at a time as `sizes` say."""
    stream, found, at = TextStream(TOKENIZER), [], 0
    for size in sizes:
        found.append(stream.put(*ids[at : at + size]))
        at += size
    return [*found, stream.put(*ids[at:]), stream.rest()]


@given(st.lists(st.integers(1, 4), max_size=20))
def test_pieces_are_whole_characters_and_together_the_text(sizes: list[int]) -> None:
    ids = TOKENIZER.encode(TEXT, special=False)
    found = pieces(ids, sizes)
    assert "".join(found) == TEXT
    assert INCOMPLETE not in "".join(found)


def test_a_cut_character_comes_with_the_rest() -> None:
    ids = TOKENIZER.encode("a🥊", special=False)[:-1]
    stream = TextStream(TOKENIZER)
    assert stream.put(*ids) == "a"
    assert "a" + stream.rest() == TOKENIZER.decode(ids)


def test_bytes_that_are_no_text_are_not_held_for_ever() -> None:
    half = TOKENIZER.encode("é", special=False)[0]
    assert TOKENIZER.decode([half]) == INCOMPLETE
    stream = TextStream(TOKENIZER)
    shown = [stream.put(half) for _ in range(3 * HELD_TOKENS)]
    assert sum(map(len, shown)) >= 2 * HELD_TOKENS


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_stop_strings_are_found_wherever_pieces_end(text: str, stops: list[str], sizes: list[int]) -> None:
    finder, shown, at = StopStrings(stops), "", 0
    found = None
    for size in [*sizes, len(text)]:
        piece, found = finder.put(text[at : at + size])
        shown, at = shown + piece, at + size
        if found is not None:
            break
        # Nothing is shown that a stop string may begin with.
        assert not any(shown.endswith(stop) for stop in stops)
    if found is None:
        shown += finder.rest()
    first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    # A stop string may end in a piece before an earlier one that is longer has ended.
    ends = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    assert (found is None) == (first is None)
    if found is None:
        assert shown == text
    else:
        assert text.startswith(shown + found)
        assert ends is not None
        assert len(shown) <= ends


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).put("abc") == ("abc", None)


def test_text_that_was_no_stop_string_is_shown() -> None:
    finder = StopStrings(["</end>"])
    assert finder.put("a </e") == ("a ", None)
    assert finder.put("m") == ("</em", None)
    assert finder.put("</end> b") == ("", "</end>")


def test_tokens_are_text_and_bytes() -> None:
    ids = TOKENIZER.encode("é🥊 x", special=False)
    raw = b"".join(bytes(TOKENIZER.token(id)[1]) for id in ids)
    assert raw.decode() == "é🥊 x"
    assert TOKENIZER.token(0) == ("<|begin|>", list(b"<|begin|>"))
    assert TOKENIZER.token(10**6) == ("", [])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(tmp_path)


def test_the_begin_token_is_added_where_the_settings_ask_for_it(tmp_path: Path) -> None:
    source = find(None).folder / "tokenizer.json"
    data = json.loads(source.read_text("utf-8"))
    data["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert Tokenizer(tmp_path).encode("a") == TOKENIZER.encode("a", special=False)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"add_bos_token": true, "bos_token": {"content": "<|begin|>"}}'
    )
    assert Tokenizer(tmp_path).encode("a") == TOKENIZER.encode("a")
