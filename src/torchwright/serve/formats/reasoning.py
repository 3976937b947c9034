"""The table of reasoning formats, and the parser that parts reasoning from the answer.

Reasoning stands at the beginning of an answer, or the chat template opens it at the prompt's end. Marks that come later
are text: a model may be asked about them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torchwright.serve.formats import harmony
from torchwright.serve.formats.base import Tag, tag
from torchwright.serve.formats.reader import Parser, Reader, Reading, Reasoning, held

PromptEnd = Literal["open", "closed", "none"]
"""Place of a prompt's end: within reasoning, behind it, or without any."""
GAP = {"type": "regex", "pattern": "[ \\n]{0,4}"}
"""White space between reasoning and a constrained answer."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """`begin`, reasoning, `end`, and perhaps marks around the answer."""

    name: str
    models: str
    begin: str
    end: str
    around: tuple[str, str] | None = None
    hints: tuple[str, ...] = ()
    """Texts in a chat template that show this kind of reasoning; `begin` and `end` by default."""
    also: str = ""
    """A text that the template holds besides."""
    doubtful: bool = False
    """True if the tokenizer alone has the marks: a model that does not reason may have them."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return (self.begin, self.end, *(self.around or ()))

    @property
    def looks(self) -> str:
        """An answer, for documentation."""
        begin, end = self.around or (self.lead, "")
        return f"{self.begin}…{self.end}{begin}…{end}"

    def teaches(self, source: str) -> bool:
        """Check whether a chat template's source has this format's marks."""
        return any(hint in source for hint in self.hints or (self.begin, self.end)) and self.also in source

    def prompt_end(self, tail: str) -> PromptEnd:
        """Return how a prompt ends, of which `tail` is the last text."""
        tail = tail.rstrip()
        return "open" if tail.endswith(self.begin) else "closed" if tail.endswith(self.end) else "none"

    def prefix(self, prompt_end: PromptEnd) -> list[Tag]:
        """Return the grammar of what may come before a constrained answer."""
        if prompt_end == "closed" or (prompt_end == "none" and self.doubtful):
            return []
        begin = "" if prompt_end == "open" else self.begin
        thinking = {"type": "sequence", "elements": [tag(begin, {"type": "any_text"}, self.end), GAP]}
        return [thinking if prompt_end == "open" else {"type": "optional", "content": thinking}]

    def thinking(self, prompt_end: PromptEnd) -> tuple[str, str] | None:
        """Return the texts around the reasoning of `prefix`; None without reasoning."""
        return ("" if prompt_end == "open" else self.begin, self.end) if self.prefix(prompt_end) else None

    lead = ""
    """The text before a constrained answer that does not call a tool."""


class HarmonyReasoning(ReasoningFormat):
    """gpt-oss: its parser of calls reads reasoning too."""

    lead = harmony.FINAL

    def prefix(self, prompt_end: PromptEnd) -> list[Tag]:
        # One message: of several, none would have to be the last.
        return [{"type": "optional", "content": tag(harmony.ANALYSIS, {"type": "any_text"}, harmony.NEXT)}]

    def thinking(self, prompt_end: PromptEnd) -> tuple[str, str] | None:
        return harmony.ANALYSIS, harmony.NEXT


# The order matters: a template is of the first format whose marks it has.
_ROWS = (
    HarmonyReasoning(
        name="harmony", models="gpt-oss", begin=harmony.ANALYSIS, end="<|end|>", hints=(harmony.CHANNEL,)
    ),
    ReasoningFormat(name="seed_oss", models="Seed-OSS", begin="<seed:think>", end="</seed:think>"),
    ReasoningFormat(name="magistral", models="Magistral", begin="[THINK]", end="[/THINK]"),
    ReasoningFormat(
        name="granite",
        models="Granite 3.2 and 3.3",
        begin="<think>",
        end="</think>",
        around=("<response>", "</response>"),
        hints=("<response>",),
        also="<think>",
    ),
    ReasoningFormat(
        name="hunyuan",
        models="Hunyuan",
        begin="<think>",
        end="</think>",
        around=("<answer>", "</answer>"),
        hints=("<answer>",),
        also="<think>",
    ),
    ReasoningFormat(
        name="think",
        models="Qwen3, QwQ, DeepSeek R1 and V3.1, SmolLM3, OLMo 3, GLM-4.5, Phi-4 reasoning",
        begin="<think>",
        end="</think>",
    ),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {form.name: form for form in _ROWS}


def reasoning_format_of(source: str, tokens: Collection[str] = ()) -> ReasoningFormat | None:
    """Return the format that a chat template's source or, where it has none, the tokenizer's tokens show."""
    by_template = (form for form in _ROWS if form.teaches(source))
    by_tokens = (
        replace(form, doubtful=True)
        for form in _ROWS
        if not form.hints and {form.begin, form.end} <= set(tokens)
    )
    return next(by_template, None) or next(by_tokens, None)


class ReasoningReader(Reader):
    """Parts reasoning from the answer, which another parser reads."""

    def __init__(self, form: ReasoningFormat, answer: Parser, prompt_end: PromptEnd) -> None:
        super().__init__()
        self._form, self._answer = form, answer
        self.reasoning = prompt_end == "open"

    def _read(self) -> Reading[None]:
        form = self._form
        space = yield from self._space()
        begun = (yield from self._literal(form.begin)) is not None
        if begun or self.reasoning:
            self.reasoning = True
            yield from self._space()
            if (yield from self._pass(Reasoning, form.end)) is None:
                self._emit(Reasoning, self._buffer.rstrip())
                return
            self.reasoning = False
            yield from self._space()
            wrapped = form.around is not None and (yield from self._literal(form.around[0])) is not None
            if wrapped:
                yield from self._space()
        else:
            self._buffer, wrapped = space + self._buffer, False
        yield from self._answered(form.around[1] if wrapped and form.around else None)

    def _answered(self, end: str | None) -> Reading[None]:
        """Give the answer to its parser, without the mark at its end."""
        while True:
            kept = len(self._buffer) - len(self._buffer.rstrip()) if end else 0
            shown = self._buffer[: len(self._buffer) - kept]
            if end and (cut := held(shown, (f"{end} ",))):  # the space: the whole mark is held, too
                shown = shown[:-cut].rstrip()
            self._events += self._answer.put(self._take(len(shown)))
            self._forget()
            if self._answer.done:
                self.done = True
                return
            if not (yield from self._more()):
                break
        if end and self._buffer.strip() != end:
            self._events += self._answer.put(self._buffer)
        self._events += self._answer.rest()
