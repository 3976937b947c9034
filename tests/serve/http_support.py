"""Servers to talk to: with a fake engine in a thread of this process, and by command with the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fake_engine
import httpx
from fake_engine import LOADING, READERS

from torchwright.models.vision.reader import takes_pictures
from torchwright.serve.batches.runner import Batches
from torchwright.serve.batches.store import Store
from torchwright.serve.folder import find
from torchwright.serve.http.hosts import Hosts
from torchwright.serve.http.server import Server, load_model
from torchwright.serve.http.service import Service
from torchwright.serve.http.sounds import Sounds
from torchwright.serve.limits import Limits
from torchwright.serve.options import AUTO
from torchwright.serve.wire.client import EngineClient
from torchwright.serve.wire.launch import Launcher
from torchwright.serve.wire.messages import Submit, ToEngine

MODEL = "torchwright-bundled"
STARTS_WITHIN = 120.0
"""Seconds; the server's processes import much, on a machine that others use."""


def fake_command(kind: str) -> Callable[[str], list[str]]:
    """The command of a fake engine: `decoder`, `encoder`, `loading` for ever; others end at once."""
    return lambda endpoint: [sys.executable, fake_engine.__file__, "--endpoint", endpoint, "--kind", kind]


class RecordingClient(EngineClient):
    """An engine's client that can keep what the engine is sent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._records: list[list[ToEngine]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[ToEngine]]:
        """Keep the messages that the engine is sent within the block."""
        record: list[ToEngine] = []
        self._records.append(record)
        try:
            yield record
        finally:
            self._records.remove(record)

    def _send(self, message: ToEngine) -> bool:
        for record in self._records:
            record.append(message)
        return super()._send(message)


class LastingServer(Server):
    """A server that goes on where its engine was never ready: the command would end."""

    async def _announce(self) -> None:
        """Say nothing."""


def submits(messages: Sequence[ToEngine]) -> list[Submit]:
    """The requests for text among messages."""
    return [message for message in messages if isinstance(message, Submit)]


@dataclass
class Running:
    """A server with a fake engine, in a thread of this process."""

    url: str
    client: RecordingClient
    service: Service
    loop: asyncio.AbstractEventLoop
    server: Server

    def signal(self, number: signal.Signals) -> None:
        """Have the server take a signal, as if it had been sent to a process of its own."""
        self.loop.call_soon_threadsafe(self.server.handle_exit, number, None)

    def cancelled(self) -> bool:
        """Whether nobody waits for the engine any more."""
        return self.service.client.waiting == 0


@contextlib.contextmanager
def serving(
    *,
    kind: str = "decoder",
    keys: Sequence[str] = (),
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    aliases: Sequence[str] = (),
    limits: Limits | None = None,
    template: str | None = None,
    tools: str = AUTO,
    folder: Path | None = None,
    picture_hosts: Sequence[str] = (),
    allow_adapters: Path | None = None,
    allow_weights: Path | None = None,
    batches: Path | None = None,
    server: type[Server] = Server,
    **client: Any,
) -> Iterator[Running]:
    """A server with a fake engine, ready, or loading if it is of that kind; ended with the block.

    The bundled model may have a chat template and a format of tool calls; `folder` has another tokenizer. `client` are
    options of `EngineClient`.
    """
    limits = limits or Limits()
    with contextlib.ExitStack() as stack:
        target = find(None)
        if folder is not None:
            target = replace(target, folder=folder)
        if template is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            shutil.copytree(target.folder, folder, dirs_exist_ok=True)
            (folder / "chat_template.jinja").write_text(template)
            target = replace(target, folder=folder)
        if takes_pictures(target.folder):
            limits = limits.with_pictures()
        model = None if kind in READERS else load_model(target, limits, tools)
        launcher = Launcher(fake_command(kind))
        stack.callback(launcher.close)
        recording = RecordingClient(launcher, limits, **client)
        service = Service(
            name=MODEL,
            aliases=aliases,
            allow_adapters=allow_adapters,
            allow_weights=allow_weights,
            client=recording,
            model=model,
            folder=target.folder,
            batches=None if batches is None else Batches(Store(batches, limits), limits),
            sounds=Sounds(limits) if kind == "recognizer" else None,
            limits=limits,
            keys=keys,
            hosts=Hosts(hosts, origins),
            picture_hosts=picture_hosts,
            log_requests=True,
        )
        yield from _in_thread(service, recording, server)


def _in_thread(service: Service, client: RecordingClient, kind: type[Server]) -> Iterator[Running]:
    """Run a server in a thread until the caller goes on."""
    started: queue.Queue[tuple[Server, asyncio.AbstractEventLoop, str]] = queue.Queue()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(service, kind, started)))
    thread.start()
    server, loop, url = started.get(timeout=30)
    try:
        wait_until(lambda: client.state in ("ready", "failed") or client.detail == LOADING, STARTS_WITHIN)
        yield Running(url, client, service, loop, server)
    finally:
        with contextlib.suppress(RuntimeError):  # a test has ended it
            loop.call_soon_threadsafe(server.handle_exit, signal.SIGINT, None)
        thread.join(30)


async def _serve(
    service: Service,
    kind: type[Server],
    started: queue.Queue[tuple[Server, asyncio.AbstractEventLoop, str]],
) -> None:
    import socket

    # As the command's own socket: without the protocol's number asyncio leaves Nagle's delay of 40 ms on.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = kind(service, url, 0.0, lambda text: None, warm=False)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    started.put((server, asyncio.get_running_loop(), url))
    await task


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread or process does; fails when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.01)


@dataclass
class Command:
    """`torchwright serve` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]

    def engine_pid(self) -> int:
        """The process that computes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        return next(pid for pid, words in names.items() if b"torchwright.serve.engine.process" in words)


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[Command]:
    """`torchwright serve` on a free port with the real engine, ready; killed with the block."""
    program = "import sys; from torchwright.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield Command(process, *_ready(process))
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def _ready(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """(URL, everything said) once the server is ready."""
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if match := re.search(r" at (http://\S+) after ", line):
            return match[1], said
    raise AssertionError(f"the server ended with {process.wait()}: {said}")


def events(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events, but for the mark of the end."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def error(response: httpx.Response) -> dict[str, Any]:
    found = response.json()
    assert found.keys() == {"type", "error"}
    assert found["type"] == "error"  # Anthropic's clients look for it
    assert found["error"].keys() == {"message", "type", "param", "code"}
    return found["error"]
