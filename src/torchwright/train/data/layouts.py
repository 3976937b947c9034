"""Published layouts of rows, recognized by their columns, and the columns of ours that each is read as.

A layout of ours is a form: text, a conversation, a prompt with its completion, a preference, a text of a class, or
two texts that are alike. Every other layout converts its rows to a form's columns before anything else looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchwright.train.data.messages import RowFault, from_json
from torchwright.train.data.shards import DataError

Form = Literal["text", "chat", "completion", "preference", "classification", "embedding"]
NEEDS: dict[Form, tuple[str, ...]] = {
    "text": ("text",),
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "classification": ("text", "label"),
    "embedding": ("anchor", "positive"),
}
SAID = ("classification", "embedding")
"""Forms that no columns say: rows with a text and a label may be wanted for their text."""
NAMES: dict[Form, str] = {
    "text": "text",
    "chat": "conversations",
    "completion": "prompts with completions",
    "preference": "preference pairs",
    "classification": "texts of classes",
    "embedding": "texts that are alike",
}
DATA_SETS: dict[Form, tuple[str, ...]] = {
    "text": ("C4, FineWeb",),
    "chat": ("OpenAI fine-tuning", "no_robots, ultrachat_200k"),
    "completion": ("TRL completions",),
    "preference": ("ultrafeedback_binarized", "hh-rlhf", "TRL pairs"),
}
"""Form → public data sets whose rows have the form's own columns."""
COLUMNS = {name: name for name in ("text", "messages", "prompt", "completion", "chosen", "rejected")}
SYSTEM = ("system", "system_prompt")
"""Columns that hold a system message."""


@dataclass(frozen=True, kw_only=True)
class ColumnLayout:
    """Columns that a row has, and the form that they are read as."""

    name: str
    form: Form
    needs: tuple[str, ...]
    convert: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Return a row with the form's own columns. Raises `RowFault`."""
    also: tuple[str, ...] = ()
    """Columns that are read too, if a row has them."""
    data_sets: tuple[str, ...] = ()
    """Public data sets whose rows have these columns."""
    ours: bool = False
    """True if the columns are the form's own."""


def find_layout(
    present: Mapping[str, Any], columns: Mapping[str, str], form: Form | None, where: str
) -> ColumnLayout:
    """Return the layout whose columns a row has, of those that are read as `form` if it is given.

    A renamed column says the form by itself. Raises `DataError`, which names the columns that are there.
    """
    own = [
        ColumnLayout(name=NAMES[kind], form=kind, needs=tuple(columns[need] for need in needs), ours=True)
        for kind, needs in NEEDS.items()
        if (kind == form if form else kind not in SAID)
    ]
    renamed = {column for name, column in columns.items() if column != COLUMNS.get(name, name)}
    known = own if renamed else own + [layout for layout in PUBLISHED if form in (None, layout.form)]
    there = [layout for layout in known if all(need in present for need in layout.needs)]
    found = _clearest([layout for layout in there if renamed & {*layout.needs}] or there)
    if len(found) == 1:
        return found[0]
    named = ", ".join(sorted(map(str, present))) or "none"
    if found:
        raise DataError(
            f"the rows of {where} could be read in several ways: "
            + ", ".join(layout.form if layout.ours else layout.name for layout in found),
            found=f"columns: {named}",
            next="say which with data.form, or name the columns: data.text_column, prompt_column, …",
        )
    wanted = [" and ".join(f"'{need}'" for need in layout.needs) + f" ({layout.form})" for layout in own]
    others = [] if renamed else [layout.name for layout in known if not layout.ours]
    raise DataError(
        f"the rows of {where} have no columns that are known",
        found=f"columns: {named}",
        allowed="; ".join(wanted)
        + (f"; the columns of {', '.join(dict.fromkeys(others))}" if others else ""),
        next="name yours: data.text_column, messages_column, prompt_column, completion_column, …",
    )


def _clearest(found: Sequence[ColumnLayout]) -> list[ColumnLayout]:
    """Return the layouts that say the most of the same row."""
    most = [one for one in found if not any(_says_more(other, one) for other in found if other is not one)]
    if len(most) > 1:  # a column `content` means text where nothing else is known
        most = [one for one in most if one.ours or one.form != "text"]
    if any(not one.ours for one in most):
        # Many published tables keep the rendered prompt as `text` and the columns that it was made of.
        most = [one for one in most if not one.ours or one.form != "text"]
    # ultrafeedback_binarized has pairs, and `messages` for fine-tuning.
    if {one.form for one in most} == {"chat", "preference"}:
        most = [one for one in most if one.form == "chat"]
    return most


def _says_more(one: ColumnLayout, other: ColumnLayout) -> bool:
    """Check whether a layout reads all columns that another one needs, and more."""
    return {*other.needs} < {*one.needs, *one.also}


def _joined(values: Mapping[str, Any], *names: str) -> str:
    """Return the texts of these columns that are not empty, a blank line between."""
    texts = [values.get(name) for name in names]
    for name, text in zip(names, texts, strict=True):
        if text is not None and not isinstance(text, str):
            raise RowFault(f"'{name}' is no text, but {type(text).__name__}")
    return "\n\n".join(text for text in texts if text and text.strip())


def _asked(values: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    """Return the user's message that these columns say, behind the system message that the row may have."""
    text = _joined(values, *names)
    if not text:
        raise RowFault(f"'{names[0]}' is empty")
    return [*_system(values), {"role": "user", "content": text}]


def _system(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = _joined(values, *SYSTEM)
    return [{"role": "system", "content": text}] if text else []


def _answer(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not _joined(values, name):
        raise RowFault(f"'{name}' is empty: nothing of the row is trained on")
    return {"role": "assistant", "content": values[name]}


def _turn(*asked: str, answer: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the conversion of a question in columns `asked` and its answer to a conversation."""

    def convert(values: Mapping[str, Any]) -> Mapping[str, Any]:
        *system, question = _asked(values, *asked)
        return {**values, "messages": [*system, *_history(values), question, _answer(values, answer)]}

    return convert


def _history(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the earlier turns that LLaMA-Factory's Alpaca rows may have: pairs of a question and its answer."""
    pairs = values.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RowFault("'history' is no list of pairs of a question and its answer")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _conversations(name: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the conversion of a list of turns: ShareGPT's objects, pairs as objects, or texts in turn."""

    def convert(values: Mapping[str, Any]) -> Mapping[str, Any]:
        turns = from_json(values[name])
        if not isinstance(turns, list) or not turns:
            raise RowFault(f"'{name}' is no list of turns")
        if all(isinstance(turn, str) for turn in turns):
            turns = [
                {"role": "assistant" if place % 2 else "user", "content": text}
                for place, text in enumerate(turns)
            ]
        elif all(isinstance(turn, dict) and {"input", "output"} <= {*turn} for turn in turns):
            turns = [
                {"role": role, "content": turn[key]}
                for turn in turns
                for role, key in (("user", "input"), ("assistant", "output"))
            ]
        return {**values, "messages": [*_system(values), *turns]}

    return convert


def _preference(*asked: str, chosen: str, rejected: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the conversion of a question in columns `asked` and two answers to a preference."""

    def convert(values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **values,
            "prompt": _asked(values, *asked),
            "chosen": _answers(values, chosen),
            "rejected": _answers(values, rejected),
        }

    return convert


def _answers(values: Mapping[str, Any], name: str) -> list[Any]:
    said = values[name]
    if isinstance(said, str):
        return [_answer(values, name)]
    return said if isinstance(said, list) else [said]


def _sharegpt_pair(values: Mapping[str, Any]) -> Mapping[str, Any]:
    prompt = _conversations("conversations")(values)["messages"]
    return {
        **values,
        "prompt": prompt,
        "chosen": _answers(values, "chosen"),
        "rejected": _answers(values, "rejected"),
    }


def _openai_pair(values: Mapping[str, Any]) -> Mapping[str, Any]:
    asked = values["input"]
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list):
        raise RowFault("'input' is no object with 'messages'")
    return {
        "tools": asked.get("tools"),
        "prompt": asked["messages"],
        "chosen": _answers(values, "preferred_output"),
        "rejected": _answers(values, "non_preferred_output"),
    }


def _function_calls(values: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = from_json(values["answers"])
    if not isinstance(calls, list) or not calls:
        raise RowFault("'answers' is no list of calls, nor JSON text of one")
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    return {**values, "messages": [*_asked(values, "query"), answer]}


def _renamed(name: str, column: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    return lambda values: {**values, name: values[column]}


def _chats(rows: Iterable[tuple[str, tuple[str, ...], str, tuple[str, ...]]]) -> list[ColumnLayout]:
    """Return layouts of one question and its answer: (name, columns of the question, of the answer, data sets)."""
    return [
        ColumnLayout(
            name=name,
            form="chat",
            needs=(asked[0], answer),
            convert=_turn(*asked, answer=answer),
            also=(*asked[1:], *SYSTEM, "history"),
            data_sets=data_sets,
        )
        for name, asked, answer, data_sets in rows
    ]


def _turns(name: str, column: str, *data_sets: str) -> ColumnLayout:
    """Return the layout of a list of turns in a column."""
    return ColumnLayout(
        name=name,
        form="chat",
        needs=(column,),
        convert=_conversations(column),
        also=SYSTEM,
        data_sets=data_sets,
    )


PUBLISHED: tuple[ColumnLayout, ...] = (
    *_chats(
        [
            ("Alpaca", ("instruction", "input"), "output", ("alpaca", "LLaMA-Factory alpaca")),
            ("Dolly", ("instruction", "context"), "response", ("dolly-15k",)),
            ("questions with answers", ("question",), "answer", ("gsm8k",)),
            ("OpenOrca", ("question",), "response", ("OpenOrca",)),
            ("MetaMathQA", ("query",), "response", ("MetaMathQA",)),
            ("prompts with responses", ("prompt",), "response", ("prompts with responses",)),
            ("Aya", ("inputs",), "targets", ("aya",)),
        ]
    ),
    _turns("ShareGPT", "conversations", "ShareGPT", "OpenHermes-2.5", "SlimOrca", "LIMA"),
    _turns("Capybara", "conversation", "Capybara"),
    _turns("UltraChat", "data", "ultrachat"),
    ColumnLayout(
        name="xLAM function calls",
        form="chat",
        needs=("query", "answers", "tools"),
        convert=_function_calls,
        data_sets=("xlam-function-calling-60k",),
    ),
    ColumnLayout(
        name="ShareGPT preferences",
        form="preference",
        needs=("conversations", "chosen", "rejected"),
        convert=_sharegpt_pair,
        data_sets=("LLaMA-Factory pairs",),
    ),
    *(
        ColumnLayout(
            name=name,
            form="preference",
            needs=(asked[0], chosen, rejected),
            convert=_preference(*asked, chosen=chosen, rejected=rejected),
            also=(*asked[1:], *SYSTEM),
            data_sets=(data_set,),
        )
        for name, data_set, asked, chosen, rejected in (
            ("Orca DPO pairs", "orca_dpo_pairs", ("question",), "chosen", "rejected"),
            (
                "Alpaca preferences",
                "LLaMA-Factory alpaca pairs",
                ("instruction", "input"),
                "chosen",
                "rejected",
            ),
            (
                "distilabel pairs",
                "distilabel capybara-dpo",
                ("instruction",),
                "chosen_response",
                "rejected_response",
            ),
            ("distilabel pairs", "distilabel orca pairs", ("input",), "chosen", "rejected"),
        )
    ),
    ColumnLayout(
        name="OpenAI preferences",
        form="preference",
        needs=("input", "preferred_output", "non_preferred_output"),
        convert=_openai_pair,
        data_sets=("OpenAI preferences",),
    ),
    ColumnLayout(
        name="text in `content`",
        form="text",
        needs=("content",),
        convert=_renamed("text", "content"),
        data_sets=("the-stack",),
    ),
)
"""Layouts of other projects, by the data set or tool that they are known from."""


def public_data_sets() -> list[tuple[str, tuple[str, ...], tuple[str, ...], Form]]:
    """Return (data set, columns that its rows have, columns that they may have, form), for the docs and their test."""
    rows = list[tuple[str, tuple[str, ...], tuple[str, ...], Form]]()
    for form, names in DATA_SETS.items():
        for name in names:
            rows.append((name, NEEDS[form], (), form))
    for layout in PUBLISHED:
        for name in layout.data_sets:
            rows.append((name, layout.needs, layout.also, layout.form))
    return rows
