"""Grammars in Lark's syntax as EBNF.

A text of the EBNF is one of the grammar. Where a grammar has `%ignore`, one ignored terminal may stand behind each
terminal of its rules. Any number of them would let a model write white space for ever.
"""

from __future__ import annotations

from torchwright.serve.grammar.lark.read import (
    Choice,
    Definition,
    Grammar,
    LarkRefused,
    Literal,
    Part,
    Pattern,
    Range,
    Reference,
    Schema,
    Times,
    read,
    unescape,
)
from torchwright.serve.grammar.schema.emit import KINDS
from torchwright.serve.grammar.schema.language import (
    ANYTHING,
    EMPTY_TEXT,
    Node,
    TooLarge,
    both,
    cat,
    literal,
    negate,
)
from torchwright.serve.grammar.schema.parts import SchemaAssertion, SchemaRefused
from torchwright.serve.grammar.schema.pattern import PatternRefused, whole
from torchwright.serve.grammar.schema.rules import GrammarRules, Overgrown, chars, quote
from torchwright.serve.grammar.schema.writer import Writer

START = "start"
SPACING = "x-guidance"
"""The key of a schema by which guidance fixes white space, as its parser wants to find it."""
SEPARATORS = {"comma": "item", "colon": "key"}
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+",
    "SIGNED_NUMBER": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "WS_INLINE": r"[ \t]{1,24}",
    "WS": r"[ \t\f\r\n]{1,24}",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n){1,24}",
}
"""Terminals of Lark's library `common` as patterns; its white space without an upper bound has one here."""
_UNKNOWN_ATTRIBUTES = {
    "temperature": "a request has one temperature",
    "max_tokens": "use the request's own limit of tokens",
    "stop_capture": "captures are the client's",
}


def is_lark(text: str) -> bool:
    """Check whether a grammar is in Lark's syntax rather than EBNF."""
    return "::=" not in text


def lark_grammar(text: str) -> str:
    """Return a grammar in EBNF with the rule `root`. Raises `LarkRefused`, and `SchemaRefused` for a schema in it."""
    return _Writer(read(text)).write()


class _Writer:
    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._rules = GrammarRules()
        self._spacing: dict[str, str] = {}
        """Rules of the white space in JSON, where a schema fixes it."""

    def write(self) -> str:
        definitions = self._grammar.definitions
        if START not in definitions:
            raise LarkRefused(f"there is no rule '{START}'")
        try:
            bodies = {_rule(name): self._definition(name, one) for name, one in definitions.items()}
            for name, source in self._grammar.imported.items():
                bodies[_rule(name)] = self._common(name, source)
            root = _rule(START)
            if self._grammar.ignored:
                options = [self._part(part, spaced=False) for part in self._grammar.ignored]
                bodies["ignored"] = " | ".join(['""', *options])
                root = f"ignored {root}"
            found = {**self._rules.bodies(root), **self._spacing, **bodies}
        except (Overgrown, RecursionError):
            raise LarkRefused("it has too many rules") from None
        return "\n".join(f"{name} ::= {body}" for name, body in found.items())

    def _definition(self, name: str, definition: Definition) -> str:
        asked = definition.attributes
        for attribute, reason in _UNKNOWN_ATTRIBUTES.items():
            if attribute in asked:
                raise LarkRefused(f"line {definition.line}: {attribute} is not supported: {reason}")
        spaced = bool(self._grammar.ignored) and not name.isupper()
        if "lazy" in asked or "stop" in asked or "suffix" in asked:
            return self._lazy(name, definition)
        return self._part(definition.body, spaced=spaced)

    def _lazy(self, name: str, definition: Definition) -> str:
        """Return a terminal that ends where its stop text first comes; `suffix` and `lazy` keep that text."""
        asked = definition.attributes
        node = self._terminal(definition.body, definition.line, frozenset([name]))
        if "lazy" in asked:  # no text that goes on from another one of the language
            longer = cat(node, both(ANYTHING, negate(EMPTY_TEXT)))
            return self._language(both(node, negate(longer)), definition.line)
        given = asked.get("stop") or asked.get("suffix") or '""'
        if not given.startswith('"'):
            raise LarkRefused(f"line {definition.line}: stop and suffix are strings here")
        end = literal(unescape(given[1:-1]))
        if given == '""':
            return self._language(node, definition.line)
        without = both(node, negate(cat(ANYTHING, cat(end, ANYTHING))))
        body = self._language(without, definition.line)
        return f"{body} {quote(unescape(given[1:-1]))}" if "suffix" in asked else body

    def _terminal(self, part: Part, line: int, open: frozenset[str]) -> Node:
        """Return the language of a terminal; raise `LarkRefused` for any other part."""
        match part:
            case Pattern():
                return self._pattern(part)
            case Literal(any_case=False):
                return literal(part.text)
            case Choice(options=((one,),)):
                return self._terminal(one, line, open)
            case Reference() if part.name in self._grammar.definitions and part.name not in open:
                inner = self._grammar.definitions[part.name]
                return self._terminal(inner.body, line, open | {part.name})
        raise LarkRefused(f"line {line}: lazy, stop and suffix are for one pattern or string")

    def _part(self, part: Part, *, spaced: bool) -> str:
        """Return the expression of a part; `spaced` says whether ignored text may follow each terminal."""
        after = " ignored" if spaced else ""
        match part:
            case Choice():
                return "(" + " | ".join(self._sequence(one, spaced) for one in part.options) + ")"
            case Times():
                return self._rules.repeated(
                    f"({self._part(part.part, spaced=spaced)})", part.least, part.most
                )
            case Reference():
                known = self._grammar.definitions.keys() | self._grammar.imported.keys()
                if part.name not in known:
                    raise LarkRefused(f"'{part.name}' is not defined")
                return _rule(part.name) + (after if part.name.isupper() else "")
            case Literal(any_case=True):
                pairs = (sorted({c.lower(), c.upper()}) for c in part.text)
                sets = ["(" + " | ".join(map(quote, pair)) + ")" for pair in pairs]
                return " ".join(sets or ['""']) + after
            case Literal():
                return quote(part.text) + after
            case Range():
                return chars(((ord(part.first), ord(part.last)),)) + after
            case Pattern():
                return self._language(self._pattern(part), 0) + after
            case Schema():
                return self._schema(part) + after

    def _sequence(self, parts: tuple[Part, ...], spaced: bool) -> str:
        return " ".join(self._part(part, spaced=spaced) for part in parts) or '""'

    def _pattern(self, part: Pattern) -> Node:
        if unknown := set(part.flags) - {"s", "u"}:
            raise LarkRefused(f"/{part.regex}/{part.flags}: the flag {min(unknown)} is not supported")
        try:
            return whole(_with_lines(part.regex, everywhere="s" in part.flags))
        except PatternRefused as refused:
            raise LarkRefused(f"/{part.regex}/: {refused}") from None

    def _common(self, name: str, source: str) -> str:
        if source not in COMMON:
            raise LarkRefused(f"{name}: Lark's library common has no '{source}' here")
        return self._language(whole(COMMON[source]), 0)

    def _language(self, node: Node, line: int) -> str:
        try:
            found = self._rules.language(node, quoted=False)
        except TooLarge:
            found = None
        if found is None:
            where = f"line {line}: " if line else ""
            raise LarkRefused(f"{where}a pattern matches no text, or is too large")
        return f"({found})"

    def _schema(self, part: Schema) -> str:
        spacing = part.schema.get(SPACING) if isinstance(part.schema, dict) else None
        if isinstance(spacing, dict) and spacing.get("whitespace_flexible") is False:
            marks = {name: spacing.get(f"{key}_separator") for name, key in SEPARATORS.items()}
            self._spacing = {"ws": '""'} | {
                name: quote(mark) for name, mark in marks.items() if isinstance(mark, str)
            }
        writer = Writer(part.schema, KINDS)
        writer.rules = self._rules
        root = writer.node([SchemaAssertion(part.schema, "#")])
        if root is None:
            raise SchemaRefused("#", "no value satisfies it")
        return root


def _rule(name: str) -> str:
    """Return a name in EBNF that no rule of ours has."""
    return "lark_" + name.replace("-", "__")


def _with_lines(regex: str, *, everywhere: bool) -> str:
    """Return a pattern in which the dots that take line ends, those of the flag s, say so themselves."""
    found, groups, at = list[str](), [everywhere], 0
    while at < len(regex):
        piece = regex[at]
        if piece == "\\":
            piece = regex[at : at + 2]
        elif piece == "[":
            end = at + 1 + regex[at + 1 : at + 3].startswith("]") + 2 * regex[at + 1 :].startswith("^]")
            while end < len(regex) and regex[end] != "]":
                end += 2 if regex[end] == "\\" else 1
            piece = regex[at : end + 1]
        elif regex.startswith("(?s:", at):
            groups.append(True)
            found.append("(?:")
            at += 4
            continue
        elif piece == "(":
            groups.append(groups[-1])
        elif piece == ")" and len(groups) > 1:
            groups.pop()
        elif piece == "." and groups[-1]:
            at += 1
            found.append(r"(?:.|[\n\r\u2028\u2029])")
            continue
        found.append(piece)
        at += len(piece)
    return "".join(found)
