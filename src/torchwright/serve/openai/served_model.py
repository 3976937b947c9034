"""Open what a process needs of a language model besides its weights: tokenizer, chat template, formats, grammars."""

from __future__ import annotations

from torchwright.serve.folder import ServeTarget
from torchwright.serve.formats.reasoning import REASONING_FORMATS, reasoning_format_of
from torchwright.serve.formats.tools import TOOL_FORMATS, tool_format_of
from torchwright.serve.grammar.compile import GrammarCompiler
from torchwright.serve.limits import Limits
from torchwright.serve.openai.language import load_language
from torchwright.serve.openai.prepare import ServedModel
from torchwright.serve.options import AUTO, NONE


def load_model(
    target: ServeTarget, limits: Limits, tool_call_format: str = AUTO, reasoning_format: str = AUTO
) -> ServedModel:
    """Return a language model as the process that reads its requests needs it.

    Raises `ModelError` for files that cannot be read. The formats are names of their tables; `AUTO` takes what the chat
    template or the tokenizer shows, `NONE` disables them.
    """
    language = load_language(target.folder)
    source = "".join(language.template.sources.values())
    if reasoning_format == AUTO:
        reasoning = reasoning_format_of(source, language.tokenizer.added)
    else:
        reasoning = None if reasoning_format == NONE else REASONING_FORMATS[reasoning_format]
    return ServedModel(
        name=target.name,
        folder=target.folder,
        tokenizer=language.tokenizer,
        template=language.template,
        pictures=language.pictures,
        tool_format=tool_format_of(source) if tool_call_format == AUTO else TOOL_FORMATS[tool_call_format],
        reasoning=reasoning,
        grammars=GrammarCompiler(target.folder, limits),
        limits=limits,
    )
