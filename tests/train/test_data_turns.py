"""Which tokens of conversations are trained on, beside transformers' own mask and beside what inference renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from torchwright.hub.chat_template import ChatTemplate
from torchwright.train.data.documents import ChatEncoder, Document, FileReport, RowsAs, read_documents
from torchwright.train.data.packing import Packed
from torchwright.train.data.shards import DataError, Shards
from torchwright.train.data.text import token_shards
from torchwright.train.data.turns import (
    APART,
    NO_REASONING,
    NO_STOP,
    NO_TOOLS,
    STOP_OUTSIDE,
    UNLIKE_PROMPT,
)
from torchwright.workloads.texts import BUNDLED

END = 1
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}" + PROMPT


def tagged(answer: str) -> str:
    """A template with `answer` as the assistant's turn."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + answer
        + "\n{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        + PROMPT
    )


ONE_BLOCK = tagged("<|assistant|>{% generation %}{{ m.content }}<|end|>{% endgeneration %}")
TWO_BLOCKS = tagged(
    "<|assistant|>{% generation %}<think>{{ m.reasoning_content or '' }}</think>{% endgeneration %} "
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
)
HEADER_INSIDE = tagged("{% generation %}<|assistant|>{{ m.content }}<|end|>{% endgeneration %}")
STOP_BEHIND = tagged("<|assistant|>{% generation %}{{ m.content }}{% endgeneration %}\n<|end|>")
STOPLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
REASONS_LAST = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think>"
    "{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|end|>\n{% endfor %}" + PROMPT
)
"""Template like Qwen3's: reasoning stands in the last answer alone."""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One plus one?"},
    {"role": "assistant", "content": "It is two.", "reasoning_content": "add"},
    {"role": "user", "content": "And two more?"},
    {"role": "assistant", "content": "It is four.", "reasoning_content": "more"},
]
SAID = [{name: text for name, text in message.items() if name != "reasoning_content"} for message in TALK]


def model(folder: Path, template: str | None = None) -> Path:
    settings = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    if template:
        settings["chat_template"] = template
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((BUNDLED / "tokenizer.json").read_bytes())
    return folder


def read(
    folder: Path, *rows: Any, template: str | None = None, **how: Any
) -> tuple[list[Document], FileReport]:
    path, report = folder / "rows.jsonl", FileReport()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = ChatEncoder(TOKENIZER, ChatTemplate(model(folder, template)), END)
    found = read_documents(path, encoder, RowsAs(**how), report)
    return [document for _, documents in found for document in documents], report


def text(document: Document) -> str:
    """All of it, but for the begin token that the bundled tokenizer puts before what no template wrote."""
    return TOKENIZER.decode(document.ids.tolist(), skip_special_tokens=False).removeprefix("<|begin|>")


def learnt(document: Document) -> str:
    return TOKENIZER.decode(document.ids[document.trained].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("template", [ONE_BLOCK, TWO_BLOCKS, HEADER_INSIDE])
def test_tagged_labels_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    (document,), report = read(tmp_path, {"messages": TALK}, template=template)
    theirs = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token="<|end|>")
    wanted: Any = theirs.apply_chat_template(
        TALK, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    length = len(document.ids)  # what the template writes behind the last answer is not read
    assert document.ids.tolist() == wanted["input_ids"][:length]
    assert document.trained.tolist() == [bool(token) for token in wanted["assistant_masks"][:length]]
    assert not any(wanted["assistant_masks"][length:])
    assert {*report.notes} <= {NO_REASONING}


@pytest.mark.parametrize("template", [CHATML, ONE_BLOCK, TWO_BLOCKS, STOP_BEHIND, REASONS_LAST, None])
@pytest.mark.parametrize("form", ["completion", "preference"])
def test_nothing_of_a_prompt_is_trained_on(tmp_path: Path, template: str | None, form: str) -> None:
    """The labels are what follows the prompt as inference renders it, whatever tags stand in the prompt."""
    prompt, answer = TALK[:4], TALK[4:]
    row: dict[str, Any] = {"prompt": prompt, "completion": answer}
    if form == "preference":
        row = {"prompt": prompt, "chosen": answer, "rejected": [{**TALK[4], "content": "Five."}]}
    documents, _ = read(tmp_path, row, template=template)
    rendered = ChatTemplate(tmp_path).render(prompt, add_generation_prompt=True)
    for document, content in zip(documents, ("It is four.", "Five."), strict=False):
        first = int(document.trained.argmax())
        before = TOKENIZER.decode(document.ids[:first].tolist(), skip_special_tokens=False)
        assert before.removeprefix("<|begin|>") == rendered
        assert content in learnt(document)
        assert "two" not in learnt(document)
        assert document.ids[document.trained][-1] == END


def test_each_answer_is_read_as_inference_sees_it(tmp_path: Path) -> None:
    """A template that drops earlier reasoning gets a document for each answer."""
    documents, report = read(tmp_path, {"messages": TALK}, template=REASONS_LAST)
    chat = ChatTemplate(tmp_path)
    assert [learnt(document) for document in documents] == [
        "<think>add</think>It is two.<|end|>",
        "<think>more</think>It is four.<|end|>",
    ]
    for document, place in zip(documents, (2, 4), strict=True):
        assert text(document).startswith(chat.render(TALK[:place], add_generation_prompt=True))
    assert report.notes == {APART: 2}
    assert report.broken == 0


def test_an_end_token_outside_of_the_tags_is_trained_on(tmp_path: Path) -> None:
    (document,), report = read(tmp_path, {"messages": SAID}, template=STOP_BEHIND)
    assert learnt(document) == "It is two.<|end|>It is four.<|end|>"
    assert report.notes == {STOP_OUTSIDE: 1}


def test_without_any_end_token_the_models_own_is_trained_on(tmp_path: Path) -> None:
    (document,), report = read(tmp_path, {"messages": SAID}, template=STOPLESS)
    assert learnt(document) == " It is two.\n It is four.\n<|end|>"
    assert document.trained[-1]
    assert report.notes == {NO_STOP: 1}


def test_a_turn_that_the_next_speaker_ends_is_trained_on_with_its_marker(tmp_path: Path) -> None:
    """GLM's models stop at <|user|>, which its template writes as the beginning of the next turn alone."""
    template = "{% for m in messages %}{% if m.role == 'user' %}<|begin|>{% else %}{{ m.role }}:{% endif %}"
    template += "{{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TALK[1:]}))
    chat, begin = ChatTemplate(model(tmp_path, template)), TOKENIZER.token_to_id("<|begin|>") or 0
    for ends, wanted in (
        ((begin,), "It is two.<|begin|>It is four.<|end|>"),
        ((), "It is two.It is four.<|end|>"),
    ):
        ((_, (document,)),) = read_documents(
            path, ChatEncoder(TOKENIZER, chat, END, ends), RowsAs(), FileReport()
        )
        assert learnt(document) == wanted


def test_answers_that_begin_otherwise_than_the_prompt_are_reported(tmp_path: Path) -> None:
    template = CHATML.replace(PROMPT, PROMPT.replace("<|assistant|>", "<|assistant|><think>"))
    (document,), report = read(tmp_path, {"messages": SAID[:3]}, template=template)
    assert learnt(document) == "It is two.<|end|>"
    assert report.notes == {UNLIKE_PROMPT: 1}


def test_what_a_template_leaves_out_is_reported(tmp_path: Path) -> None:
    """Reasoning and tools may go; an answer without its words or calls would teach to say nothing."""
    (document,), report = read(tmp_path, {"messages": TALK, "tools": [TOOL]}, template=CHATML)
    assert report.notes == {NO_REASONING: 1, NO_TOOLS: 1}
    assert "add" not in text(document)
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    _, report = read(tmp_path, {"messages": [TALK[1], calling]}, {"messages": SAID}, template=CHATML)
    assert report.listed == [(1, "the chat template leaves out the tool calls of message 2")]
    with pytest.raises(DataError, match="leaves out the content of message 3"):
        read(tmp_path, {"messages": SAID}, template=CHATML.replace("{{ m.content }}", ""))


def test_a_template_that_knows_parts_alone_is_given_parts(tmp_path: Path) -> None:
    """Templates of vision-language models take content as a list of parts."""
    parts = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
    (document,), _ = read(tmp_path, {"messages": SAID}, template=parts)
    (expected,), _ = read(tmp_path, {"messages": SAID}, template=CHATML)
    assert text(document) == text(expected)
    assert learnt(document) == learnt(expected)


def test_answers_share_a_document_whatever_stands_behind_them(tmp_path: Path) -> None:
    """Phi-3's template ends every text with the model's end token, which inner turns have not."""
    template = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    (document,), report = read(
        tmp_path, {"messages": SAID}, template=template.replace("<|end|>", "<|begin|>")
    )
    assert learnt(document) == "It is two.<|begin|>It is four.<|begin|>"
    assert not report.notes


@pytest.mark.parametrize("field", ["weight", "loss", "train", "trainable", "loss_mask"])
@pytest.mark.parametrize("no", [0, False])
def test_an_answer_of_weight_zero_is_not_trained_on(tmp_path: Path, field: str, no: float) -> None:
    """OpenAI's fine-tuning files leave answers out by their weight, AgentInstruct by `loss`, others likewise."""
    talk = [*TALK[:2], {**TALK[2], field: no}, {**TALK[3], field: None}, {**TALK[4], field: True}]
    (document,), _ = read(tmp_path, {"messages": talk}, template=CHATML)
    assert learnt(document) == "It is four.<|end|>"
    assert "It is two." in text(document)


def test_an_empty_answer_is_a_broken_row(tmp_path: Path) -> None:
    """Its end token alone would be learnt: to stop at once."""
    for talk in (
        [TALK[1], {**SAID[2], "content": " "}, *SAID[3:]],
        [{"role": "assistant", "content": ""}, *TALK[1:]],
    ):
        (document,), report = read(tmp_path, {"messages": talk}, {"messages": SAID}, template=CHATML)
        assert learnt(document) == "It is two.<|end|>It is four.<|end|>"
        assert "is an empty answer" in report.listed[0][1]
    unlearnt = [TALK[1], {**SAID[2], "content": "", "weight": 0}, *SAID[3:]]
    (document,), report = read(tmp_path, {"messages": unlearnt}, template=CHATML)
    assert (learnt(document), report.broken) == ("It is four.<|end|>", 0)


def test_a_rows_own_switches_reach_the_template(tmp_path: Path) -> None:
    """TRL's rows switch reasoning off by `chat_template_kwargs`: the prompt then holds the empty reasoning."""
    block = "{% if enable_thinking is false %}<think></think>{% endif %}"
    header = "{% if m.role == 'assistant' %}" + block + "{% endif %}{{ m.content }}"
    template = CHATML.replace("{{ m.content }}", header).replace(
        PROMPT, PROMPT.replace("<|assistant|>", "<|assistant|>" + block)
    )
    off = {"enable_thinking": False, "unknown": None}
    for switches, before in ((off, "<think></think>"), (json.dumps(off), "<think></think>"), (None, "")):
        row = {"messages": SAID[1:3], "chat_template_kwargs": switches}
        (document,), report = read(tmp_path, row, template=template)
        asked, answered = text(document).strip().split("\n")
        assert (asked, answered) == (
            "<|user|>One plus one?<|end|>",
            f"<|assistant|>{before}It is two.<|end|>",
        )
        assert (learnt(document), report.notes) == ("It is two.<|end|>", {})
    rows = [{"messages": SAID, "chat_template_kwargs": {name: 1}} for name in ("messages", "eos_token")]
    _, report = read(tmp_path, *rows, {"messages": SAID, "chat_template_kwargs": "x"}, {"messages": SAID})
    assert [reason for _, reason in report.listed] == [
        "'chat_template_kwargs' cannot set messages",
        "'chat_template_kwargs' cannot set eos_token",
        "'chat_template_kwargs' is no object, nor JSON text of one",
    ]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|end|>{% endfor %}" + PROMPT
)


@pytest.mark.parametrize(
    "tools",
    [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]], json.dumps([TOOL["function"]])],
)
@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "tool_calls": [CALL]},
        {"content": "", "tool_calls": json.dumps([CALL])},
        {"tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"content": [], "tool_calls": [CALL]},
    ],
)
def test_tools_and_calls_are_read_in_every_published_form(tmp_path: Path, tools: Any, answer: Any) -> None:
    row = {"messages": [{"role": "user", "content": "w?"}, {"role": "assistant", **answer}], "tools": tools}
    (document,), _ = read(tmp_path, row, template=WITH_TOOLS)
    assert text(document).startswith(json.dumps(TOOL))
    assert learnt(document) == 'weather({"city": "Rome"})<|end|>'


def test_a_call_without_arguments_has_none(tmp_path: Path) -> None:
    for arguments in ({}, {"arguments": None}, {"arguments": ""}):
        calling = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", **arguments}}]}
        (document,), _ = read(tmp_path, {"messages": [TALK[1], calling]}, template=WITH_TOOLS)
        assert learnt(document) == "weather({})<|end|>", arguments


def test_tools_that_are_no_list_are_a_broken_row(tmp_path: Path) -> None:
    rows = [{"messages": TALK, "tools": tools} for tools in ("weather", {"weather": 1}, [3])]
    documents, report = read(tmp_path, *rows, {"messages": TALK}, template=CHATML)
    assert (len(documents), report.broken) == (1, 3)
    assert "no list of functions" in report.listed[0][1]


def test_content_in_parts_is_joined_as_the_server_joins_it(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    calling = {"role": "assistant", "content": parts, "tool_calls": [CALL]}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    documents, report = read(
        tmp_path,
        {"messages": [TALK[1], calling]},
        {"messages": [picture, TALK[2]]},
        template=WITH_TOOLS,
    )
    assert [learnt(document) for document in documents] == ['hello\nthereweather({"city": "Rome"})<|end|>']
    assert "not text: 'image_url'" in report.listed[0][1]


def test_texts_begin_as_the_tokenizer_begins_them(tmp_path: Path) -> None:
    """Training adds a begin token where `generate` does; a template writes its own."""
    bare = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    bare.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    folder = model(tmp_path)
    rows = [{"prompt": "2+2=", "completion": " 4"}, {"prompt": "<|begin|>2+2=", "completion": " 4"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = ChatEncoder(TOKENIZER, ChatTemplate(folder), END)
    found = read_documents(folder / "rows.jsonl", encoder, RowsAs(), FileReport())
    documents = [document for _, documents in found for document in documents]
    inferred = TOKENIZER.encode("2+2=", add_special_tokens=True).ids
    for document in documents:
        assert document.ids[: len(inferred)].tolist() == inferred
        assert learnt(document) == " 4<|end|>"
    # The setting that stands for it where tokenizer.json does not say so.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    assert ChatEncoder(bare, ChatTemplate(folder), END).lead == inferred[:1]
    assert ChatEncoder(bare, ChatTemplate(model(tmp_path / "without")), END).lead == []


def test_answers_to_a_prompt_of_one_token_stay_whole_and_apart(tmp_path: Path) -> None:
    model(tmp_path)
    rows = [{"prompt": "<|begin|>", "completion": f"value {number} and more"} for number in range(9)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shard = token_shards([path], ["*.txt"], tmp_path, END, tmp_path / "tokens")
    shards = Shards(shard, TOKENIZER.get_vocab_size())
    assert shards.answers(0)
    lengths = np.diff(shards.starts(0), append=shards.sizes[0])  # type: ignore[arg-type]
    short = Packed(shards, int(lengths.min()) - 2, 0, end=END)  # windows in which no document fits
    assert (short.pieces.cut, len(short.pieces.length_P)) == (9, 9)
