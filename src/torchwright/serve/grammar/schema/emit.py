"""Schemas written as grammars.

The grammar allows no text that violates the schema. It need not allow every text: properties come in the schema's
order, objects that list properties have no others unless the schema says so, and numbers have bounded digits.
"""

from __future__ import annotations

from typing import Any

from torchwright.serve.grammar.schema.arrays import array
from torchwright.serve.grammar.schema.objects import object_
from torchwright.serve.grammar.schema.parts import SchemaAssertion, SchemaRefused
from torchwright.serve.grammar.schema.rules import Overgrown
from torchwright.serve.grammar.schema.scalars import number, text
from torchwright.serve.grammar.schema.writer import Writer

KINDS = {"string": text, "number": number, "array": array, "object": object_}


def schema_grammar(schema: Any) -> str:
    """Return a grammar in EBNF of JSON texts that satisfy a schema. Raises `SchemaRefused`."""
    writer = Writer(schema, KINDS)
    try:
        root = writer.node([SchemaAssertion(schema, "#")])
    except (Overgrown, RecursionError):
        raise SchemaRefused("#", "the grammar grows too large") from None
    if root is None:
        raise SchemaRefused("#", "no value satisfies it")
    return writer.text(root)
