"""Text that appears token by token, on a tokenizer of single bytes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from torchwright.hub.text_stream import HELD_TOKENS, INCOMPLETE, TextStream


class Bytes:
    """A token is a byte; a space is left out where a text begins, as many tokenizers do."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace").removeprefix(" ")


@pytest.mark.parametrize("seed", range(20))
def test_all_pieces_and_the_rest_are_the_text_however_tokens_are_grouped(seed: int):
    draw = random.Random(seed)
    text = "".join(draw.choices(" aé€😀\n", k=60))
    tokens, stream, pieces = list(text.encode()), TextStream(Bytes()), list[str]()
    while tokens:
        count = draw.randint(1, 5)
        pieces.append(stream.put(*tokens[:count]))
        del tokens[:count]
    assert "".join(pieces) + stream.rest() == text.removeprefix(" ")
    assert not any(INCOMPLETE in piece for piece in pieces)


def test_a_part_of_a_character_is_held_back_until_it_is_whole():
    stream = TextStream(Bytes())
    assert [stream.put(token) for token in "€".encode()] == ["", "", "€"]
    assert stream.rest() == ""


def test_what_never_becomes_a_character_is_shown_and_does_not_hold_the_rest_back():
    stream = TextStream(Bytes())
    pieces = [stream.put(0xFF) for _ in range(HELD_TOKENS)]
    assert pieces == [""] * (HELD_TOKENS - 1) + [INCOMPLETE * HELD_TOKENS]
    assert stream.put(*b"ok") == "ok"


def test_an_unfinished_character_is_the_rest_and_a_stream_can_be_used_again():
    stream = TextStream(Bytes())
    assert stream.put(*"a€".encode()[:-1]) == "a"
    assert stream.rest() == INCOMPLETE
    assert stream.put(*b" b") == "b"


def test_it_needs_no_torch():
    code = "import sys, torchwright.hub.text_stream; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
