"""Schemas of arguments that are written as elements: Qwen3-Coder, Seed-OSS and GLM.

A string stands between its tags without quotes, and every other value as JSON. The grammar allows only texts that the
parser (`value_of`) reads back as a value that satisfies the schema. No text holds the tag by which its value ends.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

from torchwright.serve.grammar.schema.emit import KINDS
from torchwright.serve.grammar.schema.expand import EVERY, TYPES, Alternative
from torchwright.serve.grammar.schema.language import (
    ANY,
    ANYTHING,
    EMPTY_TEXT,
    Alt,
    Cat,
    Chars,
    Node,
    Repeat,
    TooLarge,
    alt,
    both,
    cat,
    complement,
    edge,
    lengths,
    letters,
    literal,
    matches,
    negate,
    repeat,
    union,
    within,
)
from torchwright.serve.grammar.schema.objects import members
from torchwright.serve.grammar.schema.parts import SchemaAssertion, SchemaRefused
from torchwright.serve.grammar.schema.rules import Overgrown, quote
from torchwright.serve.grammar.schema.scalars import texts
from torchwright.serve.grammar.schema.writer import Writer, meant
from torchwright.serve.grammar.values import WORDS, is_stripped, schema_of, types_of

Style = Literal["qwen_xml", "glm_xml"]
LINE = '"\\n"?'
SPACES = union((code, code) for code in range(0x3001) if chr(code).isspace())
NOT_SPACE = Chars(complement(SPACES))
TAG = ((ord("<"), ord("<")),)
NOT_TAG = Chars(complement(TAG))
COUNTED = 32
"""Longest text of a bounded length that may have a <: each length and place in an end takes a state of its own."""
TRIMMED = alt(EMPTY_TEXT, NOT_SPACE, cat(NOT_SPACE, ANYTHING, NOT_SPACE))
"""Texts without white space around them."""
JSON_BEGINS = {"number": "-0123456789", "integer": "-0123456789", "object": "{", "array": "["}
"""Type → the first characters of its JSON texts. A string's is a quote; words are compared as a whole."""


def _any_case(word: str) -> Node:
    cases = ({character.lower(), character.upper()} for character in word)
    return cat(*(Chars(union((ord(one), ord(one)) for one in case)) for case in cases))


def _read_as_strings(read: set[str]) -> Node:
    """Return texts that are read as they are, where other types are read, too."""
    begins = {'"', *(one for kind in read or JSON_BEGINS for one in JSON_BEGINS.get(kind, ""))}
    first = Chars(complement(union([*SPACES, *((ord(one), ord(one)) for one in begins)])))
    words = (negate(cat(_any_case(word), repeat(Chars(SPACES), 0, None))) for word in WORDS)
    return both(alt(EMPTY_TEXT, cat(first, ANYTHING)), *words)


NAME = repeat(Chars(complement(union([*SPACES, (ord("<"), ord(">"))]))), 1, None)
"""Names that tags can hold: the characters from < to > are < = and >."""


@dataclass(frozen=True)
class _Elements:
    """Members as elements; see `MemberForm`."""

    before: str
    between: str
    after: str
    ends: tuple[str, ...]
    """Texts by which a value ends, whatever follows."""
    lines: bool
    """True if the value excludes a line break on either side."""
    root: dict[str, Any]
    comma = f"{LINE} "
    end = '""'

    def listed(self, writer: Writer, name: str, parts: list[SchemaAssertion]) -> str | None:
        if not matches(NAME, name):
            return None
        body = self._value(writer, schema_of(name, self.root), parts)
        return None if body is None else self._element(quote(name), body)

    def other(self, writer: Writer, naming: Node, parts: list[SchemaAssertion]) -> str | None:
        key = writer.rules.language(both(naming, NAME), quoted=False)
        body = self._value(writer, None, parts)
        return None if key is None or body is None else self._element(key, body)

    def _element(self, key: str, body: str) -> str:
        return f"{quote(self.before)} {key} {self.between} {body} {quote(self.after)}"

    def _value(self, writer: Writer, schema: Any, parts: list[SchemaAssertion]) -> str | None:
        """Return the texts that are read as values for which all parts hold."""
        read = types_of(schema, self.root)
        bodies = list[str]()
        for one in writer.alternatives(parts):
            if meant(one) == EVERY and one.values is None and not one.banned:  # any value, so any text
                bodies += self._raw(writer, ANYTHING)
                continue
            bodies += self._json(writer, one, read)
            if "string" in meant(one):
                bodies += self._strings(writer, one, read, stripped=is_stripped(schema))
        return f"({' | '.join(dict.fromkeys(bodies))})" if bodies else None

    def _json(self, writer: Writer, one: Alternative, read: set[str]) -> list[str]:
        """Return the values of an alternative that are written as JSON, and read as such."""
        if read == {"string"}:
            return []
        kinds = (
            EVERY if "string" not in read else frozenset[str]().union(*(TYPES.get(k, set()) for k in read))
        )
        kinds = kinds if read else kinds - TYPES["string"]  # a schema without types keeps a string's quotes
        types = meant(one) & kinds
        values = writer.bodies(Alternative(one.parts, types, one.values, one.banned)) if types else []
        return [f"{LINE} ({body}) {LINE}" if self.lines else body for body in values]

    def _strings(self, writer: Writer, one: Alternative, read: set[str], *, stripped: bool) -> list[str]:
        """Return the strings of an alternative that are written without quotes, and read as strings."""
        language = texts(one)
        if one.values is not None:
            kept = (item for item in one.values if isinstance(item, str) and writer.satisfies(one, item))
            language = alt(*map(literal, kept))
        try:
            if read != {"string"}:
                if isinstance(language, Repeat) and (language.most or language.least) > COUNTED:
                    raise TooLarge  # known beforehand: an automaton that counts would compare words
                language = both(language, _read_as_strings(read))
            elif stripped:
                language = _trimmed(language)
            return self._raw(writer, language, trimmed=read == {"string"} and stripped)
        except TooLarge:
            if read > {"string"}:
                return []  # JSON has these strings, too
            raise SchemaRefused(one.parts[0].path, "the grammar of its string grows too large") from None

    def _raw(self, writer: Writer, language: Node, *, trimmed: bool = False) -> list[str]:
        """Return the texts of a language between their tags. Raises `TooLarge`."""
        if not self.lines:
            return [] if (body := self._apart(writer, language)) is None else [body]
        lined = self._apart(writer, language)
        inline = self._apart(writer, language if trimmed else _trimmed(language))
        found = [] if lined is None else [f'"\\n" {lined} "\\n"']
        return found if inline is None else [*found, inline]

    def _apart(self, writer: Writer, language: Node) -> str | None:
        """Return the texts of a language without those that hold an end. Raises `TooLarge`."""
        if not within(letters(language), TAG):
            return writer.rules.language(language, quoted=False)
        least, most = lengths(language)
        for held in (self.ends, ("</",)) if max(least, most or 0) <= COUNTED else ():
            banned = (negate(cat(ANYTHING, literal(end), ANYTHING)) for end in held)
            with contextlib.suppress(TooLarge):
                return writer.rules.language(both(language, *banned), quoted=False)
        return writer.rules.language(_without_tags(language), quoted=False)


def _trimmed(language: Node) -> Node:
    """Return the texts of a language that have no white space around them."""
    if not any(within(edge(language, last=last), SPACES) for last in (False, True)):
        return language
    if not isinstance(language, Repeat) or language.node != ANY or language.most is None:
        return both(language, TRIMMED)
    # Counted without an automaton, which would take a state for each length.
    least, most = language.least, language.most
    found = [cat(NOT_SPACE, repeat(ANY, max(0, least - 2), most - 2), NOT_SPACE)] if most > 1 else []
    return alt(*found, *([NOT_SPACE] if least <= 1 <= most else []), *([EMPTY_TEXT] if not least else []))


def _without_tags(language: Node) -> Node:
    """Return the texts of a language that have no <."""
    match language:
        case Chars():
            return Chars(within(language.ranges, NOT_TAG.ranges))
        case Cat():
            return cat(_without_tags(language.first), _without_tags(language.rest))
        case Repeat():
            return repeat(_without_tags(language.node), language.least, language.most)
        case Alt():
            return alt(*map(_without_tags, language.nodes))
        case _:
            return both(language, repeat(NOT_TAG, 0, None))


def elements_grammar(schema: Any, style: Style) -> str:
    """Return a grammar in EBNF of the elements of arguments that satisfy a schema. Raises `SchemaRefused`."""
    root = schema if isinstance(schema, dict) else {}
    form = (
        _Elements("<parameter=", quote(">"), "</parameter>", ("</parameter>", "</function>"), True, root)
        if style == "qwen_xml"
        else _Elements(
            "<arg_key>",
            f"{quote('</arg_key>')} {LINE} {quote('<arg_value>')}",
            "</arg_value>",
            ("</arg_value>",),
            False,
            root,
        )
    )
    writer = Writer(schema, KINDS, escaping="<")
    try:
        parts = [SchemaAssertion(schema, "#"), SchemaAssertion({"type": "object"}, "#/type")]
        found = [_arguments(writer, one, form) for one in writer.alternatives(parts)]
    except (Overgrown, RecursionError):
        raise SchemaRefused("#", "the grammar grows too large") from None
    bodies = [body for body in found if body is not None]
    if not bodies:
        raise SchemaRefused("#", "no value satisfies it")
    return writer.text(" | ".join(dict.fromkeys(bodies)))


def _arguments(writer: Writer, one: Alternative, form: _Elements) -> str | None:
    if one.values is not None:
        raise SchemaRefused(one.parts[0].path, "whole objects are not enforced in this form of calls")
    try:
        return members(writer, one, form)
    except TooLarge:
        raise SchemaRefused(one.parts[0].path, "the grammar of its names grows too large") from None
