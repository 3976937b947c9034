"""Adapters of vision-language models, trained on conversations about pictures, and served afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import losses, to_toml
from safetensors.torch import load_file

import vlms
from torchwright.core.errors import WorkloadError
from torchwright.models.decoder import load_decoder
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.question import question_about
from torchwright.models.vision.reader import PictureReader
from torchwright.train.data.turns import Marked
from torchwright.train.media.chats import ChatTask, expanded, list_conversations
from torchwright.train.media.config import VisionRun, parse_media
from torchwright.train.media.shown import shown_media
from torchwright.train.media.trainer import train_vision
from torchwright.train.run.config.data_section import RunError

TEMPLATE = """\
{%- for message in messages %}{{- '[' + message.role + ']' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '(PLACE)' }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}{{- '</s>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""


def make(folder: Path, name: str = "Qwen2_5_VL", rows: int = 4, **changes: Any) -> Path:
    """A run file over conversations about small pictures."""
    (folder / "base").mkdir(parents=True)
    vlms.save(name, folder / "base")
    placeholder = PictureReader(folder / "base").placeholder
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", placeholder))
    (folder / "pictures").mkdir()
    lines = []
    for number in range(rows):
        Image.fromarray(vlms.picture(number, 40 + 8 * number, 64)).save(folder / f"pictures/{number}.png")
        shown = f"pictures/{number}.png"
        content: Any = [{"type": "image", "image": shown}, {"type": "text", "text": "What?"}]
        row: dict[str, Any] = {}
        if number % 3 == 1:
            content, row = [{"type": "text", "text": "A"}, {"type": "image"}], {"images": [shown]}
        if number % 3 == 2:
            content, row = f"<image>and <image>{number}", {"images": [shown, "pictures/0.png"]}
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"n{number}"}]
        lines.append(json.dumps({"messages": messages} | row))
    lines.append(
        json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]})
    )
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    run: dict[str, Any] = {
        "kind": "vision-language",
        "out": "out",
        "samples": 16,
        "batch": 4,
        "micro_batches": 2,
        "precision": "fp32",
        "threads": 1,
        "log_every": 1,
        "model": {"folder": "base"},
        "data": {"train": ["rows.jsonl"]},
        "optimizer": {"lr": 5e-3},
        "lora": {"r": 4, "targets": ["q_proj", "v_proj", "down_proj"]},
        **changes,
    }
    (folder / "run.toml").write_text(to_toml(run))
    return folder / "run.toml"


def read(path: Path) -> VisionRun:
    from torchwright.train.media.config import read_vision

    return read_vision(path)


def whole_loss(folder: Path, task: ChatTask, item: Any) -> float:
    """transformers' own loss of one row, summed: its processor, its model over pixels."""
    import transformers

    row = json.loads(item.target)
    images = [Path(name) for name in row["images"]]
    messages = []
    for message in row["messages"]:
        content = message["content"]
        if isinstance(content, str):
            pieces = content.split("<image>")
            parts: list[Any] = [{"type": "text", "text": pieces[0]}]
            for piece in pieces[1:]:
                parts += [{"type": "image"}, {"type": "text", "text": piece}]
            content = [part for part in parts if part.get("text") != ""]
        images += [Path(part["image"]) for part in content if part.get("image")]
        messages.append({"role": message["role"], "content": content})
    text = task.encoder.chat.render(messages, add_generation_prompt=False)
    prompt = task.encoder.chat.render(messages[:-1], add_generation_prompt=True)
    processor = vlms.processor_of(folder)
    opened = [np.array(Image.open(image)) for image in images] or None
    inputs, before = (
        processor(text=[one], images=opened, return_tensors="pt", add_special_tokens=False)
        for one in (text, prompt)
    )
    labels = inputs["input_ids"].clone()
    labels[:, : before["input_ids"].shape[1]] = -100
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        loss = model(**inputs, labels=labels).loss
    return float(loss) * int((labels[:, 1:] != -100).sum())


@pytest.mark.plain("Idefics3")
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "Idefics3", "Gemma3"])
def test_the_loss_is_that_of_the_whole_model_over_pixels(name: str, tmp_path: Path) -> None:
    run = read(make(tmp_path, name))
    task = ChatTask(tmp_path / "base", run.data)
    items = list_conversations(run, tmp_path).train.items
    media = shown_media(tmp_path / "base").eval()
    with torch.no_grad():
        found = float(media.loss(task.collate([task.prepare(item, None) for item in items]))[0])
    expected = sum(whole_loss(tmp_path / "base", task, item) for item in items)
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_run_writes_adapters_that_are_answered_with(tmp_path: Path) -> None:
    path = make(tmp_path)
    outcome = train_vision(path)
    assert outcome.adapter == tmp_path / "out" / "adapter"
    assert outcome.broken == 0
    shown = list(losses(path).values())
    assert shown[-1] < shown[0]
    names = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    assert all(".language_model." in name for name in names)
    image = tmp_path / "pictures" / "1.png"
    question = question_about(tmp_path / "base", "What?", [image])
    answers = []
    for folder, adapter in (
        (tmp_path / "base", None),
        (tmp_path / "base", outcome.adapter),
        (outcome.model, None),
    ):
        assert folder is not None
        loaded = load_decoder(folder, torch.float32, adapter=adapter)
        loaded.vision = PictureEncoder(folder, torch.float32)
        answers.append(
            loaded.generate([question.ids], pictures=[question.pictures], max_new_tokens=8, stop=[])
        )
    assert answers[1] == answers[2]
    assert answers[0] != answers[1]


@pytest.mark.slow  # `test_media_lora` has peft load adapters
def test_peft_loads_them_and_answers_alike(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    outcome = train_vision(make(tmp_path))
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, outcome.adapter).eval()
    ours = load_decoder(tmp_path / "base", torch.float32, adapter=outcome.adapter)
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours.logits(ids), expected, rtol=1e-4, atol=1e-4)


def test_broken_rows_are_left_out_with_their_reason(tmp_path: Path) -> None:
    path = make(tmp_path)
    (tmp_path / "pictures" / "2.png").write_bytes(b"no picture")
    user = {"role": "assistant", "content": "x"}
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "../secret.png"}]}, user]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, user]},
        {"messages": [{"role": "user", "content": "no place"}, user], "images": ["pictures/0.png"]},
        {"messages": "no list"},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "pictures/none.png"}]}, user]},
    ]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    run = read(path)
    listed = list_conversations(run, tmp_path).train
    [report] = listed.reports.values()
    assert [number for number, _ in report.listed] == [6, 9]
    task = ChatTask(tmp_path / "base", run.data)
    faults = {}
    for item in listed.items:
        try:
            task.prepare(item, None)
        except WorkloadError as error:
            faults[item.number] = str(error)
    assert faults.keys() == {3, 7, 8, 10}
    assert "2.png is no picture" in faults[3]
    assert "names none for it" in faults[7]
    assert "have no place in its messages" in faults[8]
    assert "there is no file" in faults[10]
    outcome = train_vision(path)
    assert outcome.broken == 4


def test_spans_move_with_the_text_of_pictures() -> None:
    from torchwright.models.vision.reader import Prepared
    from torchwright.models.vision.record import Picture

    empty = Picture(digest="", tokens=0, arrays={})
    prepared = [Prepared(text="12345", picture=empty), Prepared(text="", picture=empty)]
    found = expanded(Marked(text="a#b#cd", spans=((0, 1), (4, 6))), "#", prepared)
    assert found.text == "a12345bcd"
    assert found.spans is not None
    assert [found.text[begin:end] for begin, end in found.spans] == ["a", "cd"]
    with pytest.raises(WorkloadError, match="2 places for 1 pictures"):
        expanded(Marked(text="a#b#cd"), "#", prepared[:1])


def test_a_run_without_adapters_is_refused() -> None:
    values = {"kind": "vision-language", "out": "o", "samples": 1, "batch": 1, "model": {"folder": "m"}}
    with pytest.raises(RunError, match="trains adapters of the language model"):
        parse_media({**values, "data": {"train": ["a.jsonl"]}}, "here")
