"""Rows of every form to documents: what is read, skipped and refused, and which tokens are trained on."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from torchwright.core import rows as data_rows
from torchwright.core.rows import read_rows
from torchwright.hub.chat_template import ChatTemplate
from torchwright.train.data.documents import (
    COLUMNS,
    ChatEncoder,
    Document,
    FileReport,
    RowsAs,
    read_documents,
    read_report,
    write_documents,
)
from torchwright.train.data.forms import covered
from torchwright.train.data.shards import DataError, Shards
from torchwright.train.data.text import expand, only_writer, token_shards
from torchwright.workloads.texts import BUNDLED

END = 1
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}\n{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{% if loop.last %}last: {% endif %}{{ m.content }}\n{% endfor %}"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One plus one?"},
    {"role": "assistant", "content": "It is two."},
    {"role": "user", "content": "And two more?"},
    {"role": "assistant", "content": "It is four."},
]


def encoder(folder: Path, template: str | None = None) -> ChatEncoder:
    settings = {"eos_token": "<|end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatEncoder(TOKENIZER, ChatTemplate(folder), END)


def lines(folder: Path, *rows: Any) -> Path:
    """A file of JSON lines; texts are written as they are."""
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def read(
    folder: Path, *rows: Any, template: str | None = None, **how: Any
) -> tuple[list[Document], FileReport]:
    report = FileReport()
    found = read_documents(lines(folder, *rows), encoder(folder, template), RowsAs(**how), report)
    return [document for _, documents in found for document in documents], report


def spoken(document: Document) -> str:
    """What is trained on."""
    return TOKENIZER.decode(document.ids[document.trained].tolist(), skip_special_tokens=False)


def test_texts_end_with_the_end_token_and_are_trained_on_but_for_their_first(tmp_path: Path) -> None:
    (one, two), report = read(tmp_path, {"text": "Once upon a time"}, "", {"text": " "}, {"text": "The end"})
    assert TOKENIZER.decode(one.ids[:-1].tolist()) == "Once upon a time"
    assert one.ids[-1] == two.ids[-1] == END
    assert one.trained.tolist() == [False] + [True] * (len(one.ids) - 1)
    assert (report.form, report.rows, report.empty, report.broken) == ("text", 3, 1, 0)
    assert report.tokens == len(one.ids) + len(two.ids)
    assert report.trained == report.tokens - report.documents


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_a_chat_is_trained_on_the_assistants_words_alone(tmp_path: Path, template: str) -> None:
    """By the template's own tags, and where it has none by how each prompt begins the whole."""
    (document,), _ = read(tmp_path, {"messages": TALK}, template=template)
    assert spoken(document) == "It is two.<|end|>It is four.<|end|>"
    whole = ChatTemplate(tmp_path).render(TALK, add_generation_prompt=False)
    assert TOKENIZER.decode(document.ids.tolist(), skip_special_tokens=False) == whole


def test_without_a_template_the_plain_one_serves_and_the_end_token_is_learnt(tmp_path: Path) -> None:
    (document,), _ = read(tmp_path, {"messages": TALK})
    assert spoken(document).replace("\n", "") == " It is two. It is four.<|end|>"
    assert document.trained[-1]


def test_completions_are_trained_on_without_their_prompts(tmp_path: Path) -> None:
    rows = [
        {"prompt": "One plus one is", "completion": " two."},
        {"prompt": TALK[:4], "completion": TALK[4:]},
    ]
    (text, chat), report = read(tmp_path, *rows, template=CHATML)
    assert spoken(text) == " two.<|end|>"
    assert spoken(chat) == "It is four.<|end|>"
    assert report.form == "completion"


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_a_preference_is_two_documents_the_chosen_one_first(tmp_path: Path, template: str) -> None:
    said = {"chosen": TALK[4:], "rejected": [{"role": "assistant", "content": "Five."}]}
    documents, report = read(tmp_path, {"prompt": TALK[:4], **said}, template=template)
    assert [spoken(document) for document in documents] == ["It is four.<|end|>", "Five.<|end|>"]
    assert (report.form, report.documents) == ("preference", 2)


BROKEN: list[tuple[Any, str]] = [
    ('{"messages": ', "no JSON"),
    ("[1, 2]", "no object, but list"),
    ("[" * 100_000, "cannot be read|no JSON"),
    ({"text": "x"}, "no 'messages' .columns: text"),
    ({"messages": []}, "no list of objects"),
    ({"messages": ["hello"]}, "message 1 is no object"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "unknown role 'bot'"),
    ({"messages": [{"role": "user", "content": 3}]}, "no text as 'content', but int"),
    ({"messages": TALK[:2]}, "no message is the assistant's"),
]


@pytest.mark.parametrize(("row", "words"), BROKEN)
def test_a_broken_row_is_told_with_its_line_and_left_out(tmp_path: Path, row: Any, words: str) -> None:
    good = {"messages": TALK}
    documents, report = read(tmp_path, good, row, good, template=CHATML)
    assert len(documents) == 2
    ((number, reason),) = report.listed
    assert (number, report.broken, report.rows) == (2, 1, 3)
    assert re.search(words, reason)
    with pytest.raises(DataError, match=r"row 2 of .*rows\.jsonl is broken"):
        read(tmp_path, good, row, good, template=CHATML, strict=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_half_of_a_character_is_a_broken_row(tmp_path: Path, name: str) -> None:
    """An emoji's two escapes are one character; one alone is what a text that was cut ends with."""
    whole, half = '{"text": "hi \\ud83d\\ude00"}', '{"text": "hi \\ud83d"}'
    text = f"{whole}\n{half}\n" if name.endswith("l") else f"[{whole}, {half}]"
    (tmp_path / name).write_text(text)
    good, bad = read_rows(tmp_path / name)
    assert good.values == {"text": "hi \U0001f600"}
    assert re.search(r"lone surrogate U\+D83D", str(bad.fault))


def test_rows_are_read_from_lists_tables_and_gzip(tmp_path: Path) -> None:
    wanted = [{"instruction": f'say {number}, "please"', "output": "ein é\nzwei"} for number in range(300)]
    (tmp_path / "list.json").write_text(json.dumps(wanted, indent=1))
    (tmp_path / "held.json").write_text(json.dumps({"version": 1, "data": wanted}))
    (tmp_path / "held2.json").write_text(json.dumps({"version": 1, "data": wanted}, indent=2))
    text = "".join(json.dumps(row) + "\n" for row in wanted)
    (tmp_path / "lines.json").write_text(text)
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt") as file:
        file.write(text)
    tables = {"table.csv": ",", "table.tsv": "\t", "europe.csv": ";", "tabs.csv": "\t", "table.csv.gz": ","}
    for name, mark in tables.items():
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, [*wanted[0]], delimiter=mark)
            writer.writeheader()
            writer.writerows(wanted)
    for path in sorted(tmp_path.iterdir()):
        assert [row.values for row in read_rows(path)] == wanted, path.name


def test_a_list_is_read_a_piece_at_a_time_and_ends_where_it_is_cut(tmp_path: Path) -> None:
    rows = [{"text": "x" * size} for size in (1, 5 * data_rows.PIECE // 2, 3, 4 * data_rows.PIECE)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    assert [row.values for row in read_rows(path)] == rows
    path.write_text(json.dumps(rows)[:-20])
    found = list(read_rows(path))
    assert [row.values for row in found[:3]] == rows[:3]
    assert "nothing of it is read" in str(found[3].fault)
    path.write_bytes(b'[{"text": "\xff"}, {"text": "b"}]')
    bad, good = read_rows(path)
    assert (bad.fault or "").startswith("no UTF-8")
    assert good.values == {"text": "b"}


def test_structs_of_tables_have_no_null_keys(tmp_path: Path) -> None:
    """Parquet gives every struct the keys of all rows; the rows mean the same as in JSON lines."""
    pyarrow = pytest.importorskip("pyarrow", reason="an extra: torchwright[data]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="an extra: torchwright[data]")
    rows = [{"messages": [{"role": "user", "content": "w?", "call": {"city": "Rome"}}], "note": None}]
    rows += [{"messages": [{"role": "user", "content": "t?", "call": {"zone": 3}}], "note": "x"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row.values for row in read_rows(tmp_path / "a.parquet")] == rows


def test_brackets_in_a_name_are_no_pattern(tmp_path: Path) -> None:
    for name in ("part [1].jsonl", "b1.jsonl", "b2.jsonl"):
        (tmp_path / name).write_text("")
    assert expand(["part [1].jsonl"], tmp_path) == [tmp_path / "part [1].jsonl"]
    assert [path.name for path in expand(["b[12].jsonl"], tmp_path)] == ["b1.jsonl", "b2.jsonl"]


def test_no_utf8_is_a_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert [row.fault and row.fault[:8] for row in read_rows(path)] == [None, "no UTF-8"]


@pytest.mark.parametrize(
    ("head", "fault"), [(b"text,l\xf3bel", "no UTF-8: byte 0xf3"), (b'text,"label"x', "no CSV")]
)
def test_damaged_names_of_columns_are_refused(tmp_path: Path, head: bytes, fault: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(head + b"\na,b\n")
    with pytest.raises(DataError, match="does not name its columns") as error:
        list(read_rows(path))
    assert fault in str(error.value)
    str(error.value).encode()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_read(tmp_path: Path, encoding: str) -> None:
    """Excel and PowerShell write UTF-16. Read as UTF-8 it gave a table with unknown columns."""
    texts = ["a", "tw\u00f6 \U0001f600", "x" * 20_000]
    mark = "" if encoding == "utf-16" else "\ufeff"
    written = {
        "a.csv": "text,n\r\n" + "".join(f"{text},1\r\n" for text in texts),
        "a.tsv": "text\tn\n" + "".join(f"{text}\t1\n" for text in texts),
        "a.jsonl": "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts),
        "a.json": json.dumps([{"text": text} for text in texts], ensure_ascii=False),
    }
    for name, content in written.items():
        data = (mark + content).encode(encoding)
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            assert [row.values["text"] for row in read_rows(path)] == texts, path.name


def test_damaged_utf_16_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        codecs.BOM_UTF16_LE
        + '{"text": "a"}\n{"text": "'.encode("utf-16-le")
        + b"\x3d\xd8"
        + '"}\n'.encode("utf-16-le")
    )
    good, bad = read_rows(path)
    assert good.values == {"text": "a"}
    assert (bad.fault or "").startswith("no UTF-8")
    path.write_bytes('{"text": "a"}\n'.encode("utf-16") + b"\x00")
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(path))


def test_no_gzip_is_said(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(tmp_path / "b.jsonl.gz"))


def test_a_template_that_rewrites_turns_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no row to train on.*before message 3 otherwise"):
        read(tmp_path, {"messages": TALK}, template=FORGETFUL)


def test_a_long_line_is_passed_over_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_rows, "LONGEST_LINE", 100)
    rows = [{"text": "a"}, {"text": "b" * 5000}, {"text": "c" * 80}]
    found = list(read_rows(lines(tmp_path, *rows)))
    assert [row.number for row in found] == [1, 2, 3]
    assert [bool(row.fault) for row in found] == [False, True, False]
    assert "more than 100 bytes" in str(found[1].fault)


def test_columns_are_found_named_or_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"body, title.*text_column"):
        read(tmp_path, {"body": "x", "title": "y"})
    with pytest.raises(DataError, match=r"several ways: text, chat"):
        read(tmp_path, {"text": "x", "messages": TALK})
    assert read(tmp_path, {"text": "x", "messages": TALK}, form="text")[1].form == "text"
    (document,), _ = read(tmp_path, {"body": "Hello there"}, columns={**COLUMNS, "text": "body"})
    assert TOKENIZER.decode(document.ids.tolist()) == "Hello there"


@pytest.mark.parametrize("content", ["", "\n\n", "{broken\n"])
def test_a_file_without_a_row_to_train_on_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match="holds no row to train on"):
        list(read_documents(tmp_path / "rows.jsonl", encoder(tmp_path), RowsAs(), FileReport()))


def test_tables_and_saved_data_sets_are_read_as_json_lines_are(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="an extra: torchwright[data]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="an extra: torchwright[data]")
    rows = [{"messages": TALK}, {"messages": TALK[1:3]}] * 200
    wanted = [row.values for row in read_rows(lines(tmp_path, *rows))]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    for name, writer in (("file.arrow", pyarrow.ipc.new_file), ("stream.arrow", pyarrow.ipc.new_stream)):
        with writer(str(tmp_path / name), table.schema) as sink:
            sink.write_table(table, max_chunksize=30)
    saved = tmp_path / "saved"
    saved.mkdir()
    (tmp_path / "stream.arrow").rename(saved / "data-0.arrow")
    state = {"_data_files": [{"filename": "data-0.arrow"}]}
    (saved / "state.json").write_text(json.dumps(state))
    assert expand(["saved", "a.parquet"], tmp_path) == [saved, tmp_path / "a.parquet"]
    for path in (tmp_path / "a.parquet", tmp_path / "file.arrow", saved):
        found = list(read_rows(path))
        assert [row.values for row in found] == wanted
        assert [row.number for row in found] == list(range(1, 401))
    state["_data_files"][0]["filename"] = "../a.parquet"
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="outside of its folder"):
        list(read_rows(saved))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        list(read_rows(tmp_path / "a.parquet"))


def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="writes what is read here")
    rows = [{"text": f"row {number}"} for number in range(7)]
    data = datasets.Dataset.from_list(rows)
    data.select([3, 1, 5]).save_to_disk(tmp_path / "some")
    assert [row.values for row in read_rows(tmp_path / "some")] == [rows[at] for at in (3, 1, 5)]
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"several splits.*test, train"):
        list(read_rows(tmp_path / "splits"))
    assert len(list(read_rows(tmp_path / "splits" / "test"))) == 7


def test_without_pyarrow_a_table_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"pip install 'torchwright\[data\]'"):
        list(read_rows(tmp_path / "a.parquet"))


def test_shards_of_rows_are_made_once_and_again_when_the_template_changes(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((BUNDLED / name).read_bytes())
    path = lines(tmp_path, {"messages": TALK}, "broken")

    def shard(**how: Any) -> Path:
        return token_shards([path], ["*.txt"], tmp_path, END, tmp_path / "tokens", RowsAs(**how))[0]

    first = shard()
    at = first.stat().st_mtime_ns
    assert shard() == first
    assert first.stat().st_mtime_ns == at
    assert read_report(first).listed[0][0] == 2
    with pytest.raises(DataError, match="row 2 of"):
        shard(strict=True)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert shard() != first


def test_a_process_that_was_killed_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED / "tokenizer.json").read_bytes())
    path, cache = lines(tmp_path, {"text": "A bird."}), tmp_path / "tokens"
    cache.mkdir()
    for name in (".a-1.safetensors.123.456", ".a-1.safetensors.123.456.tokens"):
        (cache / name).write_bytes(b"half")

    def names() -> list[str]:
        token_shards([path], ["*.txt"], tmp_path, END, cache)
        return sorted(found.name for found in cache.iterdir())

    with only_writer(cache), pytest.raises(DataError, match="another process tokenizes"):
        names()
    assert sorted(Path(name).suffix for name in names()) == [".json", ".safetensors"]


def test_a_shard_of_documents_gives_back_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wanted = [
        Document(ids=rng.integers(0, 70_000, size), trained=rng.random(size) < 0.5) for size in (3, 1, 400)
    ]
    write_documents(tmp_path / "a.safetensors", np.dtype(np.uint32), lambda report: wanted)
    shards = Shards([tmp_path / "a.safetensors"], 70_000)
    starts = shards.starts(0)
    assert starts is not None
    assert starts.tolist() == [0, 3, 4]
    assert shards.read(0, 0, 404).tolist() == np.concatenate([one.ids for one in wanted]).tolist()
    assert shards.trained(0, 0, 404).tolist() == np.concatenate([one.trained for one in wanted]).tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_bare_ids_need_their_type(tmp_path: Path) -> None:
    ids = np.arange(50, dtype=np.uint16)
    ids.tofile(tmp_path / "a.bin")
    assert Shards([tmp_path / "a.bin"], 50, "uint16").read(0, 3, 4).tolist() == [3, 4, 5, 6]
    with pytest.raises(DataError, match=r"set data\.ids to uint16 or uint32"):
        Shards([tmp_path / "a.bin"], 50)
    (tmp_path / "a.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match="no whole number of uint32"):
        Shards([tmp_path / "a.bin"], 50, "uint32")


def test_a_token_is_trained_on_where_its_last_character_is() -> None:
    offsets = np.array([[0, 3], [3, 5], [5, 5], [5, 9], [9, 10], [10, 14]])
    assert covered(offsets, ((4, 5), (9, 12))).tolist() == [False, True, False, False, True, False]
