"""Public layouts of rows, in the form that they are published in: what is read, and what is trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_data_turns import CHATML, WITH_TOOLS, learnt, read, text

from torchwright.train.data.layouts import COLUMNS, find_layout, public_data_sets
from torchwright.train.data.shards import DataError

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
ASKED = "<|user|>2+2?<|end|>\n<|assistant|>"
HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}
SYSTEM = "<|system|>Be brief.<|end|>\n"
HH = "\n\nHuman: 2+2?\n\nAssistant: "
XLAM_TOOL = {"name": "weather", "description": "d", "parameters": {"city": {"type": "str"}}}
CALLED = 'weather({"city": "Rome"})<|end|>'
Case = tuple[str, dict[str, Any], str, Sequence[tuple[str, str]]]
FOUR = (ASKED + "4<|end|>", "4<|end|>")
FIVE = (ASKED + "5<|end|>", "5<|end|>")
CASES: list[Case] = [
    ("messages", {"messages": [USER, ANSWER], "source": "x"}, "conversations", [FOUR]),
    (
        "OpenAI fine-tuning",
        {"messages": [USER, {**WRONG, "weight": 0}, USER, {**ANSWER, "weight": 1}]},
        "conversations",
        [(ASKED + "5<|end|>\n" + ASKED + "4<|end|>", "4<|end|>")],
    ),
    (
        "no_robots, ultrachat_200k",
        {"prompt": "2+2?", "prompt_id": "a", "messages": [USER, ANSWER]},
        "conversations",
        [FOUR],
    ),
    (
        "alpaca",
        {"instruction": "Add.", "input": "2+2?", "output": "4", "text": "Below is …"},
        "Alpaca",
        [("<|user|>Add.\n\n2+2?<|end|>\n<|assistant|>4<|end|>", "4<|end|>")],
    ),
    ("alpaca without an input", {"instruction": "2+2?", "input": "", "output": "4"}, "Alpaca", [FOUR]),
    (
        "LLaMA-Factory alpaca",
        {"system": "Be brief.", "history": [["1+1?", "2"]], "instruction": "2+2?", "output": "4"},
        "Alpaca",
        [(f"{SYSTEM}<|user|>1+1?<|end|>\n<|assistant|>2<|end|>\n{FOUR[0]}", "2<|end|>4<|end|>")],
    ),
    (
        "dolly-15k",
        {"instruction": "2+2?", "context": "", "response": "4", "category": "qa"},
        "Dolly",
        [FOUR],
    ),
    ("ShareGPT", {"id": "a", "conversations": [HUMAN, GPT]}, "ShareGPT", [FOUR]),
    (
        "OpenHermes-2.5",
        {
            "conversations": [{"from": "system", "value": "Be brief.", "weight": None}, HUMAN, GPT],
            "system_prompt": None,
        },
        "ShareGPT",
        [(SYSTEM + FOUR[0], FOUR[1])],
    ),
    (
        "SlimOrca",
        {"conversations": [{**HUMAN, "weight": 0.0}, {**GPT, "weight": 1.0}]},
        "ShareGPT",
        [FOUR],
    ),
    ("LIMA", {"conversations": ["2+2?", "4"], "source": "x"}, "ShareGPT", [FOUR]),
    (
        "ShareGPT with the keys of messages",
        {"conversations": [{"role": "human", "content": "2+2?"}, {"role": "gpt", "content": "4"}]},
        "ShareGPT",
        [FOUR],
    ),
    ("conversations of messages", {"conversations": [USER, ANSWER]}, "ShareGPT", [FOUR]),
    ("Capybara", {"source": "x", "conversation": [{"input": "2+2?", "output": "4"}]}, "Capybara", [FOUR]),
    ("ultrachat", {"id": "0", "data": ["2+2?", "4"]}, "UltraChat", [FOUR]),
    (
        "OpenOrca",
        {"id": "a", "system_prompt": "Be brief.", "question": "2+2?", "response": "4"},
        "OpenOrca",
        [(SYSTEM + FOUR[0], FOUR[1])],
    ),
    ("gsm8k", {"question": "2+2?", "answer": "4"}, "questions with answers", [FOUR]),
    ("MetaMathQA", {"query": "2+2?", "response": "4", "type": "x"}, "MetaMathQA", [FOUR]),
    ("aya", {"inputs": "2+2?", "targets": "4", "language": "en"}, "Aya", [FOUR]),
    (
        "xlam-function-calling-60k",
        {
            "query": "2+2?",
            "tools": json.dumps([XLAM_TOOL]),
            "answers": json.dumps([{"name": "weather", "arguments": {"city": "Rome"}}]),
        },
        "xLAM function calls",
        [
            (
                json.dumps({"type": "function", "function": XLAM_TOOL}) + ASKED.replace("\n", "") + CALLED,
                CALLED,
            )
        ],
    ),
    (
        "TRL completions",
        {"prompt": "2+2=", "completion": " 4"},
        "prompts with completions",
        [("2+2= 4<|end|>", " 4<|end|>")],
    ),
    (
        "ultrafeedback_binarized",
        {
            "prompt": "2+2?",
            "chosen": [USER, ANSWER],
            "rejected": [USER, WRONG],
            "messages": [USER, ANSWER],
            "score_chosen": 8.0,
        },
        "preference pairs",
        [FOUR, FIVE],
    ),
    (
        "TRL pairs",
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
        "preference pairs",
        [FOUR, FIVE],
    ),
    (
        "TRL's pairs of texts without a prompt",
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        "preference pairs",
        [("The sky is blue.<|end|>", " blue.<|end|>"), ("The sky is green.<|end|>", " green.<|end|>")],
    ),
    (
        "axolotl's pairs of one message each",
        {"messages": [USER], "chosen": ANSWER, "rejected": WRONG},
        "preference pairs",
        [FOUR, FIVE],
    ),
    ("hh-rlhf", {"chosen": HH + "4", "rejected": HH + "5"}, "preference pairs", [FOUR, FIVE]),
    (
        "orca_dpo_pairs",
        {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "5"},
        "Orca DPO pairs",
        [(SYSTEM + FOUR[0], FOUR[1]), (SYSTEM + FIVE[0], FIVE[1])],
    ),
    (
        "LLaMA-Factory pairs",
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {**GPT, "value": "5"}},
        "ShareGPT preferences",
        [FOUR, FIVE],
    ),
    (
        "OpenAI preferences",
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [WRONG]},
        "OpenAI preferences",
        [FOUR, FIVE],
    ),
    (
        "the-stack",
        {"content": "def f(): pass", "path": "a.py"},
        "text in `content`",
        [("def f(): pass<|end|>", "")],
    ),
    (
        "C4, FineWeb",
        {"text": "A bird.", "url": "x", "timestamp": "2020"},
        "text",
        [("A bird.<|end|>", "")],
    ),
    ("prompts with responses", {"prompt": "2+2?", "response": "4"}, "prompts with responses", [FOUR]),
    (
        "LLaMA-Factory alpaca pairs",
        {"instruction": "Add.", "input": "2+2?", "chosen": "4", "rejected": "5"},
        "Alpaca preferences",
        [
            ("<|user|>Add.\n\n2+2?<|end|>\n<|assistant|>4<|end|>", "4<|end|>"),
            ("<|user|>Add.\n\n2+2?<|end|>\n<|assistant|>5<|end|>", "5<|end|>"),
        ],
    ),
    (
        "distilabel capybara-dpo",
        {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"},
        "distilabel pairs",
        [FOUR, FIVE],
    ),
    (
        "distilabel orca pairs",
        {"system": "", "input": "2+2?", "chosen": "4", "rejected": "5", "generations": []},
        "distilabel pairs",
        [FOUR, FIVE],
    ),
]


def test_every_data_set_of_the_docs_is_read_here() -> None:
    cases = {name: row for name, row, *_ in CASES}
    for name, needs, _, form in public_data_sets():
        assert {*needs} <= {*cases[name]}, name
        assert find_layout(cases[name], COLUMNS, form, name).form == form


@pytest.mark.parametrize(("row", "layout", "wanted"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_a_public_layout_is_read_as_it_is_meant(
    tmp_path: Path, row: dict[str, Any], layout: str, wanted: Sequence[tuple[str, str]]
) -> None:
    template = WITH_TOOLS if "tools" in row else CHATML
    form = "preference" if len(wanted) == 2 else None
    documents, report = read(tmp_path, row, template=template, form=form)
    assert report.layout == layout
    assert [text(document).rstrip() for document in documents] == [whole for whole, _ in wanted]
    for document, (_, said) in zip(documents, wanted, strict=True):
        if said:
            assert learnt(document) == said
        else:
            assert document.trained[1:].all()


def test_tables_of_both_pairs_and_conversations_are_fine_tuned_on(tmp_path: Path) -> None:
    """ultrafeedback_binarized without --dpo: its `messages`."""
    row = {"prompt": "2+2?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG], "messages": [USER, ANSWER]}
    documents, report = read(tmp_path, row, template=CHATML)
    assert [learnt(document) for document in documents] == ["4<|end|>"]
    assert report.form == "chat"


def test_a_completion_that_is_not_wanted_is_left_out(tmp_path: Path) -> None:
    """TRL's unpaired preferences (KTO) say of each completion whether it is wanted."""
    rows = [
        {"prompt": "2+2=", "completion": completion, "label": completion == " 4"}
        for completion in (" 4", " 5")
    ]
    documents, report = read(tmp_path, *rows)
    assert [learnt(document) for document in documents] == [" 4<|end|>"]
    assert "'label' is false" in report.listed[0][1]


def test_a_renamed_column_says_the_form(tmp_path: Path) -> None:
    row = {"instruction": "2+2?", "output": "4", "body": "All of it."}
    assert find_layout(row, COLUMNS, None, "x").name == "Alpaca"
    assert find_layout(row, {**COLUMNS, "text": "body"}, None, "x").form == "text"
    assert (
        find_layout(row, {**COLUMNS, "prompt": "instruction", "completion": "output"}, None, "x").form
        == "completion"
    )
    with pytest.raises(DataError, match="several ways: Alpaca, Dolly"):
        find_layout({**row, "response": "4"}, COLUMNS, None, "x")
    with pytest.raises(DataError, match=r"columns: a, b.*the columns of Alpaca, Dolly"):
        find_layout({"a": 1, "b": 2}, COLUMNS, None, "x")
