"""The bound of reasoning before a constrained answer, followed token by token."""

from __future__ import annotations

import pytest

from torchwright.serve.formats.reasoning import REASONING_FORMATS
from torchwright.serve.grammar.thinking import Thinking
from torchwright.serve.wire.messages import ThinkingBudget

PIECES = [b"<think>", b"</think>", b"</", b"think", b">", b"a", b"{", b"<thi", b"nk>"]
ENDS = [2, 3, 4]


def thinking(tokens: int, begin: str = "<think>") -> Thinking:
    return Thinking(ThinkingBudget(begin=begin, end="</think>", end_ids=ENDS, tokens=tokens), PIECES)


def follow(made: Thinking, *tokens: int) -> Thinking:
    for token in tokens:
        assert made.forced in (None, token)
        made.accept(token)
    return made


def test_the_end_is_forced_token_by_token_once_the_budget_is_spent() -> None:
    made = follow(thinking(3), 0, 5)
    assert (made.forced, made.free) == (None, 1)
    follow(made, 5)
    assert (made.forced, made.free) == (2, 0)
    follow(made, 2)
    assert made.forced == 3
    follow(made, 3, 4)
    assert (made.forced, made.free) == (None, None)


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    for closing in ([1], [2, 3, 4]):
        made = follow(thinking(9), 0, 5, *closing)
        assert (made.forced, made.free) == (None, None)
        follow(made, *[5] * 20)


def test_an_answer_without_reasoning_has_no_bound() -> None:
    made = follow(thinking(1), 6)
    assert (made.forced, made.free) == (None, None)
    assert follow(made, *[5] * 9).forced is None


def test_space_before_the_mark_is_no_answer() -> None:
    made = Thinking(ThinkingBudget(begin="<think>", end="</think>", end_ids=ENDS, tokens=3), [*PIECES, b"\n"])
    assert follow(made, len(PIECES), 0, 5).forced == ENDS[0]


def test_a_mark_in_two_tokens_is_finished_before_the_end_is_forced() -> None:
    made = follow(thinking(1), 7)
    assert made.forced is None
    assert follow(made, 8).forced == 2


def test_an_end_that_the_model_had_begun_counts_as_text() -> None:
    made = follow(thinking(2, begin=""), 5, 2)
    follow(made, 2, 3, 4)
    assert made.free is None


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_every_format_has_the_texts_around_reasoning_that_its_grammar_has(name: str) -> None:
    form = REASONING_FORMATS[name]
    begin, end = form.thinking("none") or ("", "")
    prefix = str(form.prefix("none"))
    assert begin
    assert repr(begin)[1:-1] in prefix
    assert end
    assert repr(end)[1:-1] in prefix
    if name != "harmony":
        assert form.thinking("open") == ("", end)
        assert form.thinking("closed") is None
