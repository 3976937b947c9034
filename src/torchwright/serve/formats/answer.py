"""The format of one answer: its parser, its grammar, and the special tokens that are part of its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from torchwright.serve.formats.base import Callable, ToolFormat, structural_tag
from torchwright.serve.formats.harmony import HARMONY, HarmonyFormat
from torchwright.serve.formats.reader import Parser, Plain
from torchwright.serve.formats.reasoning import HarmonyReasoning, PromptEnd, ReasoningFormat, ReasoningReader
from torchwright.serve.grammar.compile import GrammarJob

TAIL_TOKENS = 32
"""The last tokens of a prompt, which tell whether it ends within reasoning."""


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """Formats of an answer: its reasoning, and its calls where any may come."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat
    functions: Sequence[Callable] = ()
    parallel: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens and are read by the parser."""
        if self._harmony:
            return HARMONY.marks
        calls = self.tools.marks if self.functions else ()
        return (*calls, *(self.reasoning.marks if self.reasoning else ()))

    def parser(self, prompt_end: PromptEnd) -> Parser:
        """Return the parser of one answer to a prompt that ends so."""
        if self._harmony:
            return HARMONY.parser(self.functions, parallel=self.parallel)
        calls = self.tools.parser(self.functions, parallel=self.parallel) if self.functions else Plain()
        return ReasoningReader(self.reasoning, calls, prompt_end) if self.reasoning else calls

    def prompt_end(self, tail: str) -> PromptEnd:
        """Return how a prompt ends, of which `tail` is the last text."""
        return self.reasoning.prompt_end(tail) if self.reasoning else "none"

    def constrained(self, job: GrammarJob, prompt_end: PromptEnd) -> GrammarJob:
        """Return a grammar's job for an answer that may begin with reasoning, or be a call instead."""
        form = self.reasoning
        prefix = form.prefix(prompt_end) if form else []
        lead = {"type": "const_string", "value": form.lead} if form and form.lead else None
        if job.kind == "tools":
            lead = calls = None
        else:  # a model that may call functions does so in place of a constrained answer
            calls = self.tools.required(self.functions, parallel=self.parallel) if self.functions else None
        return msgspec.structs.replace(
            job,
            prefix=structural_tag({"type": "sequence", "elements": prefix}) if prefix else "",
            lead=structural_tag(lead) if lead else "",
            calls=structural_tag(calls) if calls else "",
        )

    @property
    def _harmony(self) -> bool:
        return isinstance(self.reasoning, HarmonyReasoning) or (
            isinstance(self.tools, HarmonyFormat) and bool(self.functions)
        )
