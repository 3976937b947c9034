"""Mistral's calls: a list of objects, or since v11 of its tokenizer each call's name and arguments behind a mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchwright.serve.formats.base import Callable, Tag, ToolFormat, tag
from torchwright.serve.formats.json_calls import (
    NAME_CHARACTERS,
    ObjectCallReader,
    arguments_of,
    list_tag,
)
from torchwright.serve.formats.reader import Reading

CALLS, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class _MistralReader(ObjectCallReader):
    def _read(self) -> Reading[None]:
        return self._read_marked(CALLS, ends=["]"])

    def _calls(self, mark: str) -> Reading[bool]:
        yield from self._space()
        if (yield from self._literal("[")):
            return (yield from self._list())
        return (yield from self._named())

    def _named(self) -> Reading[bool]:
        """Read a name, perhaps an id, and arguments; the mark before them is dropped if it is not a special token."""
        found = yield from self._until(ARGUMENTS, ID, "{", limit=NAME_CHARACTERS)
        if found is None:
            return False
        name, mark = found[0].strip(), found[1]
        if mark == ID and (yield from self._until(ARGUMENTS, limit=NAME_CHARACTERS)) is None:
            return False
        if mark == "{":
            self._buffer, self._taken = "{" + self._buffer, self._taken[:-1]
        yield from self._space()
        if name not in self._functions or not self._buffer.startswith("{"):
            return False
        if (yield from self._stream_object(self._begin(name))):
            self._end()
        return True


@dataclass(frozen=True, kw_only=True)
class MistralFormat(ToolFormat):
    """Both forms are read; `named` says which one is enforced."""

    named: bool
    reader = _MistralReader

    @property
    def marks(self) -> tuple[str, ...]:
        return CALLS, ID, ARGUMENTS

    @property
    def trigger(self) -> str:
        return CALLS

    @property
    def in_one_tag(self) -> bool:
        return not self.named

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        if self.named:
            return [
                tag(f"{CALLS}{function.name}{ARGUMENTS}", arguments_of(function), "")
                for function in functions
            ]
        return [list_tag(CALLS, functions, "", parallel=parallel)]
