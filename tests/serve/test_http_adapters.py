"""Adapters by HTTP: chosen by the model's name, listed, loaded below one folder, and nothing told of any other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from fake_engine import Trouble
from http_support import MODEL, Running, command, error, serving, wait_until

from lora_files import write_adapter
from torchwright import cli
from torchwright.hub.adapter import CONFIG, WEIGHTS
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.adapters import read_adapter
from torchwright.workloads.language import BUNDLED

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def files(folder: Path) -> Path:
    """An adapter's files, which the fake engine does not read."""
    folder.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (folder / name).write_text("secret words")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters, `allowed`, and others beside it."""
    place = tmp_path_factory.mktemp("place")
    for name in ("allowed/a", "allowed/deep/b", "allowed/damaged", "outside", "allowed-too"):
        files(place / name)
    allowed = place / "allowed"
    (allowed / "link").symlink_to(place / "outside")
    (allowed / "inner").symlink_to(allowed / "a")
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "leak").mkdir()
    (allowed / "leak" / CONFIG).symlink_to(place / "outside" / CONFIG)
    (allowed / "leak" / WEIGHTS).symlink_to(allowed / "a" / WEIGHTS)
    (allowed / "empty").mkdir()
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Running]:
    with serving(allow_adapters=place / "allowed", aliases=["other"]) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize("path", ["a", "deep/b", "./deep/../a", "inner", "{allowed}/a"])
def test_an_adapter_is_loaded_listed_chosen_and_unloaded(http: httpx.Client, place: Path, path: str) -> None:
    path = path.format(allowed=place / "allowed")
    loaded = http.post(LOAD, json={"lora_name": "mine", "lora_path": path})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert (cards["mine"]["parent"], cards[MODEL]["parent"]) == (MODEL, None)
    assert cards["mine"]["root"] == str((place / "allowed" / path).resolve())
    assert http.get("/v1/models/mine").json() == cards["mine"]
    for route, body in (
        ("/v1/completions", {"prompt": "a b"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ):
        answer = http.post(route, json=body | {"model": "mine"})
        assert (answer.status_code, answer.json()["model"]) == (200, "mine")
        assert http.post(route, json=body | {"model": MODEL}).json()["model"] == MODEL
    gone = http.post(UNLOAD, json={"lora_name": "mine"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert http.post("/v1/completions", json={"prompt": "a", "model": "mine"}).status_code == 404
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL, "other"]


@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "../allowed-too",
        "{place}/outside",
        "link",
        "leak",
        "loop",
        "empty",
        "missing",
        "a/" + CONFIG,
        "..",
        ".",
        "/",
        "/etc",
        "/proc/self/root/{place}/outside",
        "~/a",
        "file://{place}/allowed/a",
        "https://example.com/a",
        "a\u0000b",
        "a/" * 2000,
        "\U0001f600" * 300,
    ],
)
def test_no_path_leads_out_and_no_answer_tells_what_is_there(
    http: httpx.Client, place: Path, path: str
) -> None:
    path = path.format(place=place)
    refused = http.post(LOAD, json={"lora_name": "x", "lora_path": path})
    found = error(refused)
    assert (refused.status_code, found["code"], found["param"]) == (404, "adapter_not_found", "lora_path")
    assert found["message"].startswith("there is no adapter at '")
    assert found["message"].endswith("below the folder of --allow-adapters") or len(path) > 100
    assert "outside" not in found["message"].replace(path, "")
    assert str(place) not in found["message"].replace(path, "")
    assert "secret" not in refused.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": MODEL, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "other", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a b", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x\n", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": "a"}, "lora_name"),
        ({"lora_name": ["x"], "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path"),
        ({"lora_name": "x", "lora_path": 3}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a" * 20_000}, None),
        ({"lora_path": "a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "a", "unknown": 1}, "unknown"),
    ],
)
def test_wrong_fields_are_named(http: httpx.Client, body: dict[str, object], param: str | None) -> None:
    refused = http.post(LOAD, json=body)
    assert (refused.status_code, error(refused)["param"]) == (400, param)


def test_a_damaged_adapter_is_reported_by_the_path_that_the_client_gave(http: httpx.Client) -> None:
    refused = http.post(LOAD, json={"lora_name": "x", "lora_path": "damaged"})
    assert refused.status_code == 400
    assert error(refused)["message"] == f"damaged/{WEIGHTS} cannot be read"
    assert "x" not in [card["id"] for card in http.get("/v1/models").json()["data"]]


def test_a_name_in_use_is_replaced_only_when_asked(http: httpx.Client, place: Path) -> None:
    assert http.post(LOAD, json={"lora_name": "n", "lora_path": "a"}).status_code == 200
    refused = http.post(LOAD, json={"lora_name": "n", "lora_path": "deep/b"})
    assert (refused.status_code, error(refused)["code"]) == (400, "adapter_exists")
    swapped = http.post(LOAD, json={"lora_name": "n", "lora_path": "deep/b", "load_inplace": True})
    assert swapped.status_code == 200
    assert http.get("/v1/models/n").json()["root"] == str(place / "allowed/deep/b")
    assert http.post(UNLOAD, json={"lora_name": "n"}).status_code == 200
    assert http.post(UNLOAD, json={"lora_name": "n"}).status_code == 404


def test_nothing_is_loaded_without_the_option() -> None:
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as http:
        for path in (LOAD, UNLOAD):
            refused = http.post(path, json={"lora_name": "x", "lora_path": "/etc"})
            assert (refused.status_code, error(refused)["code"]) == (403, "adapters_not_allowed")


def test_an_encoder_takes_none(place: Path) -> None:
    with (
        serving(kind="encoder", allow_adapters=place / "allowed") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        refused = http.post(LOAD, json={"lora_name": "x", "lora_path": "a"})
        assert (refused.status_code, error(refused)["code"]) == (400, "wrong_model_kind")


def test_an_engine_that_died_has_its_adapters_again(place: Path) -> None:
    with (
        serving(allow_adapters=place / "allowed") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        for name in ("a", "b"):
            assert http.post(LOAD, json={"lora_name": name, "lora_path": "a"}).status_code == 200
        assert http.post(UNLOAD, json={"lora_name": "b"}).status_code == 200
        http.post("/v1/completions", json={"prompt": "a b", "priority": int(Trouble.DIE)})
        client = running.service.client
        wait_until(lambda: client.restarts == 1 and client.state == "ready", 60)
        assert http.post("/v1/completions", json={"prompt": "a b", "model": "a"}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a b", "model": "b"}).status_code == 404


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--adapter a=x --adapter a=y", "the name 'a' is given twice"),
        (f"--adapter {MODEL}=x", "is the served model's name"),
        ("--served-model-name m --adapter m=x", "is the served model's name"),
        ("--allow-adapters /no/such/folder", "is not a folder"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--port", "0", *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_command_serves_adapters_from_the_start_and_later(tmp_path: Path) -> None:
    """The real engine: each name answers as `generate` does with its adapter, also while another is swapped."""
    folders = [write_adapter(BUNDLED, tmp_path / f"a{n}", seed=n, r=8, std=0.1) for n in range(3)]
    loaded = load_decoder(BUNDLED, torch.bfloat16)
    wanted = [loaded.generate("Once upon a time", max_new_tokens=20, stop=[])]
    for folder in folders:
        own = read_adapter(folder, loaded.decoder, loaded.folder)
        wanted.append(loaded.generate("Once upon a time", max_new_tokens=20, stop=[], adapter=own))
    assert len(set(wanted)) == 4
    options = ["--adapter", f"one={folders[0]}", "--allow-adapters", str(tmp_path)]
    with command(*options) as running, httpx.Client(base_url=running.url, timeout=120) as http:

        def answer(model: str | None) -> str:
            body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            found = http.post("/v1/completions", json=body | ({"model": model} if model else {}))
            assert found.status_code == 200, found.text
            return found.json()["choices"][0]["text"]

        assert [answer(None), answer("one"), answer(None)] == [wanted[0], wanted[1], wanted[0]]
        assert http.post(LOAD, json={"lora_name": "two", "lora_path": "a1"}).status_code == 200
        assert [answer("two"), answer("one")] == [wanted[2], wanted[1]]
        body = {"prompt": "Once", "max_tokens": 400, "model": "two", "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            swap = {"lora_name": "two", "lora_path": "a2", "load_inplace": True}
            assert httpx.post(running.url + LOAD, json=swap, timeout=60).status_code == 200
            data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert data[-1]["choices"][0]["finish_reason"] == "length"
        assert [answer("two"), answer("one")] == [wanted[3], wanted[1]]
        (folders[1] / WEIGHTS).write_bytes(b"\0" * 9)
        refused = http.post(LOAD, json={"lora_name": "bad", "lora_path": "a1"})
        assert (refused.status_code, str(tmp_path) in refused.text) == (400, False)
        os.mkfifo(tmp_path / "pipe")
        assert http.post(LOAD, json={"lora_name": "bad", "lora_path": "pipe"}).status_code == 404
        assert http.post(UNLOAD, json={"lora_name": "one"}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "model": "one"}).status_code == 404
        assert answer(None) == wanted[0]
