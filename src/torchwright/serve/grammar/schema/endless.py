"""Rules of a grammar that no finite text satisfies: each way to satisfy one leads back to it.

A schema that requires itself makes such a rule. An answer would follow it until its tokens end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

TOKENS = re.compile(
    r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|(?P<rule>[a-z]\w*)|(?P<count>[*+?]|\{\d+(?:,\d*)?\})|(?P<mark>[()|])'
)
Sequence = list[Any]
"""Rules, and parts in brackets, that all have to be satisfied; what may be left out is not among them."""
Alternatives = list[Sequence]


def endless(bodies: Mapping[str, str]) -> list[str]:
    """Return the rules without a finite text that the rule "root" can reach, in the order of `bodies`."""
    rules = {name: _Body(body) for name, body in bodies.items()}
    finite: set[str] = set()
    while True:
        # Most rules name rules that come after them.
        found = {name for name in reversed(rules) if name not in finite and _ends(rules[name].needed, finite)}
        if not found:
            break
        finite |= found
    reached, waiting = {"root"}, ["root"]
    while waiting:
        new = rules[waiting.pop()].named - reached
        reached |= new
        waiting.extend(new)
    return [name for name in rules if name in reached and name not in finite]


def _ends(alternatives: Alternatives, finite: set[str]) -> bool:
    return any(
        all(part in finite if isinstance(part, str) else _ends(part, finite) for part in sequence)
        for sequence in alternatives
    )


class _Body:
    """A rule's body: its indispensable parts, and all rules that it names."""

    def __init__(self, text: str) -> None:
        self.named: set[str] = set()
        self.needed = self._alternatives(TOKENS.finditer(text))

    def _alternatives(self, tokens: Iterator[re.Match[str]]) -> Alternatives:
        """Read up to a closing bracket, or to the end."""
        found: Alternatives = [[]]
        for token in tokens:
            if rule := token["rule"]:
                self.named.add(rule)
                found[-1].append(rule)
            elif token["mark"] == "(":
                found[-1].append(self._alternatives(tokens))
            elif token["mark"] == "|":
                found.append([])
            elif token["mark"] == ")":
                break
            elif count := token["count"]:
                if count in "*?" or count.startswith("{0"):
                    found[-1].pop()
            else:
                found[-1].append([[]])  # characters
        return found
