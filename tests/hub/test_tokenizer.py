"""Folders, hub ids and tokenizers: one way to open each."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from torchwright.core.errors import ModelError
from torchwright.hub.folder import download, find_object, resolve
from torchwright.hub.tokenizer import TokenizerFault, find_tokenizer, open_tokenizer, tokenizer_settings
from torchwright.models.decoder.generation.text import FolderTokenizer
from torchwright.serve.api_error import ApiError
from torchwright.serve.folder import find
from torchwright.serve.text.codec import Tokenizer
from torchwright.train.data.text import token_shards
from torchwright.workloads.encoding import plain_tokenizer
from torchwright.workloads.language import BUNDLED


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    assert tokenizer_settings(tmp_path) == {}
    with pytest.raises(ModelError, match=r"has no tokenizer\.json.*save_pretrained"):
        open_tokenizer(tmp_path)


def shards_of(folder: Path) -> Any:
    text = folder / "a.txt"
    text.write_text("some words")
    return token_shards([text], ["*.txt"], folder, 0, folder / "cache")


@pytest.mark.parametrize(
    "opens",
    [
        find_tokenizer,
        open_tokenizer,
        Tokenizer,
        shards_of,
        lambda at: FolderTokenizer(at, 0),
        lambda at: plain_tokenizer(at, 8),
    ],
)
def test_a_damaged_tokenizer_is_named_wherever_it_is_opened(tmp_path: Path, opens: Any) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        opens(tmp_path)


def test_all_read_the_same_tokens(tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    ids = open_tokenizer(tmp_path).encode("Once upon a time").ids
    assert FolderTokenizer(tmp_path, None).encode("Once upon a time") == ids
    assert Tokenizer(tmp_path).encode("Once upon a time") == ids


def test_an_object_may_be_missing_but_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert find_object(file) == {}
    for text, said in (("[]", "is not a JSON object"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")):
        file.write_text(text)
        with pytest.raises(ModelError, match=said):
            find_object(file)


def test_a_hub_id_is_fetched_with_its_chat_template_and_without_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert resolve("owner/model") == tmp_path
    assert find("owner/model").folder == tmp_path
    (name, patterns), again = asked
    assert name == "owner/model"
    assert again == (name, patterns)
    assert "*.jinja" in patterns
    assert not {"*", "*.py", "*.bin", "*.pt"} & set(patterns)


def test_the_bundled_model_has_a_name_unless_a_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (resolve("bundled") / "config.json").is_file()
    (tmp_path / "bundled").mkdir()
    assert resolve("bundled") == Path("bundled")


def test_a_hub_that_gives_nothing_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        raise OSError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(ModelError, match="neither a folder here nor a model that the hub gave"):
        download("owner/model", allowed="something else")


@pytest.mark.parametrize("module", ["folder", "tokenizer", "tensor_header", "text_stream"])
def test_it_needs_no_torch(module: str) -> None:
    code = f"import sys, torchwright.hub.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pattern_that_the_matcher_gives_up_on_is_a_fault_of_the_tokenizer(tmp_path: Path) -> None:
    """The library raises a `PanicException`, which is no `Exception`."""
    bomb = Library(models.BPE())
    bomb.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$x"), "isolated")
    bomb.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    text = "a" * 40 + "x" * 40
    for call in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_batch([text]),
        lambda: tokenizer.encode_batch_fast([text]),
    ):
        with pytest.raises(TokenizerFault, match="fails on this text"):
            call()
    with pytest.raises(ApiError, match="tokenizer fails on this text"):
        Tokenizer(tmp_path).encode(text)
    assert pickle.loads(pickle.dumps(tokenizer)).get_vocab_size() == 0
