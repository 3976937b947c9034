"""From messages to text: the model's own chat template, in a sandbox. Serving and training render with the same one.

A template is data of the model folder: it runs in jinja2's immutable sandbox and reads no files. It may be
`chat_template.jinja` (or .jinja2), `chat_template.json`, or `chat_template` of tokenizer_config.json, one text or
several by name; `additional_chat_templates/NAME.jinja` adds more. `tool_use` is taken when there are tools. A folder
without any gets `PLAIN`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from torchwright.core.errors import ModelError
from torchwright.core.regular_file import read_regular
from torchwright.hub.content_form import ContentForm, content_form, fitted_message
from torchwright.hub.folder import MORE_TEMPLATES, find_object
from torchwright.hub.template_sandbox import MARKS, template_environment, tree_of, variables_of
from torchwright.hub.tokenizer import tokenizer_settings

FILES = ("chat_template.jinja", "chat_template.jinja2")
TEMPLATES = (*FILES, "chat_template.json")
"""Files of a template, where it is not a part of tokenizer_config.json."""
TAGGED = re.compile(r"{%-?\s*generation\b")
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", MARKS, *SPECIAL})
"""Names that have a meaning of their own in a template's context."""

LONGEST_TEMPLATE = 2**20
"""Bytes; published ones have up to 20 KB."""
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


def join_parts(texts: Iterable[str]) -> str:
    """Join the text parts of a message's content into the one string that templates take."""
    return "\n".join(texts)


def call_arguments(text: str) -> Any:
    """Return a tool call's arguments as an object, or unchanged where they are not JSON that a prompt can hold."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # a tokenizer does not take a lone surrogate
    except (ValueError, RecursionError):
        return text
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class TemplateRefused(ModelError):
    """Messages that a chat template does not take; the summary says why."""


class ChatTemplate:
    """A model folder's chat template.

    With `parse` it is parsed at once, and a fault raises `ModelError`. Without, it is parsed when it is first rendered:
    a process that holds others up never does either with a template that it was given (`serve/http/read_worker.py`).
    """

    def __init__(self, folder: Path, *, parse: bool = True) -> None:
        settings = tokenizer_settings(folder)
        found = _find(folder, settings)
        self.plain = not found
        """True if the folder has no template, so that `PLAIN` is used."""
        self.stops: tuple[str, ...] = PLAIN_STOPS if self.plain else ()
        self.sources = found or {"default": PLAIN}
        self._special = {name: text for name in SPECIAL if (text := _text(settings.get(name))) is not None}
        self._forms: dict[str, ContentForm] = {}
        self.begin = self._special.get("bos_token") if settings.get("add_bos_token") is True else None
        """The begin token's text, where the library puts it before texts and tokenizer.json does not say so."""
        self._folder = folder
        self._parsed: dict[str, jinja2.Template] | None = None
        self._variables: frozenset[str] = frozenset()
        if parse:
            self.parse()

    def parse(self) -> dict[str, jinja2.Template]:
        """Return the parsed templates by name, kept for later calls; raise `ModelError` if one cannot be parsed."""
        if self._parsed is None:
            environment = template_environment()
            try:
                trees = {name: tree_of(environment, source) for name, source in self.sources.items()}
                self._variables = frozenset().union(
                    *(variables_of(environment, tree) for tree in trees.values())
                )
                self._parsed = {name: environment.from_string(tree) for name, tree in trees.items()}
            except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
                line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                raise ModelError(
                    f"the chat template of {self._folder} cannot be parsed", found=f"{error}{line}"
                ) from error
            except (RecursionError, MemoryError) as error:
                raise ModelError(
                    f"the chat template of {self._folder} cannot be parsed", found="it nests too deeply"
                ) from error
        return self._parsed

    def digest(self) -> str:
        """Return a fingerprint of everything that decides the rendered text."""
        told = json.dumps([self.sources, self._special], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def end(self) -> str | None:
        """The end token's text."""
        return self._special.get("eos_token")

    @property
    def takes_tools(self) -> bool:
        """Check whether the template renders a list of tools."""
        return any("tools" in source for source in self.sources.values())

    @property
    def knows_developers(self) -> bool:
        """Check whether the role of developers' messages has a name in a template."""
        return any("developer" in source for source in self.sources.values())

    def mentions(self, name: str) -> bool:
        """Check whether any of the templates asks for a variable of this name; one that cannot be parsed does not."""
        with contextlib.suppress(ModelError):
            self.parse()
        return name in self._variables

    @property
    def tagged(self) -> bool:
        """Check whether the template itself marks the assistant's tokens."""
        return any(TAGGED.search(source) for source in self.sources.values())

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: dict[str, Any] | None = None,
        marks: tuple[str, str] = ("", ""),
        placeholders: Mapping[str, str] | None = None,
    ) -> str:
        """The text; `marks` are put around what the template tags as the assistant's, `extra` in its context.

        `placeholders` stand for parts of their types (image, video) where a template takes texts alone.

        Raises `TemplateRefused` when the template does not take the messages.
        """
        name = self._name(tools)
        fitted = [fitted_message(message, self.form(name), placeholders or {}) for message in messages]
        return self._render(name, fitted, tools, add_generation_prompt, extra or {}, marks)

    def _name(self, tools: object) -> str:
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            found = ", ".join(sorted(self.sources))
            raise TemplateRefused(
                f"the model has no default chat template, only {found}",
                next="name one of them 'default' in tokenizer_config.json",
            )
        return name

    def form(self, name: str) -> ContentForm:
        """Return the form of messages that a template handles, found out once by rendering a few."""
        if name not in self._forms:
            self._forms[name] = content_form(
                lambda messages: self._render(name, messages, None, True, {}, ("", "")), TemplateRefused
            )
        return self._forms[name]

    def _render(
        self,
        name: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        extra: dict[str, Any],
        marks: tuple[str, str],
    ) -> str:
        try:
            template = self.parse()[name]
        except ModelError as error:
            raise TemplateRefused(f"the model's chat template cannot be parsed: {error.found}") from error
        # As in transformers, `documents` is always there: templates ask whether it is none.
        context = {**self._special, "documents": None, **extra, MARKS: marks}
        try:
            return template.render(
                **context, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except (RecursionError, MemoryError) as error:
            raise TemplateRefused(
                f"the model's chat template cannot take these messages{_line(error)}"
            ) from error
        except Exception as error:  # a template may call methods of strings, lists and numbers
            own = isinstance(error, jinja2.TemplateError)
            said = str(error) if own else f"{type(error).__name__}: {error}"
            raise TemplateRefused(
                f"the model's chat template refuses these messages{'' if own else _line(error)}: {said}"
            ) from error


def _find(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the folder's templates by name, empty where it has none; files replace those of the settings."""
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return _main(folder, settings) | {path.stem: _read(path) for path in more}


def template_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder's templates, by their paths inside the folder."""
    found = [folder / name for name in TEMPLATES] + sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}


def _main(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    for name in FILES:
        if (folder / name).is_file():
            return {"default": _read(folder / name)}
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


def _read(path: Path) -> str:
    try:
        return read_regular(path, LONGEST_TEMPLATE).decode()
    except (OSError, ValueError) as error:
        raise ModelError(f"the chat template {path} cannot be read", found=str(error)) from error


def _text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _line(error: BaseException) -> str:
    """Return " at line N" of the template for an exception from within one."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            found = f" at line {trace.tb_lineno}"
        trace = trace.tb_next
    return found
