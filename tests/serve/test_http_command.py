"""Before anything is loaded: what is served, whether it fits, how the engine is started."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import struct
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import drafts
from torchwright import cli
from torchwright.cli.options import parse_bytes
from torchwright.cli.serve import command, read_options
from torchwright.core.errors import ArtifactError, ModelError, TorchwrightError, WorkloadError
from torchwright.optimization.artifact.folder import RECIPE
from torchwright.serve.command import KEY_VARIABLE, api_keys, engine_command, listen
from torchwright.serve.folder import BUNDLED_NAME, draft_of, find
from torchwright.serve.options import EngineOptions, ServerOptions
from torchwright.serve.preflight import SECTIONS, SIZES, Preflight, preflight

MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder of which there are only headers, on a machine with no measured ceilings."""
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "some-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens.weight": [1000, 512], "model.layers.0.q.weight": [4096, 512]}
    described: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        described[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(described).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + end)  # a hole: nobody reads it
    return path


def figures(path: Path, *, mib: int = 64, **wish: Any) -> Preflight:
    """The figures on a machine with so much memory."""
    found = preflight(find(str(path)), EngineOptions(**{"max_running": 8, **wish}), mib * MIB)
    assert found is not None
    return found


def test_an_artifacts_own_draft_is_the_default(tmp_path: Path) -> None:
    target = replace(find(None), draft=tmp_path)
    cases = {None: str(tmp_path), "none": None, "mtp": "mtp", "other": "other"}
    for given, wanted in cases.items():
        assert draft_of(given, target) == wanted
    assert draft_of(None, find(None)) is None


def test_a_draft_is_counted() -> None:
    """Its weights, and its keys and values in the same pages: of one layer, or of all those of a small model."""
    target = find(None)
    alone = preflight(target, EngineOptions())
    twin = preflight(target, EngineOptions(draft=str(target.folder)))
    own = preflight(target, EngineOptions(draft="mtp"))
    assert alone is not None
    assert twin is not None
    assert own is not None
    assert twin.weight_bytes == 2 * alone.weight_bytes
    assert twin.token_bytes == 2 * alone.token_bytes
    layers = json.loads((target.folder / "config.json").read_text())["num_hidden_layers"]
    assert own.token_bytes == alone.token_bytes + alone.token_bytes // layers


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_head_is_counted_as_one_layer(layout: str, tmp_path: Path) -> None:
    target = find(None)
    layers = json.loads((target.folder / "config.json").read_text())["num_hidden_layers"]
    alone = preflight(target, EngineOptions())
    head = drafts.write_head(target.folder, tmp_path / "head", layout=layout)
    found = preflight(target, EngineOptions(draft=str(head)))
    assert alone is not None
    assert found is not None
    assert found.token_bytes == alone.token_bytes + alone.token_bytes // layers
    stored = (head / "model.safetensors").stat().st_size
    assert 0 < found.weight_bytes - alone.weight_bytes <= stored


def test_the_bundled_model_is_served_without_a_name() -> None:
    target = find(None)
    assert target.name == BUNDLED_NAME
    assert (target.folder / "tokenizer.json").is_file()


def test_a_folder_an_artifact_and_nothing(folder: Path, tmp_path: Path) -> None:
    assert find(str(folder)).name == "some-model"
    artifact = tmp_path / "out"
    artifact.mkdir()
    (artifact / RECIPE).write_text('{"workload": {"kind": "encoder"}}')
    target = find(str(artifact))
    assert (target.served_as, target.folder) == ("reader", artifact / "model")
    (artifact / RECIPE).write_text('{"workload": {"kind": "image"}}')
    with pytest.raises(ModelError, match=r"kind 'image', which is not served.*torchwright\.load"):
        find(str(artifact))
    (artifact / RECIPE).write_text("{}")
    with pytest.raises(ArtifactError, match="cannot be read"):
        find(str(artifact))
    # Without the name of a verb: `torchwright chat` shows it, too.
    with pytest.raises(ModelError, match=r"there is no model.*leave the model out"):
        find(str(tmp_path / "missing"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architectures": ["SomethingForCausalLM"]}, r"does not know the model of .*SomethingForCausalLM"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"hidden_size": 8}},
            r"is multimodal: it takes pictures besides text.*LlavaForConditionalGeneration",
        ),
        ({"model_type": "qwen2"}, r"'model_type' cannot be used"),
    ],
)
def test_an_architecture_that_is_not_served_is_named_before_any_prediction(
    folder: Path, changed: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    assert cli.main(["serve", str(folder), "--port", "0"]) == 2
    captured = capsys.readouterr()
    assert re.search(words, captured.err, re.DOTALL)
    assert "predicted" not in captured.out + captured.err


@pytest.mark.parametrize("key", [*SIZES, *SECTIONS])
def test_a_size_that_the_engine_would_refuse_ends_the_preflight(folder: Path, key: str) -> None:
    for value in (1e30, "yarn", -1, [1], 2**40):
        (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        with pytest.raises(ModelError, match=f"'{key}' cannot be used|more layers than any model has"):
            figures(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert figures(folder).weight_bytes > 0


def test_a_folder_without_architectures_and_classifiers_are_recognized(folder: Path) -> None:
    bare = {key: value for key, value in CONFIG.items() if key != "architectures"}
    (folder / "config.json").write_text(json.dumps(bare | {"model_type": "llama"}))
    assert find(str(folder)).served_as == "writer"
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"architectures": ["BertForSequenceClassification"]})
    )
    assert find(str(folder)).served_as == "reader"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-context 2049", r"--max-context 2049 is more than the model's own context.*1 to 2048"),
        ("--served-model-name a --served-model-name a", r"--served-model-name cannot be used.*'a' twice"),
        ("--adapter a --adapter b", r"given 2 times \(a, b\); one is taken"),
        ("--quantize q4_0", r"unknown quantization 'q4_0'.*--quantize w4a8 keeps weights in 4 bits"),
        ("--quantize int8", r"unknown quantization 'int8'.*--quantize w8a8 keeps weights in 8 bits"),
    ],
)
def test_options_that_cannot_be_kept_are_refused_before_anything_starts(
    folder: Path, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(folder), "--port", "0", *words.split()]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_a_variant_is_read_under_its_own_names(folder: Path) -> None:
    """EXAONE's published configurations call the number of layers otherwise."""
    other = {key: value for key, value in CONFIG.items() if key != "num_hidden_layers"}
    exaone = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_layers": 4}
    (folder / "config.json").write_text(json.dumps(other | exaone))
    assert figures(folder).token_bytes == 4 * 2 * 2 * 64 * 2


def test_a_scaled_context_counts_as_the_models_own(folder: Path) -> None:
    rope = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}
    (folder / "config.json").write_text(json.dumps(CONFIG | rope))
    assert figures(folder, max_context=8192).context == 8192
    with pytest.raises(WorkloadError, match="1 to 8192"):
        figures(folder, max_context=8193)


def test_bytes_and_requests_are_counted(folder: Path) -> None:
    found = figures(folder)
    # The embedding is there twice: as it is, and as the output layer.
    assert found.weight_bytes == 2 * 512 * (1000 + 4096 + 1000)
    assert found.token_bytes == 4 * 2 * 2 * 64 * 2
    assert found.context == 2048
    assert found.kv_bytes == 8 * 2048 * found.token_bytes
    assert found.full_requests == 8
    assert (found.ttft_s, found.advice) == (None, None)
    assert "torchwright doctor" in str(found)
    rounded = 512 * (4096 + 1000)
    assert figures(folder, quantize="w8a8").weight_bytes == 512 * 2 * 1000 + rounded
    assert figures(folder, quantize="w4a8").weight_bytes == 512 * 2 * 1000 + rounded // 2 + rounded // 32
    fewer = figures(folder, quantize="w4a16:group_size=128").weight_bytes
    assert fewer == 512 * 2 * 1000 + rounded // 2 + rounded // 128
    with pytest.raises(TorchwrightError, match="unknown quantization 'w4'"):
        figures(folder, quantize="w4")
    assert figures(folder, kv="int8").token_bytes == 4 * 2 * 2 * (64 + 4)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"kv_memory": MIB}, "--kv-memory 4MiB"),
        ({"kv_memory": 200 * MIB, "max_running": 100}, "--kv-memory 58MiB"),
        ({"kv": "fp32", "max_running": 1}, None),
    ],
)
def test_one_flag_is_named_where_something_does_not_fit(
    folder: Path, wish: dict[str, Any], words: str | None
) -> None:
    advice = figures(folder, **wish).advice
    assert (advice is None) if words is None else (advice is not None and words in advice)


@pytest.mark.parametrize(
    ("available", "wish", "words"),
    [
        (5, {}, "--quantize w4a8"),
        (9, {}, "--kv int8"),
        (7, {"kv": "int8"}, "--max-context"),
        (1, {"quantize": "w4a8"}, "smaller"),
    ],
)
def test_a_small_machine_gets_advice(folder: Path, available: int, wish: dict[str, Any], words: str) -> None:
    assert words in (figures(folder, mib=available, **wish).advice or "")


def test_times_are_predicted_from_measured_ceilings(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "ceilings"
    kept.mkdir(parents=True)
    measured_on = {"device": {"kind": "cpu"}, "torch": version("torch")}
    ceilings: dict[str, Any] = {
        "read_gb_per_s": 10.0,
        "tflops": {"bfloat16": 1.0, "int8": 2.0},
        "disturbed": None,
    }
    (kept / "a.json").write_text(json.dumps({"measured_on": measured_on, "ceilings": ceilings}))
    found = figures(folder)
    assert found.tpot_s == pytest.approx(found.weight_bytes / 10e9)
    assert found.ttft_s == pytest.approx(2 * 512 * (4096 + 1000) * 512 / 1e12)
    assert figures(folder, quantize="w8a8").ttft_s == pytest.approx(found.ttft_s / 2)
    # Its 16-bit inputs are multiplied as two digits of 8 bits.
    assert figures(folder, quantize="w4a16").ttft_s == pytest.approx(found.ttft_s)


@pytest.mark.parametrize("said", [{"disturbed": "machine busy (load 20 on 2 cores)"}, {"undisturbed": True}])
def test_nothing_is_predicted_from_disturbed_ceilings(
    folder: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    """Files of versions that measured on a busy machine do not say so by this name."""
    kept = tmp_path / "cache" / "ceilings"
    kept.mkdir(parents=True)
    measured_on = {"device": {"kind": "cpu"}, "torch": version("torch")}
    ceilings = {"read_gb_per_s": 0.1, "tflops": {"bfloat16": 0.01}, **said}
    (kept / "a.json").write_text(json.dumps({"measured_on": measured_on, "ceilings": ceilings}))
    found = figures(folder)
    assert (found.tpot_s, found.ttft_s) == (None, None)
    assert "predicted  nothing: this machine's ceilings are not measured" in str(found)


def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(ModelError, match="is no safetensors file"):
        figures(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        figures(folder)


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), (" 12 ", 12)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "0", "-1GiB", "4 TiB", "1e3"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


def test_the_engine_is_told_what_the_server_was() -> None:
    from torchwright.serve.engine.process import parser

    options = EngineOptions(
        model="folder",
        kv_memory=123,
        max_context=64,
        quantize="w4a8",
        kv="int8",
        adapters=(("a", "one"), ("b", "two")),
        trust=True,
        speculate_rows=3,
        prefix_cache=False,
    )
    words = engine_command("ipc://x", options)
    assert words[:3] == [sys.executable, "-m", "torchwright.core.process.orphans"]
    assert words[3:5] == [str(os.getpid()), "torchwright.serve.engine.process"]
    given = parser().parse_args(words[5:])
    assert (given.endpoint, given.parent) == ("ipc://x", os.getpid())
    assert EngineOptions.from_json(given.options) == options
    assert EngineOptions.from_json("{}") == EngineOptions()


def test_every_option_of_the_command_is_read() -> None:
    words = (
        "--port 0 --max-running 8 --max-queue 9 --step-tokens 10 --max-context 11 --kv-memory 1MiB --kv int8"
    )
    words += " --no-prefix-cache --no-deterministic --speculate none --quantize w8a8 --dtype fp32 --device cpu --trust"
    words += " --adapter merged --adapter a=one --adapter b.c-1=./x=y --adapter-memory 2MiB"
    asked = read_options(command.make_context("serve", ["folder", *words.split()]))
    engine = EngineOptions(
        model="folder",
        quantize="w8a8",
        kv="int8",
        dtype="fp32",
        device="cpu",
        adapter="merged",
        adapters=(("a", "one"), ("b.c-1", "./x=y")),
        adapter_memory=2 * MIB,
        trust=True,
        kv_memory=MIB,
        step_tokens=10,
        max_running=8,
        max_queue=9,
        max_context=11,
        speculate="none",
        prefix_cache=False,
        deterministic=False,
    )
    assert asked == ServerOptions(port=0, engine=engine)
    assert read_options(command.make_context("serve", [])) == ServerOptions()


def test_more_answers_than_a_step_has_tokens_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--max-running", "600"]) == 2
    assert "--step-tokens 600" in capsys.readouterr().err


def test_the_engines_command_line_holds_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine reads command lines."""
    (tmp_path / "keys").write_text("secret-of-a-file")
    monkeypatch.setenv(KEY_VARIABLE, "secret-of-the-environment")
    options = ServerOptions(api_keys=["secret-of-the-command"], api_key_file=tmp_path / "keys")
    assert len(api_keys(options)) == 2
    assert "secret" not in " ".join(engine_command("ipc://x", options.engine))


def test_keys_come_from_options_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    file = tmp_path / "keys"
    file.write_text("from-file\r\n\n second \n")
    assert api_keys(ServerOptions()) == []
    assert api_keys(ServerOptions(api_keys=["a", "b"])) == ["a", "b"]
    assert api_keys(ServerOptions(api_key_file=file)) == ["from-file", "second"]
    assert api_keys(ServerOptions(api_keys=["a"], api_key_file=file)) == ["a", "from-file", "second"]
    monkeypatch.setenv(KEY_VARIABLE, "one two")
    assert api_keys(ServerOptions()) == ["one", "two"]
    assert api_keys(ServerOptions(api_key_file=file)) == ["from-file", "second"]


@pytest.mark.parametrize("holds", ["", " \n", "zwölf\n", "two words\n", None])
def test_a_place_without_a_key_does_not_open_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: str | None
) -> None:
    file = tmp_path / "keys"
    if holds is not None:
        file.write_text(holds)
    with pytest.raises(WorkloadError, match=str(file)):
        api_keys(ServerOptions(api_key_file=file))
    with pytest.raises(WorkloadError, match="--api-key holds"):
        api_keys(ServerOptions(api_keys=[(holds or "").strip(" ")]))
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(WorkloadError, match=KEY_VARIABLE):
        api_keys(ServerOptions())


def test_what_cannot_be_served_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/nowhere/at/all"]) == 2
    assert "there is no model" in capsys.readouterr().err
    assert cli.main(["serve", "--kv-memory", "lots"]) == 2
    assert "is no size" in capsys.readouterr().err
    assert cli.main(["serve", "--host", "256.0.0.1", "--port", "1"]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_who_comes_before_the_server_is_there_waits_for_it() -> None:
    with listen(ServerOptions(port=0)) as listening:
        socket.create_connection(listening.getsockname()).close()


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "torchwright.serve.command")
    monkeypatch.delattr("torchwright.serve.command", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve"]) == 2
    assert "torchwright[serve]" in capsys.readouterr().err


def test_the_http_process_imports_no_torch() -> None:
    import subprocess

    script = "import sys, torchwright.serve.http.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
