"""The engine as a process: what it says over its socket, and how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import zmq
from engine_support import Result, Results, bundled, drain, request, words

import drafts
from factories import make_recipe
from folders import encoder, eval_text, save
from simulated_card import FREE, simulated_card
from torchwright.core.errors import TorchwrightError
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.load import load
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.process import ServedDecoder, ServedEncoder, open_served, serve_reader
from torchwright.serve.limits import SEQUENCES
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import (
    Cancel,
    Embed,
    Embedded,
    EngineReady,
    Failed,
    FromEngine,
    Loading,
    RequestRefused,
    Shutdown,
    StepOutput,
    ToEngine,
    decode_from_engine,
    encode,
)
from torchwright.workloads.encoder import EncoderWorkload
from torchwright.workloads.language import BUNDLED

WAIT_S = 120


class Peer:
    """The HTTP process's end of the socket."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        self.socket.setsockopt(zmq.LINGER, 0)
        endpoint = f"ipc://{folder}/engine"
        self.socket.bind(endpoint)
        command = [
            sys.executable,
            "-m",
            "torchwright.serve.engine.process",
            "--endpoint",
            endpoint,
            "--options",
            EngineOptions(**options).to_json(),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # enough for the bundled model
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        self.results: Results = {}
        self.others: list[FromEngine] = []
        self.last: StepOutput | None = None

    def send(self, message: ToEngine) -> None:
        self.socket.send(encode(message))

    def receive(self) -> FromEngine:
        return decode_from_engine(self.socket.recv())

    def opened(self) -> EngineReady | Failed:
        """What ends the loading."""
        while True:
            message = self.receive()
            if not isinstance(message, Loading):
                assert isinstance(message, EngineReady | Failed)
                return message

    def until(self, enough: Callable[[], bool]) -> None:
        """Take messages into `results`, `others` and `last`."""
        while not enough():
            message = self.receive()
            if not isinstance(message, StepOutput):
                self.others.append(message)
                continue
            self.last = message
            for output in message.outputs:
                result = self.results.setdefault((output.id, output.index), Result())
                result.tokens += output.tokens
                result.finish = output.finish

    def ended(self, *ids: str) -> bool:
        return all((id, 0) in self.results and self.results[id, 0].finish for id in ids)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path, max_running=4, kv_memory=8 << 20)
    yield peer
    peer.close()


@pytest.fixture
def encoder_artifact(tmp_path: Path) -> Path:
    """A random sentence encoder, as `optimize` would leave it where nothing made it faster."""
    sources = save(encoder(), tmp_path / "encoder")
    workload = EncoderWorkload(sources, batch=4, tokens=32, eval_text=eval_text(tmp_path / "text.txt"))
    with artifact.writing(tmp_path / "artifact") as out:
        (out / artifact.MODEL).mkdir()
        for name, file in workload.files(weights=True).items():
            shutil.copy2(file, out / artifact.MODEL / name)
        recipe = make_recipe(engine="eager", workload=workload.describe(), steps=())
        artifact.finish(out, recipe, {"engine": "eager", "dtype": "float32"})
    return tmp_path / "artifact"


@pytest.mark.slow  # `test_clients` talks to the process by way of HTTP
def test_a_request_from_loading_to_idle(peer: Peer) -> None:
    ready = peer.opened()
    assert isinstance(ready, EngineReady)
    model = bundled()
    assert (ready.kind, ready.vocabulary, ready.context) == ("decoder", 4096, 1024)
    assert ready.stop_ids == list(model.stop)
    assert ready.pages == (8 << 20) // (ready.kv_bytes // ready.pages)
    assert ready.weight_bytes > 20e6
    ids = words(30, seed=1)
    peer.send(request("a", ids, 12))
    peer.send(request("b", ids, 400))
    peer.send(request("c", ids, 5000))
    peer.send(Embed(id="d", texts=["no"]))
    peer.until(lambda: len(peer.others) == 2)
    refused, failed = peer.others
    assert isinstance(refused, RequestRefused)
    assert (refused.id, refused.reason) == ("c", "too_long")
    assert isinstance(failed, Failed)
    assert failed.id == "d"
    peer.send(Cancel(id="b", reason="a test"))
    peer.until(lambda: peer.ended("a", "b"))
    assert peer.results["b", 0].finish == "cancelled"
    assert peer.results["a", 0].tokens == model.generate(ids, max_new_tokens=12, stop=[])
    peer.until(lambda: peer.last is not None and not peer.last.outputs)
    assert peer.last is not None
    assert (peer.last.stats.running, peer.last.stats.pages_used) == (0, 0)


@pytest.mark.slow
def test_a_drain_ends_what_runs_and_refuses_what_comes(peer: Peer) -> None:
    assert isinstance(peer.opened(), EngineReady)
    peer.send(request("a", [5, 6], 400))
    peer.until(lambda: ("a", 0) in peer.results)
    peer.send(Shutdown(drain=True))
    peer.send(request("late", [5, 6], 5))
    peer.until(lambda: peer.ended("a") and len(peer.others) == 1)
    assert len(peer.results["a", 0].tokens) == 400
    (late,) = peer.others
    assert isinstance(late, RequestRefused)
    assert late.id == "late"
    assert peer.process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_a_shutdown_at_once_tells_every_request(peer: Peer) -> None:
    assert isinstance(peer.opened(), EngineReady)
    for name in "ab":
        peer.send(request(name, [5, 6], 900))
    assert isinstance(peer.receive(), StepOutput)
    peer.send(Shutdown(drain=False))
    peer.until(lambda: peer.ended("a", "b"))
    assert {result.finish for result in peer.results.values()} == {"cancelled"}
    assert peer.process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_a_killed_engine_is_noticed_by_its_exit(peer: Peer) -> None:
    assert isinstance(peer.opened(), EngineReady)
    peer.send(request("a", [5, 6], 900))
    assert isinstance(peer.receive(), StepOutput)
    peer.process.send_signal(signal.SIGKILL)
    assert peer.process.wait(WAIT_S) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the signal is Linux's")
def test_the_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed while the engine loads or waits; nothing stays behind."""
    endpoint = f"ipc://{tmp_path}/engine"
    code = (
        "import subprocess, sys, time\n"
        "words = [sys.executable, '-m', 'torchwright.serve.engine.process', '--endpoint']\n"
        f"child = subprocess.Popen([*words, {endpoint!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            socket.recv()  # it lives
            parent.kill()
    until = time.monotonic() + WAIT_S
    while _alive(child):
        assert time.monotonic() < until
        time.sleep(0.05)


class Script:
    """A channel that brings what a test has written down, and keeps what is sent."""

    def __init__(self, *messages: ToEngine) -> None:
        self.messages, self.sent = list(messages), list[FromEngine]()

    def send(self, message: FromEngine) -> None:
        self.sent.append(decode_from_engine(encode(message)))

    def receive(self, wait_ms: int) -> list[ToEngine]:
        messages, self.messages = self.messages, []
        return messages


def opened(**options: Any) -> ServedDecoder | ServedEncoder:
    return open_served(EngineOptions(**options), cast(Any, Script()))


@pytest.mark.slow
def test_what_cannot_be_served_is_said_before_the_end(tmp_path: Path) -> None:
    peer = Peer(tmp_path, quantize="w3")
    try:
        failed = peer.opened()
        assert isinstance(failed, Failed)
        assert "w3" in failed.text
        assert peer.process.wait(WAIT_S) == 2
    finally:
        peer.close()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"model": "/nowhere"}, "nowhere"),
        ({"dtype": "fp32"}, "--no-deterministic"),
        ({"kv_memory": 10}, "--kv-memory"),
        ({"max_running": 0}, "max_running"),
    ],
)
def test_a_refusal_names_what_to_change(options: dict[str, Any], word: str) -> None:
    with pytest.raises(TorchwrightError, match=word):
        opened(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_named() -> None:
    with pytest.raises(TorchwrightError, match="'cuda' was asked for, but it cannot be used here"):
        opened(device="cuda")


def test_a_decoder_is_served_on_a_card(tmp_path: Path) -> None:
    """Every tensor of a step is brought there, and half of the card's free memory holds keys and values."""
    from tiny import build
    from tiny import save as save_tiny

    folder = save_tiny(build("qwen3", num_hidden_layers=2), tmp_path)
    with simulated_card():
        served = opened(model=str(folder), device="cuda", quantize="w8a8", max_running=4)
        assert isinstance(served, ServedDecoder)
        loaded = served.engine.loaded
        assert loaded.device.type == "cuda"
        assert 0 < served.ready.kv_bytes <= FREE // 2
        for name, more in (("greedy", {}), ("drawn", {"temperature": 1.0, "seed": 3, "logprobs": 1})):
            assert served.engine.submit(request(name, [5, 6, 7], 4, **more)) is None
        results = drain(served.engine)
        assert results["greedy", 0].tokens == loaded.generate([5, 6, 7], max_new_tokens=4, stop=[])
        assert len(results["drawn", 0].logprobs) == 4


def test_drafts_are_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_card = SimpleNamespace(model=bundled(), notices=())
    monkeypatch.setattr(type(on_card.model), "device", torch.device("cuda"))
    monkeypatch.setattr("torchwright.serve.engine.process.open_model", lambda *args, **options: on_card)
    with pytest.raises(TorchwrightError, match=r"--draft twin.*a model on cuda.*models on the CPU"):
        opened(draft="twin")


def test_an_artifact_of_the_native_decoder_is_served(tmp_path: Path) -> None:
    from tiny import build
    from tiny import save as save_tiny

    from language_artifacts import native_artifact

    folder = save_tiny(build("llama"), tmp_path / "model")
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    path = str(native_artifact(folder, tmp_path / "artifact"))
    options = {"model": path, "max_running": 2, "max_queue": 3, "step_tokens": 4, "prefix_cache": False}
    served = opened(**options)
    assert isinstance(served, ServedDecoder)
    assert served.engine.options == EngineOptions(**options)
    assert served.ready.vocabulary == 128
    assert served.engine.submit(request("a", [5, 6], 4)) is None
    assert len(drain(served.engine)["a", 0].tokens) == 4
    with pytest.raises(TorchwrightError, match="--quantize w8a8 is not for"):
        opened(model=path, quantize="w8a8")
    with pytest.raises(TorchwrightError, match="--device cuda is not for"):
        opened(model=path, device="cuda")


def test_an_artifact_is_served_with_its_own_draft(tmp_path: Path) -> None:
    from tiny import build
    from tiny import save as save_tiny

    from language_artifacts import native_artifact

    folder = save_tiny(build("llama"), tmp_path / "model")
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    head = drafts.write_head(folder, tmp_path / "head")
    path = str(native_artifact(folder, tmp_path / "artifact", draft=head))
    for given, wanted in ((None, str(Path(path) / "draft")), ("none", None)):
        served = opened(model=path, draft=given, max_running=2)
        assert isinstance(served, ServedDecoder)
        assert isinstance(served.engine, ServingEngine)
        assert served.engine.options.draft == wanted
        assert len(served.engine.size.draft) == (wanted is not None)


def test_an_artifact_of_a_sentence_encoder_embeds(encoder_artifact: Path) -> None:
    served = opened(model=str(encoder_artifact))
    assert isinstance(served, ServedEncoder)
    assert (served.ready.kind, served.ready.context) == ("encoder", 32)
    texts = ["a small sentence", "another one", "one", "two", "three", "four"]
    script = Script(
        Embed(id="a", texts=texts),
        Embed(id="b", texts=[""]),
        Embed(id="c", texts=["word " * 90]),
        Embed(id="d", texts=["word"] * SEQUENCES),
        request("e", [5]),
        Shutdown(drain=True),
    )
    serve_reader(served, cast(Any, script))
    found = [message for message in script.sent if isinstance(message, Embedded)]
    assert [len(message.places) for message in found] == [4, 2]  # it speaks after every call
    vectors = {p: v for message in found for p, v in zip(message.places, message.vectors, strict=True)}
    model = load(encoder_artifact).model
    torch.testing.assert_close(
        torch.tensor([vectors[place] for place in range(len(texts))]), model.encode(texts)
    )
    assert sum(message.tokens for message in found) == int(model.tokens.of(texts)["attention_mask"].sum())
    others = [message for message in script.sent if isinstance(message, Failed | RequestRefused)]
    assert [(message.id, type(message)) for message in others] == [
        ("b", Failed),
        ("d", RequestRefused),
        ("e", RequestRefused),
        ("c", Failed),
    ]


def test_texts_that_nobody_waits_for_are_not_embedded(encoder_artifact: Path) -> None:
    served = opened(model=str(encoder_artifact))
    assert isinstance(served, ServedEncoder)
    for id in "ab":
        assert served.submit(Embed(id=id, texts=["a text"] * 9)) is None
    assert served.step().id == "a"
    served.cancel("a")
    served.cancel("a")
    assert [served.step().id for _ in range(3)] == ["b"] * 3
    assert served.idle
    assert served.submit(Embed(id="c", texts=["a text"] * SEQUENCES)) is None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
