"""Calls as elements, each argument between tags of its own: Qwen3-Coder, Seed-OSS and GLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchwright.serve.formats.base import Callable, CallReader, Tag, ToolFormat, tag
from torchwright.serve.formats.json_calls import NAME_CHARACTERS
from torchwright.serve.formats.json_text import dumps
from torchwright.serve.formats.reader import Reading
from torchwright.serve.grammar.values import schema_of, value_of

ARGUMENT_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""GLM's tokens around names and values."""
ARGUMENT_NAME = re.compile(r"\s*[^\s<>=]+\s*")
"""Anything that does not match is not a name: the element stays text."""
VALUE_END_CHARACTERS = 96
"""Upper bound of a value's end, including its tags."""


class _MarkupReader(CallReader):
    def __init__(self, form: MarkupFormat, functions: Sequence[Callable], *, parallel: bool) -> None:
        super().__init__(form, functions, parallel=parallel)
        self._ends = form.end.split()
        """The tags that end a call, the inner one first."""
        call_end = r"\s*".join(map(re.escape, self._ends))
        # A value may hold markup, so its end is where the call goes on; some models leave the closing tag out.
        self._value_end = re.compile(
            rf"</parameter>\s{{0,16}}(?=<parameter=|{re.escape(self._ends[0])})|(?={call_end})"
        )

    def _read(self) -> Reading[None]:
        return self._read_marked(self._form.begin, ends=self._ends)

    def _calls(self, mark: str) -> Reading[bool]:
        yield from self._space()
        opening = self._form.open.strip()
        if opening and (yield from self._literal(opening)) is None:
            return False
        delimiter = self._form.after_name.strip()
        found = yield from self._until(delimiter or "<", limit=NAME_CHARACTERS)
        if found is None or (name := found[0].strip()) not in self._functions:
            return False
        if not delimiter:  # the tag behind the name is the first argument's, or the call's end
            self._buffer = "<" + self._buffer
        index = self._begin(name)
        self._argue(index, "{")
        read = self._qwen_argument if self._form.style == "qwen_xml" else self._glm_argument
        schema = self._functions[name].schema
        written = set[str]()
        while argument := (yield from read()):
            key, text = argument
            if key in written:
                self._taken = ""
                continue  # the first one counts: it has been sent
            value = value_of(text, schema_of(key, schema), schema)
            self._argue(index, (", " if written else "") + f"{dumps(key)}: {dumps(value)}")
            written.add(key)
        if self._ended and not self._closes():
            self._buffer = ""
            return True  # cut off: the arguments stay open, as JSON's do
        left = self._taken.strip() and self._taken
        self._argue(index, "}")
        if left:  # an element other than an argument ends the call, and is text
            self._end()
            self._taken = left
            return False
        for end in self._ends:
            yield from self._space()
            if (yield from self._literal(end)) is None:
                self._end()
                return False
        self._end()
        return True

    def _closes(self) -> bool:
        return self._buffer.lstrip().startswith(self._ends[0])

    def _qwen_argument(self) -> Reading[tuple[str, str] | None]:
        """Read `<parameter=NAME>`, a value with a line break on either side, `</parameter>`."""
        yield from self._space()
        if (yield from self._literal("<parameter=")) is None:
            return None
        key = yield from self._until(">", limit=NAME_CHARACTERS)
        if key is None or not ARGUMENT_NAME.fullmatch(key[0]):
            return None
        searched = 0
        while (end := self._value_end.search(self._buffer, searched)) is None:
            searched = max(0, len(self._buffer) - VALUE_END_CHARACTERS)
            if not (yield from self._more()):
                return None
        value = self._take(end.start())
        self._take(end.end() - end.start())
        return key[0].strip(), value.removeprefix("\n").removesuffix("\n")

    def _glm_argument(self) -> Reading[tuple[str, str] | None]:
        """Read `<arg_key>NAME</arg_key>`, `<arg_value>`, a value, `</arg_value>`."""
        yield from self._space()
        if (yield from self._literal("<arg_key>")) is None:
            return None
        key = yield from self._until("</arg_key>", limit=NAME_CHARACTERS)
        yield from self._space()
        if key is None or not ARGUMENT_NAME.fullmatch(key[0]):
            return None
        if (yield from self._literal("<arg_value>")) is None:
            return None
        value = yield from self._until("</arg_value>")
        return None if value is None else (key[0].strip(), value[0])


@dataclass(frozen=True, kw_only=True)
class MarkupFormat(ToolFormat):
    """`begin`, the function's name, `after_name`, arguments in `style`, `end`."""

    open: str
    after_name: str
    style: Literal["qwen_xml", "glm_xml"]
    separator: str = "\n"
    reader = _MarkupReader

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, *ARGUMENT_MARKS)

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        return [
            tag(
                self.begin + self.open + function.name + self.after_name,
                {"type": "json_schema", "json_schema": function.schema, "style": self.style},
                self.end,
            )
            for function in functions
        ]
