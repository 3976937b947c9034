"""Tool calls: the form in which a model writes them, and the grammar that enforces it; `calls.py` reads them.

hermes   <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>      Qwen, Hermes, and models without a form
llama3   {"name": "f", "parameters": {…}}                               Llama 3.1 and later; `; ` between calls
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchwright.hub.chat_template import ChatTemplate
from torchwright.serve.grammar.compile import WHITESPACE
from torchwright.serve.openai.parts import Function


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How one kind of model writes a call: `begin`, an object with the name and, under `key`, the arguments, `end`."""

    name: Literal["hermes", "llama3"]
    begin: str
    key: str
    end: str
    separator: str

    def tag(self, function: Function, schema: dict[str, Any]) -> dict[str, Any]:
        """One function's call as a tag of xgrammar's structural tags."""
        return {
            "type": "tag",
            "begin": f'{self.begin}{{"name": "{function.name}", "{self.key}": ',
            "content": {
                "type": "json_schema",
                "json_schema": schema,
                "max_whitespace_cnt": WHITESPACE,
            },
            "end": "}" + self.end,
        }


HERMES = ToolFormat(
    name="hermes", begin="<tool_call>\n", key="arguments", end="\n</tool_call>", separator="\n"
)
LLAMA3 = ToolFormat(name="llama3", begin="", key="parameters", end="", separator="; ")


def format_of(template: ChatTemplate) -> ToolFormat:
    """The form that a chat template teaches."""
    source = "".join(template.sources.values())
    llama = "<tool_call>" not in source and ("python_tag" in source or '"parameters"' in source)
    return LLAMA3 if llama else HERMES


def required_grammar(form: ToolFormat, functions: Sequence[Function], *, parallel: bool) -> str:
    """A structural tag by which the answer is nothing but calls of these functions, at least one."""
    return _structural_tag(
        {
            "type": "tags_with_separator",
            "tags": [form.tag(function, schema_of(function)) for function in functions],
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
    )


def strict_grammar(form: ToolFormat, functions: Sequence[Function]) -> str | None:
    """A structural tag by which the answer is free, but calls of strict functions match their schema; None without."""
    if not any(function.strict for function in functions):
        return None
    return _structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [form.begin + '{"name": "'],
            "tags": [
                form.tag(function, schema_of(function) if function.strict else {"type": "object"})
                for function in functions
            ],
        }
    )


def schema_of(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object in any case."""
    return {"type": "object", **(function.parameters or {"properties": {}})}


def _structural_tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})
