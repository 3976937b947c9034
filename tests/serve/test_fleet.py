"""Two replicas of the bundled model behind the real gateway: one answer, one end, one key, one text of figures."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from fleet_support import RunningFleet, command_line, descendants, fleet, gone
from http_support import MODEL, wait_until

from lora_files import write_adapter
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.adapters import read_adapter
from torchwright.workloads.language import BUNDLED

KEY, SECOND = "sk-the-key-of-the-fleet", "sk-another-key"


@pytest.fixture(scope="module")
def two() -> Iterator[RunningFleet]:
    with fleet("--replicas", "2", key=f"{KEY} {SECOND}") as running:
        yield running


def test_a_chat_goes_through_the_gateway(two: RunningFleet) -> None:
    with openai.OpenAI(base_url=two.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Sort a list."}], max_tokens=8
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize("key", [KEY, SECOND])
def test_every_key_and_every_path_is_taken(two: RunningFleet, key: str) -> None:
    talk = [{"role": "user", "content": "Sort a list."}]
    bodies = {
        "/v1/completions": {"prompt": "def f(", "max_tokens": 2},
        "/v1/responses": {"input": "Sort a list.", "max_output_tokens": 2},
        "/v1/messages": {"messages": talk, "max_tokens": 2},
        "/generate": {"text": "def f(", "sampling_params": {"max_new_tokens": 2}},
    }
    for path, body in bodies.items():
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(two.url + path, json={"model": MODEL, **body}, headers=headers, timeout=60)
        assert answer.status_code == 200, (path, answer.text)


def test_each_replica_has_cores_of_its_own(two: RunningFleet) -> None:
    shares = [os.sched_getaffinity(pid) for pid in two.replicas().values()]
    assert len(shares) == 2
    assert set.union(*shares) == os.sched_getaffinity(0)
    assert not set.intersection(*shares)
    for pid, share in zip(two.replicas().values(), shares, strict=True):
        assert all(os.sched_getaffinity(child) == share for child in descendants(pid))


def test_nothing_answers_without_the_key_and_no_command_line_shows_it(two: RunningFleet) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.post(two.url + "/v1/completions", json=body, headers=headers).status_code == 401
        assert httpx.get(two.metrics_url, headers=headers).status_code == 401
    for path in ("/workers", "/get_loads"):  # even with it: nobody takes replicas away
        assert httpx.get(two.url + path, headers=two.headers).status_code in (401, 403)
    for pid in [two.process.pid, *descendants(two.process.pid)]:
        assert KEY not in command_line(pid)
        assert SECOND not in command_line(pid)


def test_one_text_has_the_figures_of_all(two: RunningFleet) -> None:
    before = two.figure("torchwright:prompt_tokens_total")
    tokens = two.complete().json()["usage"]["prompt_tokens"]
    wait_until(lambda: two.figure("torchwright:prompt_tokens_total") == before + tokens)
    for server in ("replica 0", "replica 1", "gateway"):
        assert two.figure("torchwright:fleet_up", f'server="{server}"') == 1
        assert two.figure("torchwright:fleet_restarts_total", f'server="{server}"') == 0
    assert two.figures().count("# TYPE torchwright:prompt_tokens_total ") == 1
    loads = httpx.get(two.metrics_url.replace("/metrics", "/v1/loads"), headers=two.headers).json()
    assert loads["dp_rank_count"] == 2
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1]
    ready = two.metrics_url.replace("/metrics", "/ready")
    assert httpx.get(ready).json() == {"ready": True}


def test_the_gateway_takes_us_for_vllm(two: RunningFleet) -> None:
    """It asks for loads by the paths of a backend that it knows, with the key, and understands the answer."""
    wait_until(lambda: two.figures().count("smg_engine_waiting_requests{") == 2, 60)
    workers = httpx.get(two.url + "/v1/models", headers=two.headers).json()["data"]
    assert [worker["id"] for worker in workers] == [MODEL]


def test_errors_of_a_replica_come_as_they_are(two: RunningFleet) -> None:
    answer = two.complete(zzz=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "zzz"
    assert two.figure("smg_worker_cb_state", 'server="gateway"') == 0  # no circuit opens for a client's fault


@pytest.mark.slow
def test_every_replica_answers_by_every_adapter(tmp_path: Path) -> None:
    """Both replicas answer as `generate` does, also after one was replaced."""
    folders = [write_adapter(BUNDLED, tmp_path / f"a{n}", seed=n, r=8, std=0.1) for n in range(2)]
    loaded, prompt = load_decoder(BUNDLED, torch.bfloat16), "Once upon a time"
    wanted = {MODEL: loaded.generate(prompt, max_new_tokens=20, stop=[])}
    for name, folder in zip(("one", "two"), folders, strict=True):
        own = read_adapter(folder, loaded.decoder, loaded.folder)
        wanted[name] = loaded.generate(prompt, max_new_tokens=20, stop=[], adapter=own)
    assert len(set(wanted.values())) == 3
    words = [f"--adapter={name}={folder}" for name, folder in zip(("one", "two"), folders, strict=True)]
    with fleet("--replicas", "2", "--policy", "round_robin", *words) as running:
        places = len(wanted) * 2
        wait_until(lambda: running.routed() == places, 60)
        listed = httpx.get(running.url + "/v1/models", headers=running.headers).json()["data"]
        assert {model["id"] for model in listed} == wanted.keys()

        def check() -> None:
            before = answered(running)
            for name, text in [*wanted.items()] * 2:
                answer = running.complete(prompt, model=name, max_tokens=20, ignore_eos=True)
                assert answer.status_code == 200, answer.text
                assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == (name, text)
            wait_until(lambda: answered(running) == [count + len(wanted) for count in before])
            assert running.complete(prompt, model="three").status_code == 404

        check()
        name, pid = next(iter(running.replicas().items()))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: running.replicas().get(name, pid) != pid, 120)
        wait_until(
            lambda: running.figure("torchwright:engine_ready") == 2 and running.routed() == places, 120
        )
        check()


def answered(running: RunningFleet) -> list[float]:
    """Return the completions that each of two replicas has answered."""
    name, path = "torchwright:http_requests_total", 'path="/v1/completions"'
    return [running.figure(name, path, 'status="200"', f'server="replica {place}"') for place in range(2)]


@pytest.mark.slow
def test_ctrl_c_ends_all_after_the_running_streams() -> None:
    with fleet("--replicas", "2") as running:
        stream = running.stream()
        assert stream.begun.wait(60)
        mine = descendants(running.process.pid)
        assert len(mine) >= 5
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(120) == 0
        assert stream.done().whole, (stream.cut, stream.events[-2:])
        assert running.process.stdout is not None
        assert "stopping after 1 running requests" in running.process.stdout.read()
        gone(mine)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_at_once() -> None:
    with fleet("--replicas", "2") as running:
        stream = running.stream()
        assert stream.begun.wait(60)
        mine = descendants(running.process.pid)
        running.process.send_signal(signal.SIGINT)
        assert running.process.stdout is not None
        assert any("running requests" in line for line in running.process.stdout)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 0
        gone(mine)
        assert not stream.done().whole


@pytest.mark.slow
def test_a_fleet_in_the_background_is_ready_and_goes_when_it_is_asked_to() -> None:
    pytest.importorskip("smg")
    command = [sys.executable, "-m", "torchwright", "serve", "--replicas", "1", "--port", "0", "--wait-ready"]
    ended = subprocess.run([*command, "--metrics-port", "0"], capture_output=True, text=True, timeout=240)
    url, pid = ended.stdout.split()
    mine = [int(pid), *descendants(int(pid))]
    try:
        assert (ended.returncode, ended.stderr) == (0, "")
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200
    finally:
        os.kill(int(pid), signal.SIGTERM)
    gone(mine)


@pytest.mark.slow
def test_one_replica_behaves() -> None:
    with fleet("--replicas", "1") as running:
        (pid,) = running.replicas().values()
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
        assert running.complete().status_code == 200
        mine = descendants(running.process.pid)
        running.process.kill()  # nothing is left of a fleet that was killed outright
        gone(mine)


@pytest.mark.slow
def test_ports_in_use_are_known_before_anything_is_loaded() -> None:
    pytest.importorskip("smg")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (["--port", port], ["--port", "0", "--metrics-port", port]):
            command = [sys.executable, "-m", "torchwright", "serve", "--replicas", "1", *words]
            found = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert found.returncode == 2
            assert f"cannot listen on 127.0.0.1, port {port}" in found.stderr


@pytest.mark.slow
def test_a_replica_that_dies_at_start_says_why_once(tmp_path) -> None:
    pytest.importorskip("smg")
    for file in BUNDLED.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] += 1  # a layer that the weights do not have
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "torchwright", "serve", str(tmp_path), "--replicas", "2", "--port", "0"]
    found = subprocess.run([*command, "--metrics-port", "0"], capture_output=True, text=True, timeout=240)
    assert found.returncode == 2
    lines = [line for line in found.stderr.splitlines() if "layers" in line or "missing" in line]
    assert len(lines) == 1, found.stderr
    assert "ended before it was ready (exit code 2)" in " ".join(found.stderr.split())
