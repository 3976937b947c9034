"""`torchwright generate`: text as it appears, what it says about itself, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchwright as tw
from factories import make_recipe
from folders import causal, change_json, save
from in_process import own_cache
from language_artifacts import NEW, PROMPT, fixed_artifact, native_artifact
from lora_files import write_adapter
from torchwright.cli import main
from torchwright.core.errors import WorkloadError
from torchwright.core.scheme import ASKED
from torchwright.hardware.kernels import ops
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.decoder.load import KV_DTYPES
from torchwright.optimization import continuation, open_model

CONTEXT = 256
HELLO = "Hello, world"
HELLO_TOKENS = len(HELLO) + 2
"""A byte each, between <s> and </s>."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(causal(head_dim=16), tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(kept, tmp_path / "model")


@pytest.fixture(autouse=True)
def _own_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(monkeypatch, tmp_path_factory.getbasetemp() / "cache")


def line(text: str) -> str:
    """Return a text as it is printed: it ends with a line break."""
    return text if text.endswith("\n") else text + "\n"


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let standard output be another file."""
    return lambda file: monkeypatch.setattr(sys, "stdout", file)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the model's answer be a text, which may be interrupted at its end."""

    def answers(text: str, end: type[BaseException] | None = None) -> None:
        def generate(*arguments: Any, on_text: Callable[[str], None], **options: Any) -> Any:
            on_text(text)
            if end is not None:
                raise end
            return SimpleNamespace(text=text)

        monkeypatch.setattr(continuation, "generate", generate)

    return answers


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Let artifacts be loaded, and changed by a function before they are used."""
    load = open_model.load

    def changes(change: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(open_model, "load", lambda target, trust: change(load(target, trust=trust)))

    return changes


def default_dtype() -> torch.dtype:
    return torch.bfloat16 if ops.fault("cpu") is None else torch.float32


def generate(*words: Any) -> int:
    return main(["generate", *map(str, words)])


def answered(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------- what is printed


def test_the_text_and_nothing_else_is_on_standard_output(kept, capsys):
    assert generate(kept, "--prompt", HELLO) == 0
    expected = tw.load_decoder(kept, default_dtype()).generate(HELLO, max_new_tokens=continuation.NEW_TOKENS)
    assert expected
    assert capsys.readouterr().out == line(expected)


def test_pieces_are_flushed_as_they_appear(kept, stdout):
    events: list[str] = []
    out = SimpleNamespace(
        write=lambda text: events.append(text),
        flush=lambda: events.append("<flush>"),
        isatty=lambda: False,
        encoding="utf-8",
    )
    stdout(out)
    assert generate(kept, "--prompt", HELLO, "--max-new-tokens", 12, "--dtype", "fp32") == 0
    pieces = [text for text in events if text != "<flush>"]
    assert "".join(pieces) == line(tw.load_decoder(kept).generate(HELLO, max_new_tokens=12))
    assert len(pieces) > 3
    assert all(events[place + 1] == "<flush>" for place, text in enumerate(events) if text in pieces)


def test_characters_that_standard_output_does_not_have_are_replaced(says, stdout):
    says("é is one")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stdout(out)
    assert generate("--prompt", HELLO) == 0
    assert out.buffer.getvalue() == b"? is one\n"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("text", "shown"), [("a", "a\n"), ("a\n", "a\n"), ("", "\n")])
def test_the_text_ends_with_one_line_break(capsys, says, text, shown):
    says(text)
    assert generate("--prompt", HELLO) == 0
    assert capsys.readouterr().out == shown


def test_json_says_how_long_it_took_and_why_it_stopped(kept, capsys):
    assert generate(kept, "--prompt", HELLO, "--max-new-tokens", 9, "--json") == 0
    found = answered(capsys)
    assert found["text"] == tw.load_decoder(kept, default_dtype()).generate(HELLO, max_new_tokens=9)
    assert (found["prompt_tokens"], found["new_tokens"]) == (HELLO_TOKENS, 9)
    assert found["stopped_by"] == "length"
    assert found["ttft_s"] > 0
    assert found["tpot_s"] > 0
    assert list(found) == ["text", "prompt_tokens", "new_tokens", "ttft_s", "tpot_s", "stopped_by"]


@pytest.mark.parametrize("place", [0, 1, 4])
def test_end_of_text_stops_it(folder, capsys, place):
    model = tw.load_decoder(folder)
    ids = model.generate(model.text.encode(HELLO), max_new_tokens=8, stop=[])
    place = ids.index(ids[place])
    change_json(folder / "generation_config.json", eos_token_id=ids[place])
    assert generate(folder, "--prompt", HELLO, "--dtype", "fp32", "--json") == 0
    found = answered(capsys)
    assert (found["new_tokens"], found["stopped_by"]) == (place, "end-of-text")
    assert found["text"] == model.text.decode(ids[:place])
    assert (found["ttft_s"] is None, found["tpot_s"] is None) == (place < 1, place < 2)


def test_the_prompt_can_come_from_standard_input(kept, capsys, stdin):
    assert generate(kept, "--prompt", HELLO, "--max-new-tokens", 5) == 0
    expected = capsys.readouterr().out
    for data in (HELLO, HELLO + "\n", HELLO + "\r\n"):
        stdin(data.encode())
        assert generate(kept, "--prompt", "-", "--max-new-tokens", 5) == 0
        assert capsys.readouterr().out == expected


def test_the_bundled_model_answers_where_none_is_named(capsys):
    assert generate("--prompt", "def main():", "--max-new-tokens", 5, "--json") == 0
    assert answered(capsys)["new_tokens"] == 5


def test_options_of_the_decoder_and_of_sampling_arrive(kept, capsys):
    words = "--quantize w4a8:group_size=64 --kv int8 --dtype fp32 --temperature 0.9 --top-k 20 --top-p 0.9"
    more = ("--min-p", 0.01, "--seed", 7)
    assert generate(kept, "--prompt", HELLO, *words.split(), *more) == 0
    model = tw.load_decoder(kept, torch.float32, "w4a8:group_size=64", "int8")
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    assert capsys.readouterr().out == line(model.generate(HELLO, max_new_tokens=64, seed=7, **options))


def test_what_nobody_asked_for_is_as_much_as_fits(kept, capsys):
    prompt = "a" * (CONTEXT - 2 - 5)
    assert generate(kept, "--prompt", prompt, "--json") == 0
    assert answered(capsys)["new_tokens"] <= 5
    assert generate(kept, "--prompt", prompt, "--max-new-tokens", 6) == 2
    assert f"Allowed: {CONTEXT} together." in capsys.readouterr().err


def test_without_kernels_it_says_so_and_runs_in_float32(kept, capsys, monkeypatch):
    monkeypatch.setattr(
        "torchwright.hardware.kernels.cpu.build.load_fault", lambda: "no C++ compiler was found"
    )
    assert generate(kept, "--prompt", HELLO, "--max-new-tokens", 3) == 0
    captured = capsys.readouterr()
    assert captured.err == "torchwright: no fast kernels: no C++ compiler was found\n"
    assert captured.out == line(tw.load_decoder(kept).generate(HELLO, max_new_tokens=3))


def test_the_values_in_the_help_are_those_of_the_code(capsys):
    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"--quantize none|{'|'.join(ASKED)}[:group_size=N]" in text
    (kv,) = (word for word in text.split() if word.startswith("bf16|int8"))
    assert set(kv.split("|")) == KV_DTYPES.keys()
    assert f"--dtype {'|'.join(open_model.DTYPES)}" in text
    assert f"[default: ({continuation.NEW_TOKENS}, or as many as fit); x>=1]" in text


# ------------------------------------------------------------------------------------------------------- artifacts


def test_an_artifact_of_the_native_decoder_answers(kept, tmp_path, capsys):
    out = native_artifact(kept, tmp_path / "out")
    assert generate(out, "--prompt", HELLO, "--max-new-tokens", 9, "--temperature", 1, "--top-k", 9) == 0
    expected = tw.load(out).model.generate(HELLO, max_new_tokens=9, temperature=1.0, top_k=9)
    assert capsys.readouterr().out == line(expected)


def test_an_artifacts_decoder_takes_an_adapter(kept, tmp_path, capsys):
    adapter, words = (
        write_adapter(kept, tmp_path / "adapter", std=0.5),
        ("--prompt", HELLO, "--max-new-tokens", 9),
    )
    out = native_artifact(kept, tmp_path / "out")
    assert generate(out, *words, "--adapter", adapter) == 0
    loaded = tw.load(out).model
    own = read_adapter(adapter, loaded.decoder, loaded.folder)
    found = capsys.readouterr().out
    assert found == line(loaded.generate(HELLO, max_new_tokens=9, adapter=own))
    assert found != line(loaded.generate(HELLO, max_new_tokens=9))
    fixed = fixed_artifact(kept, tmp_path / "fixed")
    assert generate(fixed, *words, "--adapter", adapter) == 2
    assert f"--adapter {adapter} is not for {fixed}" in capsys.readouterr().err


def test_an_artifact_of_fixed_calls_answers(kept, tmp_path, capsys):
    out = fixed_artifact(kept, tmp_path / "out")
    assert (
        generate(out, "--prompt", HELLO, "--max-new-tokens", 9, "--temperature", 1, "--seed", 3, "--json")
        == 0
    )
    found = answered(capsys)
    assert found["text"] == tw.load(out).model.generate(HELLO, max_new_tokens=9, temperature=1.0, seed=3)
    assert (found["prompt_tokens"], found["new_tokens"], found["stopped_by"]) == (HELLO_TOKENS, 9, "length")

    # A prompt of one chunk leaves less room than NEW_TOKENS: what fits is generated, what is asked for is refused.
    prompt = "a" * (PROMPT - 2)
    slots = tw.load(out).model.geometry.slots
    assert generate(out, "--prompt", prompt, "--json") == 0
    assert answered(capsys)["new_tokens"] <= slots - PROMPT < continuation.NEW_TOKENS
    assert slots - PROMPT > NEW
    assert generate(out, "--prompt", prompt, "--max-new-tokens", slots - PROMPT + 1) == 2
    assert "do not fit" in capsys.readouterr().err

    assert generate(out, "--prompt", HELLO, "--temperature", 1, "--top-k", 9, "--min-p", "0.1") == 2
    assert "this artifact does not take --top-k, --min-p" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["generate", "bench"])
def test_an_artifact_has_its_own_weights_and_types(kept, tmp_path, capsys, verb):
    out = native_artifact(kept, tmp_path / "out")
    words = ["--quantize", "w8a8", "--device", "cpu", *(["--prompt", HELLO] if verb == "generate" else [])]
    assert main([verb, str(out), *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"torchwright: --quantize w8a8 --device cpu is not for {out}")
    assert captured.out == ""


def test_an_artifact_of_another_kind_is_named(kept, tmp_path, capsys, loads):
    out = fixed_artifact(kept, tmp_path / "out")
    recipe = make_recipe(workload={"kind": "image"})
    loads(lambda found: dataclasses.replace(found, model=torch.nn.Identity(), recipe=recipe))
    assert generate(out, "--prompt", HELLO) == 2
    assert "holds no language model. Found: the workload 'image'." in capsys.readouterr().err


def test_notices_of_an_artifact_go_to_standard_error(kept, tmp_path, capsys, loads):
    out = fixed_artifact(kept, tmp_path / "out")
    loads(lambda found: dataclasses.replace(found, notices=["compiling afresh"]))
    assert generate(out, "--prompt", HELLO, "--max-new-tokens", 2) == 0
    assert capsys.readouterr().err == "torchwright: compiling afresh\n"


def test_what_runs_otherwise_than_it_was_measured_says_so(kept, tmp_path, capsys, loads):
    out = fixed_artifact(kept, tmp_path / "out")

    def measured_elsewhere(found: Any) -> Any:
        recipe = dataclasses.replace(found.recipe, runs_as="ahead-of-time package")
        return dataclasses.replace(found, recipe=recipe)

    loads(measured_elsewhere)
    assert generate(out, "--prompt", HELLO, "--max-new-tokens", 2) == 0
    said = "torchwright: runs as eager; 2.88x [2.79, 2.97] was measured as ahead-of-time package\n"
    assert capsys.readouterr().err == said


# -------------------------------------------------------------------------------------------------------- bad input


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(folder: Path, name: str, size: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:size])


def shards(folder: Path) -> list[Path]:
    causal(head_dim=16).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return sorted(folder.glob("model-*.safetensors"))


Q = "model.layers.1.self_attn.q_proj.weight"
MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated weights": (lambda f: cut(f, "model.safetensors", 5000), "model.safetensors cannot be read"),
    "truncated shard": (lambda f: cut(f, shards(f)[1].name, 200), "model-00002-of-"),
    "missing shard": (lambda f: shards(f)[1].unlink(), "is not there"),
    "missing tensor": (lambda f: rewrite(f, lambda t: t.pop(Q)), f"lack the tensor '{Q}'"),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({Q: torch.zeros(64, 8)})),
        f"the tensor '{Q}' in",
    ),
    "quantized checkpoint": (
        lambda f: change_json(f / "config.json", quantization_config={"quant_method": "quip"}),
        "a checkpoint quantized by quip, which is not read here",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "endless layers": (
        lambda f: change_json(f / "config.json", num_hidden_layers=10**6),
        "describes more layers than any model has",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no *.safetensors"),
    "no folder": (lambda f: shutil.rmtree(f), "there is no model at"),
    "unknown architecture": (
        lambda f: change_json(f / "config.json", architectures=["SomethingForCausalLM"]),
        "the native decoder does not know the model of",
    ),
}


@pytest.mark.parametrize("verb", ["generate", "bench"])
@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_read_is_one_paragraph(folder, capsys, case, verb):
    spoil, said = MODELS[case]
    spoil(folder)
    capsys.readouterr()  # transformers draws a bar while it writes shards
    words = ["--prompt", HELLO] if verb == "generate" else ["--quantize", "w8a8"]
    assert main([verb, str(folder), *words]) == 2
    is_one_paragraph(capsys, said)


OPTIONS: dict[str, tuple[str, str]] = {
    "quantize": ("--quantize w4a9", "unknown quantization 'w4a9'; did you mean 'w4a8'?"),
    "no quantize at all": ("--quantize x", "unknown quantization 'x'. Allowed: none, w4a16, w4a8, w8a8."),
    "group size": ("--quantize w4a8:group_size=48", "quantize='w4a8:group_size=48'. Allowed: group_size=32"),
    "group size of 8 bits": ("--quantize w8a8:group_size=32", "for 4-bit weights only"),
    "group size of none": ("--quantize none:group_size=32", "none:group_size=32"),
    "option": ("--quantize w4a8:groups=32", "Allowed: group_size=32 or 64 or 128"),
    "kv": ("--kv int9", "'int9'; did you mean 'int8'?"),
    "dtype": ("--dtype bf15", "unknown dtype 'bf15'; did you mean 'bf16'?"),
}


@pytest.mark.parametrize("verb", ["generate", "bench"])
@pytest.mark.parametrize("case", OPTIONS)
def test_a_name_or_size_that_cannot_be_is_one_paragraph(kept, capsys, case, verb):
    words, said = OPTIONS[case]
    prompt = ["--prompt", HELLO] if verb == "generate" else []
    assert main([verb, str(kept), *prompt, *words.split()]) == 2
    is_one_paragraph(capsys, said)


PROMPTS: dict[str, tuple[list[str], str]] = {
    "empty": (["--prompt", ""], "the prompt is empty"),
    "beyond the context": (["--prompt", "a" * CONTEXT], "exceed the model's context"),
    "together beyond it": (
        ["--prompt", "a" * 250, "--max-new-tokens", "9"],
        "252 tokens and 9 new ones exceed",
    ),
    "no text": (["--prompt", "\udcff"], "the prompt is no UTF-8 text"),
    "temperature": (["--prompt", "a", "--temperature", "nan"], "temperature nan. Allowed: 0 or more."),
    "top-p": (["--prompt", "a", "--temperature", "1", "--top-p", "1.5"], "top_p 1.5. Allowed: more than 0"),
    "top-k": (["--prompt", "a", "--temperature", "1", "--top-k", "-1"], "top_k -1. Allowed:"),
    "min-p": (["--prompt", "a", "--temperature", "1", "--min-p", "2"], "min_p 2.0. Allowed: 0 to 1."),
    "narrowing nothing": (
        ["--prompt", "a", "--top-k", "5", "--min-p", "0.1"],
        "--top-k, --min-p would change nothing",
    ),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_a_prompt_or_number_that_cannot_be_is_one_paragraph(kept, capsys, case):
    words, said = PROMPTS[case]
    assert generate(kept, *words) == 2
    is_one_paragraph(capsys, said)


def test_an_empty_standard_input_is_an_empty_prompt(kept, capsys, stdin):
    for data in (b"", b"\n"):
        stdin(data)
        assert generate(kept, "--prompt", "-") == 2
        is_one_paragraph(capsys, "the prompt is empty")
    stdin(b"\xff\xfe")
    assert generate(kept, "--prompt", "-") == 2
    assert "standard input is no UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_one_paragraph(folder, capsys, spoil, said):
    spoil(folder)
    assert generate(folder, "--prompt", HELLO) == 2
    is_one_paragraph(capsys, said)


@pytest.mark.parametrize("verb", ["generate", "bench"])
def test_a_factory_is_no_language_model(capsys, verb):
    words = ["--prompt", HELLO] if verb == "generate" else ["--kv", "int8"]
    assert main([verb, "shop:make", *words]) == 2
    is_one_paragraph(capsys, "shop:make names a factory")


def test_an_error_is_json_where_json_was_asked_for(kept, capsys):
    assert generate(kept, "--prompt", HELLO, "--kv", "int9", "--json") == 2
    error = answered(capsys)["error"]
    assert (error["type"], error["exit_code"]) == ("UnknownName", 2)


def test_ask_checks_for_itself(kept):
    with pytest.raises(WorkloadError, match="the prompt is empty"):
        continuation.ask(tw.load_decoder(kept), "", on_text=print)


def is_one_paragraph(capsys: pytest.CaptureFixture[str], said: str) -> None:
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("torchwright: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


# ----------------------------------------------------------------------------------------------------- how it leaves


def test_ctrl_c_keeps_what_was_written(capsys, says):
    says("so far", KeyboardInterrupt)
    assert generate("--prompt", HELLO) == 130
    captured = capsys.readouterr()
    assert captured.out == "so far"
    assert captured.err.strip() == "interrupted"


@pytest.mark.slow
def test_a_reader_that_left_ends_it_quietly(kept):
    words = ["generate", str(kept), "--prompt", HELLO]
    code = f"import sys; from torchwright.cli import main; sys.exit(main({words!r}))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141  # as of a program that SIGPIPE ended
