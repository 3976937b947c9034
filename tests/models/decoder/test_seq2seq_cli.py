"""`torchwright generate` of encoder-decoder folders: the same words as from Python, languages, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from seq2seqs import tiny, tokenizer

import torchwright as tw
from folders import causal, change_json, save
from torchwright.cli import main
from torchwright.hardware.kernels import ops

FR = "fra_Latn"
LANGUAGES = ("eng_Latn", FR)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nllb")
    tiny(folder, "nllb")
    tokenizer(folder, LANGUAGES)
    return folder


def generate(folder: Path, *options: object) -> int:
    return main(["generate", str(folder), "--prompt", "Hello", "--max-new-tokens", "12", *map(str, options)])


@pytest.mark.parametrize(
    ("options", "keywords", "sampling"),
    [
        ([], {}, {}),
        (
            ["--language", "fra_Latn", "--source-language", "fra_Latn"],
            {"language": "fra_Latn", "source_language": "fra_Latn"},
            {},
        ),
        (["--quantize", "w8a8"], {"quantize": "w8a8"}, {}),
        (["--quantize", "encoder=w8a8,decoder=none"], {"quantize": "encoder=w8a8,decoder=none"}, {}),
        (
            ["--temperature", 1.2, "--seed", 5, "--kv", "int8"],
            {"kv": "int8"},
            {"temperature": 1.2, "seed": 5},
        ),
    ],
)
def test_it_answers_as_python_does(translator, capsys, options, keywords, sampling):
    if ops.fault("cpu"):
        pytest.skip("no kernels")
    assert generate(translator, "--json", *options) == 0
    found = json.loads(capsys.readouterr().out)
    model = tw.load_seq2seq(translator, torch.bfloat16, **keywords)
    wanted = model.generate("Hello", max_new_tokens=12, **sampling)
    assert found["text"] == wanted
    assert found["prompt_tokens"] == len("Hello") + 2


def test_settings_that_are_not_followed_are_said(translator, tmp_path, capsys):
    tiny(tmp_path, "bart")
    tokenizer(tmp_path)
    change_json(tmp_path / "generation_config.json", num_beams=4, no_repeat_ngram_size=3)
    assert generate(tmp_path) == 0
    said = capsys.readouterr().err
    assert "num_beams 4 is not followed" in said
    assert "no_repeat_ngram_size 3 is not followed" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--language", "fra_Latm"], "fra_Latn"),
        (["--device", "cuda"], "the CPU"),
        (["--adapter", "somewhere"], "no adapter"),
        (["--quantize", "encoder=w8a8,encoder=none"], "both sides"),
    ],
)
def test_what_is_not_for_it_is_refused(translator, capsys, options, says):
    assert generate(translator, *options) == 2
    assert says in capsys.readouterr().err


def test_another_encoder_and_decoder_is_told_which_are_known(tmp_path, capsys):
    """Not the list of models without an encoder; and a language is nothing that it would lack an encoder for."""
    config = {
        "architectures": ["LEDForConditionalGeneration"],
        "is_encoder_decoder": True,
        "model_type": "led",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for more in ((), ("--language", "fra_Latn")):
        assert generate(tmp_path, *more) == 2
        said = capsys.readouterr().err
        assert "holds no encoder and decoder that are known here" in said
        assert "MBartForConditionalGeneration" in said
        assert "torchwright optimize" in said


def test_languages_are_not_for_a_decoder_alone(tmp_path, capsys):
    assert generate(save(causal(head_dim=16), tmp_path), "--language", "fra_Latn") == 2
    assert "no encoder" in capsys.readouterr().err
