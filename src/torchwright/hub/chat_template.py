"""From messages to text: the model's own chat template, in a sandbox. Serving and training render with the same one.

A template is data of the model folder: it runs in jinja2's immutable sandbox and reads no files. It may be
`chat_template.jinja` (or .jinja2), `chat_template.json`, or `chat_template` of tokenizer_config.json, one text or
several by name, of which `tool_use` is taken when there are tools. A folder without any gets `PLAIN`.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, ContextReference, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchwright.errors import ModelError
from torchwright.hub.folder import find_object
from torchwright.hub.tokenizer import tokenizer_settings

FILES = ("chat_template.jinja", "chat_template.jinja2")
TEMPLATES = (*FILES, "chat_template.json")
"""Files of a template, where it is not a part of tokenizer_config.json."""
GENERATION = "generation"
TAGGED = re.compile(r"{%-?\s*generation\b")
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MARKS = "generation_marks"
"""Where a template's context keeps what the assistant's words are to be put between."""
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", MARKS, *SPECIAL})
"""Names that have a meaning of their own in a template's context."""

PLAIN = """\
{%- if tools %}
{{- "Tools, one JSON object in each line:\\n" }}
{%- for tool in tools %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}
{{- 'To call one, write <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>\\n\\n' }}
{%- endif %}
{%- for message in messages %}
{{- message.role | capitalize }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- "<tool_call>\\n" }}{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
{{- "\\n</tool_call>" }}
{%- endfor %}
{{- "\\n\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""
"""For a model without a template: a line for each speaker. Answers end where the user would speak."""
PLAIN_STOPS = ("\nUser:",)


class TemplateRefused(ModelError):
    """Messages that a chat template does not take; the summary says why."""


class ChatTemplate:
    """A model folder's chat template. Raises `ModelError` for one that cannot be parsed."""

    def __init__(self, folder: Path) -> None:
        settings = tokenizer_settings(folder)
        found = _find(folder, settings)
        self.plain = not found
        """Whether the folder has none, so that `PLAIN` serves."""
        self.stops: tuple[str, ...] = PLAIN_STOPS if self.plain else ()
        self.sources = found or {"default": PLAIN}
        self._special = {name: text for name in SPECIAL if (text := _text(settings.get(name))) is not None}
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in self.sources.items()}
            parsed = map(environment.parse, self.sources.values())
            self._variables = frozenset().union(*map(find_undeclared_variables, parsed))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template of {folder} cannot be parsed", found=str(error)) from error

    def digest(self) -> str:
        """Of all that decides what is rendered."""
        told = json.dumps([self.sources, self._special], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def end(self) -> str | None:
        """The end token's text."""
        return self._special.get("eos_token")

    @property
    def takes_tools(self) -> bool:
        """Whether a list of tools has a place in the prompt."""
        return any("tools" in source for source in self.sources.values())

    def mentions(self, name: str) -> bool:
        """Check whether any of the templates asks for a variable of this name."""
        return name in self._variables

    @property
    def tagged(self) -> bool:
        """Whether the template says by itself which words are the assistant's."""
        return any(TAGGED.search(source) for source in self.sources.values())

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: dict[str, Any] | None = None,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text; `marks` are put around what the template tags as the assistant's, `extra` in its context.

        Raises `TemplateRefused` when the template does not take the messages.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        try:
            return template.render(
                **self._special,
                **{
                    "documents": None,
                    **(extra or {}),
                    MARKS: marks,
                },  # as transformers: templates ask whether it is none
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateRefused(f"the model's chat template refuses these messages: {error}") from error
        except (RecursionError, OverflowError, MemoryError) as error:
            raise TemplateRefused("the model's chat template cannot take these messages") from error


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


def _find(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Name → template, empty where the folder has none."""
    for name in FILES:
        if (folder / name).is_file():
            return {"default": (folder / name).read_text("utf-8")}
    found = find_object(folder / TEMPLATES[-1]).get("chat_template") or settings.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        templates = {str(item.get("name")): item.get("template") for item in found}
        if templates and all(isinstance(text, str) for text in templates.values()):
            return {name: str(text) for name, text in templates.items()}
    raise ModelError(
        f"the chat_template of {folder} cannot be used",
        found=type(found).__name__,
        allowed="a text, or a list of objects with a name and a template",
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
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


def _text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
