"""Grammars in Lark's syntax: the texts that they allow, and what is refused by its line."""

from __future__ import annotations

import contextlib
import random
import re

import pytest
import xgrammar
from ebnf_texts import Texts
from schema_support import accepts, compiler

from torchwright.serve.grammar.lark.read import LarkRefused, read
from torchwright.serve.grammar.lark.write import COMMON, is_lark, lark_grammar

CALCULATOR = r"""
// Lark's own example, without its tree.
?start: sum
      | NAME "=" sum    -> assign_var
?sum: product
    | sum "+" product   -> add
    | sum "-" product   -> sub
?product: atom
    | product "*" atom
?atom: NUMBER           -> number
     | "-" atom         -> neg
     | NAME             -> var
     | "(" sum ")"
%import common.CNAME -> NAME
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
SQL = r"""
start: "SELECT"i " " columns " " "FROM"i " " NAME
columns: NAME ("," NAME)*
NAME: /[a-z_]+/
"""
GUIDANCE = r"""
%llguidance {}

start: "Name: " name "\nAge: " age "\n" body
name[capture]: /[A-Z][a-z]{1,8}/
age[capture="years"]: /[0-9]{1,2}/
body: %json {
  "type": "object",
  "properties": {"a": {"type": "integer"}, "b": {"enum": ["x: y", "z"]}},
  "required": ["a", "b"]
}
"""


def grammar(text: str) -> xgrammar.CompiledGrammar:
    return compiler().compile_grammar(xgrammar.Grammar.from_ebnf(lark_grammar(text)))


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        (CALCULATOR, ["x = 1 + 2*(3 - y)", "12", "-x", "((4))", "a=1", "3.5e2*k"], ["", "1 +", "(1", "=", "x = = 1"]),
        (SQL, ["select a,b from t", "SELECT x FROM y_z"], ["select a from", "select from t", "SELECTa FROM t"]),
        (GUIDANCE, ['Name: Ada\nAge: 36\n{"a": 1, "b": "x: y"}'], ['Name: ada\nAge: 3\n{"a": 1, "b": "z"}']),
        ('start: "a"~2..3 "b"{2} "c"{1,} "d"{,1} "e"~2', ["aabbcee", "aaabbcccdee"], ["abbcee", "aabbcde", "aabbcdde"]),
        ('start: ["x"] ("y" | "z")+ "0".."9"', ["xy5", "zzy0"], ["x5", "xya", "y55"]),
        (r'start: "a\n\x41\u00e9\"\\"', ['a\nAé"\\'], ["a"]),
        (r"start: /a\/b[\/.]?./", ["a/bx", "a/b./", "a/b//"], ["a/b", "a/b\n"]),
        (r"start: /a.c/s /(?s:x.)y./", ["a\ncx\nyz"], ["a\ncx\ny\n"]),
        ('start: thing\nthing[stop="."]: /[a-z.]*/', ["abc", ""], ["a.b"]),
        ('start: thing "!"\nthing[suffix="."]: /[a-z.]*/', ["abc.!"], ["abc!", "a.b.!"]),
        ("start: thing\nthing[lazy]: /[a-z]*;/", ["ab;"], ["ab;c;", "ab"]),
        ('start: A_B | other-rule\nA_B: "x" | "y" A_B\nother-rule: "q"\n', ["x", "yyx", "q"], ["y"]),
        ('start.2: "a" # a comment\n  // another\n  | "b"\n', ["a", "b"], ["c"]),
        ("start: ESCAPED_STRING\n%import common (ESCAPED_STRING, INT)", ['"a\\"b"', '""'], ['"', '"a\nb"']),
        (
            'start: %json {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, '
            '"required": ["a", "b"], "x-guidance": {"whitespace_flexible": false, "item_separator": ", ", '
            '"key_separator": ": "}}',
            ['{"a": 1, "b": 2}'],
            ['{"a":1, "b": 2}', '{"a": 1,"b": 2}', '{ "a": 1, "b": 2}'],
        ),
        ('start: "a"? ignored_not\nignored_not: ', ["a", ""], ["b"]),
    ],
)  # fmt: skip
def test_a_grammar_allows_its_texts_and_no_others(text: str, yes: list[str], no: list[str]) -> None:
    made = grammar(text)
    assert [found for found in yes if not accepts(made, found)] == []
    assert [found for found in no if accepts(made, found)] == []


@pytest.mark.parametrize("name", COMMON)
def test_each_terminal_of_the_library_is_its_pattern(name: str) -> None:
    texts = Texts(lark_grammar(f"start: {name}\n%import common.{name}"))
    choose = random.Random()
    for _ in range(50):
        text = texts.draw(choose)
        assert re.fullmatch(COMMON[name], text), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('begin: "a"', "there is no rule 'start'"),
        ("start: other", "'other' is not defined"),
        ('start: "a"\nstart: "b"', "line 2: 'start' is defined twice"),
        ('start: ("a"', "line 1: '(' is not closed"),
        ('start: "a', "line 1: the string is not closed"),
        ("start: /a", "the pattern is not closed"),
        ("start: /(?<=a)b/", "(?<=a)b"),
        ("start: /a/x", "the flag x is not supported"),
        ("start: <|special|>", "line 1: this is not understood"),
        ('start: "b".."a"', "a range"),
        ("%declare A\nstart: A", "%declare is not supported"),
        ("%import other.X\nstart: X", "only names of Lark's library"),
        ("%import common.NOTHING\nstart: NOTHING", "has no 'NOTHING' here"),
        ("start: a\na[max_tokens=3]: /.*/", "line 2: max_tokens is not supported"),
        ("start: a\na[temperature=0.3]: /.*/", "temperature is not supported"),
        ('start: a\na[lazy]: "x" "y" | "z"', "for one pattern"),
        ("start: %json {", "this is not JSON"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "100 parentheses"),
        ("just words", "a rule is written as name: …"),
        ("start: a{x}", "this is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, words: str) -> None:
    with pytest.raises(LarkRefused) as refused:
        lark_grammar(text)
    assert words in str(refused.value)


def test_a_schema_that_no_value_satisfies_is_refused() -> None:
    from torchwright.serve.grammar.schema.parts import SchemaRefused

    with pytest.raises(SchemaRefused):
        lark_grammar('start: %json {"enum": []}')


def test_lark_is_told_from_ebnf() -> None:
    assert is_lark('start: "a"')
    assert not is_lark('root ::= "a"')


def test_any_bytes_are_read_or_refused() -> None:
    choose = random.Random()
    pieces = [
        "start",
        ":",
        '"a"',
        "/b/",
        "(",
        ")",
        "[",
        "]",
        "|",
        "*",
        "~2",
        "{1,2}",
        "%json",
        "{}",
        "\n",
        "%",
        "?",
        "->",
    ]
    for _ in range(2000):
        text = " ".join(choose.choice(pieces) for _ in range(choose.randint(1, 12)))
        with contextlib.suppress(LarkRefused):
            read(f"start: {text}")
