"""Weights that change by HTTP: below one folder alone, named in every answer, restored after a death; and pauses."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import SLOW_SEED, Trouble
from http_support import Command, Running, command, error, events, serving, wait_until
from safetensors.torch import load_file, save_file

from torchwright.workloads.language import BUNDLED

UPDATE = "/update_weights_from_disk"
GREEDY = {"temperature": 0, "max_new_tokens": 8}
SLOW = GREEDY | {"max_new_tokens": 900, "sampling_seed": SLOW_SEED}
LONG = {"text": "a b c", "sampling_params": SLOW, "stream": True}


def files(folder: Path) -> Path:
    """A model's files, which the fake engine does not read."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("secret words")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, `allowed`, and others beside it."""
    place = tmp_path_factory.mktemp("place")
    for name in ("allowed/a", "allowed/deep/b", "allowed/damaged", "outside", "allowed-too", "allowed/leak"):
        files(place / name)
    allowed = place / "allowed"
    (allowed / "file.safetensors").write_text("")
    (allowed / "link").symlink_to(place / "outside")
    (allowed / "inner").symlink_to(allowed / "a")
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "leak" / "more.safetensors").symlink_to(place / "outside" / "model.safetensors")
    (allowed / "empty").mkdir()
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Running]:
    with serving(allow_weights=place / "allowed") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize("path", ["a", "deep/b", "./deep/../a", "inner", "{allowed}/a", "file.safetensors"])
def test_weights_are_named_in_every_answer(http: httpx.Client, place: Path, path: str) -> None:
    path = path.format(allowed=place / "allowed")
    told = http.post(UPDATE, json={"model_path": path, "weight_version": "step-7", "is_async": False})
    assert told.status_code == 200, told.text
    assert (told.json()["success"], told.json()["weight_version"]) == (True, "step-7")
    assert path in told.json()["message"]
    for about in ("/weight_version", "/get_weight_version", "/model_info", "/get_model_info", "/server_info"):
        assert http.get(about).json()["weight_version"] == "step-7"
    generated = http.post("/generate", json={"text": "a b", "sampling_params": GREEDY}).json()
    assert generated["meta_info"]["weight_version"] == "step-7"
    user = [{"role": "user", "content": "a"}]
    for route, body in (
        ("/v1/completions", {"prompt": "a b"}),
        ("/v1/chat/completions", {"messages": user, "max_tokens": 4}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": user, "max_tokens": 3}),
    ):
        answer = http.post(route, json=body)
        assert answer.headers["x-torchwright-weight-version"] == "step-7"
        if "completions" in route:
            assert answer.json()["sglext"]["weight_version"] == "step-7"
            assert answer.json()["system_fingerprint"] == "of step-7"
            last = events(http.post(route, json=body | {"stream": True}).text)[-1]
            assert last["sglext"]["weight_versions"][0]["version"] == "step-7"
    named = http.post("/update_weight_version", json={"new_version": "seven"})
    assert named.json()["new_version"] == http.get("/weight_version").json()["weight_version"] == "seven"


@pytest.mark.parametrize(
    "path",
    ["../outside", "../allowed-too", "link", "loop", "leak", "empty", "nowhere", "{place}/outside", "\0"],
)
def test_a_path_outside_is_as_one_that_does_not_exist(http: httpx.Client, place: Path, path: str) -> None:
    path = path.format(place=place)
    before = http.get("/weight_version").json()
    response = http.post(UPDATE, json={"model_path": path})
    assert (response.status_code, error(response)["code"]) == (404, "weights_not_found")
    assert str(place) not in error(response)["message"].replace(path, "")
    assert "secret" not in response.text
    assert http.get("/weight_version").json() == before


def test_a_folder_that_cannot_be_read_changes_nothing(http: httpx.Client, place: Path) -> None:
    before = http.get("/weight_version").json()
    response = http.post(UPDATE, json={"model_path": "damaged", "weight_version": "never"})
    assert (response.status_code, error(response)["param"]) == (400, "model_path")
    assert error(response)["message"] == "damaged: damaged", "the path is the client's own"
    assert http.get("/weight_version").json() == before


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (UPDATE, {}, "'model_path' is missing"),
        (UPDATE, {"model_path": "a", "load_format": "pt"}, "load_format"),
        (UPDATE, {"model_path": "a", "flush_cache": False}, "keys and values of other weights"),
        (UPDATE, {"model_path": "a", "is_async": True}, "'is_async' is not supported"),
        (UPDATE, {"model_path": "a", "weight_version": "a b"}, "weight_version"),
        ("/pause_generation", {"mode": "soon"}, "mode"),
        ("/abort_request", {}, "give rid, or abort_all"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "give rid, or abort_all"),
        ("/update_weight_version", {}, "'new_version' is missing"),
        ("/continue_generation", {"zzz": 1}, "'zzz' is not supported"),
    ],
)
def test_what_is_wrong_is_refused_by_name(http: httpx.Client, path: str, body: Any, words: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert words in error(response)["message"]


def test_without_the_folder_nobody_steers_the_engine() -> None:
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as http:
        for path, body in (
            (UPDATE, {"model_path": "a"}),
            ("/update_weights", {"model_path": "a"}),
            ("/update_weight_version", {"new_version": "a"}),
            ("/pause_generation", {}),
            ("/continue_generation", {}),
            ("/abort_request", {"abort_all": True}),
        ):
            response = http.post(path, json=body)
            assert (response.status_code, error(response)["code"]) == (403, "weights_not_allowed")
        assert http.post("/abort_request", json={"rid": "mine"}).status_code == 200
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert "sglext" not in answer.json()
        assert "x-torchwright-weight-version" not in answer.headers


def test_a_pause_holds_requests_back_until_generation_goes_on(http: httpx.Client, server: Running) -> None:
    assert http.post("/pause", json={"mode": "in_place"}).json()["status"] == "ok"
    found: list[httpx.Response] = []
    body = {"text": "a b", "sampling_params": GREEDY}
    waiting = threading.Thread(target=lambda: found.append(http.post("/generate", json=body)))
    waiting.start()
    wait_until(lambda: server.service.client.waiting == 1)
    time.sleep(0.1)
    assert not found
    assert http.post("/resume").json()["num_paused_requests"] == 1
    waiting.join(20)
    assert found[0].status_code == 200


def test_a_pause_ends_requests_by_default_and_so_does_abort_all(http: httpx.Client) -> None:
    for path, body in (("/pause_generation", {}), ("/abort", {"abort_all": True})):
        with http.stream("POST", "/generate", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            assert http.post(path, json=body).status_code == 200
            last = events("\n".join(lines))[-1]
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert http.post("/continue_generation", json={"torch_empty_cache": True}).status_code == 200


def test_completions_that_are_aborted_say_so(http: httpx.Client) -> None:
    body = {"prompt": "a b c", "max_tokens": 900, "seed": SLOW_SEED, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = events(next(lines))[0]
        assert http.post("/abort_request", json={"rid": first["id"]}).json()["num_aborted_requests"] == 1
        ended = [
            event["choices"][0]["finish_reason"] for event in events("\n".join(lines)) if event["choices"]
        ]
    assert ended[-1] == "abort"


@pytest.mark.slow
def test_an_engine_that_follows_a_death_has_the_weights_and_the_pause(place: Path) -> None:
    with (
        serving(allow_weights=place / "allowed") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        client = running.service.client
        assert http.post(UPDATE, json={"model_path": "a", "weight_version": "kept"}).status_code == 200
        http.post("/v1/completions", json={"prompt": "a", "priority": int(Trouble.DIE)})
        wait_until(lambda: client.restarts == 1 and client.state == "ready")
        assert http.get("/weight_version").json() == {"weight_version": "kept"}
        answer = http.post("/generate", json={"text": "a b", "sampling_params": GREEDY}).json()
        assert answer["meta_info"]["weight_version"] == "kept"


def other_weights(folder: Path, scale: float) -> Path:
    """The bundled model with other values."""
    folder.mkdir(parents=True)
    for file in BUNDLED.iterdir():
        if file.suffix == ".json" or "tokenizer" in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(BUNDLED / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("mlp.down_proj.weight"))
    tensors[name] = tensors[name] * scale
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, Path]]:
    folder = tmp_path_factory.mktemp("weights")
    for name, scale in (("one", 1.0), ("half", 0.5), ("double", 2.0)):
        other_weights(folder / name, scale)
    (folder / "alone.safetensors").write_bytes((folder / "half" / "model.safetensors").read_bytes())
    with command("--allow-weights", str(folder), "--max-running", "8") as running:
        yield running, folder


def scored(http: httpx.Client, ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    answer = http.post("/generate", json=body).json()
    return answer["output_ids"], [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.slow
def test_answers_under_way_go_on_with_the_new_weights_bit_for_bit(real: tuple[Command, Path]) -> None:
    """Tokens after a change equal those of a server started with the new weights, given the tokens before it."""
    running, folder = real
    prompt = list(range(5, 60))
    with httpx.Client(base_url=running.url, timeout=60) as http:
        params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": True}
        with http.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
            told = http.post(UPDATE, json={"model_path": "half", "weight_version": "half"})
            assert told.json()["num_paused_requests"] == 1, told.text
            assert http.post("/continue_generation").status_code == 200
            last = events("\n".join(lines))[-1]
        old, new = last["meta_info"]["weight_versions"]
        assert (new["version"], new["end"], old["start"]) == ("half", 400, 0)
        assert 0 < old["end"] == new["start"] < 400
        fresh_prompt, kept = prompt + last["output_ids"][: old["end"]], old["end"]
        with command(str(folder / "half")) as fresh, httpx.Client(base_url=fresh.url, timeout=60) as other:
            tokens, logprobs = scored(other, fresh_prompt, 400 - kept)
            alone = scored(other, prompt, 24)
        assert last["output_ids"][kept:] == tokens
        assert [pair[0] for pair in last["meta_info"]["output_token_logprobs"]][kept:] == logprobs
        assert scored(http, prompt, 24) == alone, "no key or value of the old weights is used again"
        # One file with all tensors does as well, and what happens to it afterwards changes nothing.
        assert http.post(UPDATE, json={"model_path": "double"}).status_code == 200
        assert scored(http, prompt, 24) != alone
        handle = folder / "alone.safetensors"
        assert http.post(UPDATE, json={"model_path": handle.name}).status_code == 200
        size = handle.stat().st_size
        with handle.open("r+b") as file:
            file.seek(size // 2)
            file.write(bytes(size - size // 2))
        assert scored(http, prompt, 24) == alone
        assert http.post("/flush_cache").status_code == 200
        assert scored(http, prompt, 24) == alone
        for folder_name, words in (("../", "no weights"), ("nowhere", "no weights")):
            assert words in error(http.post(UPDATE, json={"model_path": folder_name}))["message"]


@pytest.mark.slow
def test_an_engine_that_was_killed_reads_the_weights_again(real: tuple[Command, Path]) -> None:
    running, _ = real
    with httpx.Client(base_url=running.url, timeout=60) as http:
        assert http.post(UPDATE, json={"model_path": "half", "weight_version": "h"}).status_code == 200
        before = scored(http, [5, 6, 7], 12)
        os.kill(running.engine_pid(), signal.SIGKILL)
        wait_until(lambda: http.get("/ready").status_code != 200)
        wait_until(lambda: http.get("/ready").status_code == 200, 60)
        assert http.get("/weight_version").json() == {"weight_version": "h"}
        assert scored(http, [5, 6, 7], 12) == before


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_changes_under_load(real: tuple[Command, Path]) -> None:
    running, _ = real
    stopping = threading.Event()
    failed: list[str] = []

    def load() -> None:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            while not stopping.is_set():
                params = {"max_new_tokens": 64, "n": 2, "ignore_eos": True}
                response = http.post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": params})
                if response.status_code != 200:
                    failed.append(response.text)

    threads = [threading.Thread(target=load) for _ in range(2)]
    sizes = []
    with httpx.Client(base_url=running.url, timeout=60) as http:
        pid = running.engine_pid()
        for thread in threads:
            thread.start()
        for step in range(100):
            body = {"model_path": ("one", "half", "double")[step % 3], "weight_version": str(step)}
            told = http.post(UPDATE, json=body)
            assert told.json()["weight_version"] == str(step), told.text
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        stopping.set()
        for thread in threads:
            thread.join(60)
    assert not failed
    assert max(sizes[50:]) < 1.05 * max(sizes[5:50]), [size >> 20 for size in sizes]
