"""Before anything is loaded: what is served, whether it fits, how the engine is started."""

from __future__ import annotations

import importlib
import json
import math
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from torchwright import cli
from torchwright.artifact.folder import RECIPE
from torchwright.errors import ArtifactError, ModelError, TorchwrightError, WorkloadError
from torchwright.serve import preflight as room
from torchwright.serve.command import KEY_VARIABLE, Options, _listen, api_keys, engine_command, parse_bytes
from torchwright.serve.folder import BUNDLED_NAME, find
from torchwright.serve.preflight import Wish, preflight

MIB = 1 << 20
CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder of which there are only headers, on a machine with 64 MiB and no measured ceilings."""
    monkeypatch.setattr(room, "available_bytes", lambda: 64 * MIB)
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


def figures(path: Path, **wish: Any) -> room.Preflight:
    found = preflight(find(str(path)), Wish(**{"max_running": 8, **wish}))
    assert found is not None
    return found


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
    assert (target.encoder, target.folder) == (True, artifact / "model")
    (artifact / RECIPE).write_text('{"workload": {"kind": "image"}}')
    with pytest.raises(ModelError, match=r"kind 'image', which is not served.*torchwright\.load"):
        find(str(artifact))
    (artifact / RECIPE).write_text("{}")
    with pytest.raises(ArtifactError, match="cannot be read"):
        find(str(artifact))
    with pytest.raises(ModelError, match="there is no model"):
        find(str(tmp_path / "missing"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        find(str(tmp_path))


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
    assert figures(folder, quantize="w4a8").weight_bytes == 512 * (2 * 1000 + 4096 // 2 + 1000 // 2)
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
def test_a_small_machine_gets_advice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, available: int, wish: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: available * MIB)
    assert words in (figures(folder, **wish).advice or "")


def test_times_are_predicted_from_measured_ceilings(folder: Path, tmp_path: Path) -> None:
    from importlib.metadata import version

    kept = tmp_path / "cache" / "ceilings"
    kept.mkdir(parents=True)
    measured_on = {"device": {"kind": "cpu"}, "torch": version("torch")}
    ceilings = {"read_gb_per_s": 10.0, "tflops": {"bfloat16": 1.0}}
    (kept / "a.json").write_text(json.dumps({"measured_on": measured_on, "ceilings": ceilings}))
    found = figures(folder)
    assert found.tpot_s == pytest.approx(found.weight_bytes / 10e9)
    assert found.ttft_s == pytest.approx(2 * 512 * (4096 + 1000) * 512 / 1e12)


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


def test_the_engine_understands_its_command() -> None:
    from torchwright.serve.engine.process import parser

    options = Options(
        kv_memory=123, max_context=64, quantize="w4a8", kv="int8", trust=True, deterministic=False
    )
    words = engine_command("ipc://x", "folder", options)
    assert words[:3] == [sys.executable, "-m", "torchwright.serve.engine.process"]
    given = parser().parse_args(words[3:])
    assert (given.model, given.kv_memory, given.max_context, given.quantize) == ("folder", 123, 64, "w4a8")
    assert (given.trust, given.deterministic, given.speculate) == (True, False, "ngram")
    assert parser().parse_args(engine_command("ipc://x", None, Options())[3:]).model is None


def test_keys_come_from_options_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    file = tmp_path / "keys"
    file.write_text("from-file\r\n\n second \n")
    assert api_keys(Options()) == []
    assert api_keys(Options(api_keys=["a", "b"])) == ["a", "b"]
    assert api_keys(Options(api_key_file=file)) == ["from-file", "second"]
    assert api_keys(Options(api_keys=["a"], api_key_file=file)) == ["a", "from-file", "second"]
    monkeypatch.setenv(KEY_VARIABLE, "one two")
    assert api_keys(Options()) == ["one", "two"]
    assert api_keys(Options(api_key_file=file)) == ["from-file", "second"]


@pytest.mark.parametrize("holds", ["", " \n", "zwölf\n", "two words\n", None])
def test_a_place_without_a_key_does_not_open_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: str | None
) -> None:
    file = tmp_path / "keys"
    if holds is not None:
        file.write_text(holds)
    with pytest.raises(WorkloadError, match=str(file)):
        api_keys(Options(api_key_file=file))
    with pytest.raises(WorkloadError, match="--api-key holds"):
        api_keys(Options(api_keys=[(holds or "").strip(" ")]))
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(WorkloadError, match=KEY_VARIABLE):
        api_keys(Options())


def test_what_cannot_be_served_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/nowhere/at/all"]) == 2
    assert "there is no model" in capsys.readouterr().err
    assert cli.main(["serve", "--kv-memory", "lots"]) == 2
    assert "is no size" in capsys.readouterr().err
    assert cli.main(["serve", "--host", "256.0.0.1", "--port", "1"]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_who_comes_before_the_server_is_there_waits_for_it() -> None:
    with _listen(Options(port=0)) as listening:
        socket.create_connection(listening.getsockname()).close()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchwright.serve.command")
    monkeypatch.delattr("torchwright.serve.command", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(TorchwrightError, match=r"torchwright\[serve\]"):
        importlib.import_module("torchwright.cli.serve")._serve_command()


def test_the_http_process_imports_no_torch() -> None:
    import subprocess

    script = "import sys, torchwright.serve.http.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
