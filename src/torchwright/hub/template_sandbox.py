"""The sandbox of chat templates: jinja's, without evaluation while parsing and without results of any size."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import TrackingCodeGenerator
from jinja2.nodes import CallBlock, ContextReference, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

GENERATION = "generation"
MARKS = "generation_marks"
"""Key in a template's context for the marks around the assistant's words."""
LONGEST_RESULT = 10_000_000
"""Characters, items or bits that one operator may make; prompts are far shorter."""


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, by which training finds the assistant's words: what is inside."""

    tags = {GENERATION}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside", [ContextReference()]), [], [], body).set_lineno(line)

    def _inside(self, context: Context, caller: Any) -> str:
        begin, end = context[MARKS]
        return f"{begin}{caller()}{end}"


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox for templates of models.

    `optimized=False` and `finalize` keep jinja from computing constants while it parses: `'a' * 3_000_000_000` would be
    made by whoever only opens the template.
    """

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_size(_size(left) * _number(right), _size(right) * _number(left))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _check_size(*sizes: int) -> None:
    if max(sizes) > LONGEST_RESULT:
        raise jinja2.TemplateError(f"an operator makes more than {LONGEST_RESULT:,} characters")


@pass_eval_context
def _unchanged(context: nodes.EvalContext, value: Any) -> Any:
    """Finalize outputs as they are; asking for the context keeps jinja from calling this while it parses."""
    return value


def tree_of(environment: Sandbox, source: str) -> nodes.Template:
    """Return a parsed template; raise `TemplateSyntaxError` for one that is not one or sets autoescape.

    jinja evaluates the argument of autoescape while it compiles.
    """
    tree = environment.parse(source)
    for found in tree.find_all(nodes.EvalContextModifier):
        raise jinja2.TemplateSyntaxError("autoescape has no place in a chat template", found.lineno)
    return tree


def variables_of(environment: Sandbox, tree: nodes.Template) -> set[str]:
    """Return the names that a template takes from its context.

    As `jinja2.meta.find_undeclared_variables`, which computes constants on its way.
    """
    tracking = TrackingCodeGenerator(environment)
    tracking.optimizer = None
    tracking.visit(tree)
    return tracking.undeclared_identifiers


def template_environment() -> Sandbox:
    """Return the environment that published templates expect, as transformers makes it."""
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, GenerationTag],
        optimized=False,
        finalize=_unchanged,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: not escaped for HTML, as jinja2's own filter does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
