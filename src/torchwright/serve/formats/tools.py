"""The table of tool formats, and which of them a chat template teaches."""

from __future__ import annotations

from collections.abc import Mapping

from torchwright.serve.formats.base import ToolFormat
from torchwright.serve.formats.harmony import HARMONY
from torchwright.serve.formats.json_calls import BareFormat, ListFormat, NamedFormat, ObjectFormat
from torchwright.serve.formats.markup import MarkupFormat
from torchwright.serve.formats.mistral import MistralFormat
from torchwright.serve.formats.pythonic import PythonicFormat

HERMES = ObjectFormat(
    name="hermes",
    models="Qwen 2.5 and 3, Hermes, SmolLM3, Granite 4, and models without a format of their own",
    begin="<tool_call>\n",
    end="\n</tool_call>",
    hints=("<tool_call>",),
)
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = (_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END)

# The order matters: a template teaches the first format that its source hints at.
_ROWS: tuple[ToolFormat, ...] = (
    HARMONY,
    NamedFormat(
        name="deepseek_v3",
        models="DeepSeek V3, V3-0324, R1 and R1-0528",
        begin=_CALLS,
        open=f"{_CALL}function{_SEPARATOR}",
        middle="\n```json\n",
        close=f"\n```{_CALL_END}",
        separator="\n",
        end=_CALLS_END,
        hints=(_CALLS,),
        also="```json",
        tokens=_DEEPSEEK,
    ),
    NamedFormat(
        name="deepseek_v31",
        models="DeepSeek V3.1",
        begin=_CALLS,
        open=_CALL,
        middle=_SEPARATOR,
        close=_CALL_END,
        end=_CALLS_END,
        hints=(_CALLS,),
        tokens=_DEEPSEEK,
    ),
    MistralFormat(
        name="mistral",
        models="Mistral since Small 3.2, Magistral, Devstral",
        named=True,
        hints=("[ARGS]",),
    ),
    MistralFormat(
        name="mistral_list",
        models="Mistral 7B v0.3, Nemo, Mixtral 8x22B, Small 3.1",
        named=False,
        hints=("[TOOL_CALLS]",),
    ),
    MarkupFormat(
        name="glm4",
        models="GLM-4.5 and later",
        begin="<tool_call>",
        open="",
        after_name="\n",
        end="\n</tool_call>",
        style="glm_xml",
        hints=("<arg_key>",),
    ),
    MarkupFormat(
        name="seed_oss",
        models="Seed-OSS",
        begin="<seed:tool_call>",
        open="\n<function=",
        after_name=">\n",
        end="\n</function>\n</seed:tool_call>",
        style="qwen_xml",
        hints=("<seed:tool_call>",),
    ),
    MarkupFormat(
        name="qwen3_coder",
        models="Qwen3-Coder and Qwen 3.5",
        begin="<tool_call>",
        open="\n<function=",
        after_name=">\n",
        end="\n</function>\n</tool_call>",
        style="qwen_xml",
        hints=("<function=", "<parameter="),
    ),
    ListFormat(
        name="phi4",
        models="Phi-4-mini",
        begin="<|tool_call|>",
        begins=("functools",),
        end="<|/tool_call|>",
        hints=("<|/tool_call|>", "<|/tool|>"),
    ),
    ListFormat(
        name="granite",
        models="Granite 3",
        begin="<|tool_call|>",
        hints=("<|tool_call|>",),
    ),
    PythonicFormat(
        name="olmo3",
        models="OLMo 3",
        begin="<function_calls>\n",
        between="\n",
        end="\n</function_calls>",
        hints=("<function_calls>",),
    ),
    PythonicFormat(
        name="pythonic",
        models="Llama 3.2 and 4",
        begin="[",
        end="]",
        outer=("<|python_start|>", "<|python_end|>"),
        hints=("func_name1(",),
    ),
    HERMES,
    BareFormat(
        name="llama3_json",
        models="Llama 3.1 to 3.3",
        begins=("<|python_tag|>", "<|python_start|>"),
        hints=("python_tag", '"parameters"'),
    ),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _ROWS}


def tool_format_of(source: str) -> ToolFormat:
    """Return the format that a chat template's source teaches; Hermes where it teaches none."""
    return next((form for form in _ROWS if form.teaches(source)), HERMES)
