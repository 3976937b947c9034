"""The HTTP process: the model's tokenizer and companions, the engine's client, and uvicorn, ended in two steps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from torchwright.core.errors import ModelError
from torchwright.hardware.devices.allocator import return_large_blocks
from torchwright.models.vision.reader import takes_pictures
from torchwright.serve.batches.runner import Batches
from torchwright.serve.batches.store import Store
from torchwright.serve.descriptors import fitting, raise_limit
from torchwright.serve.folder import ServeTarget
from torchwright.serve.http.app import BATCHED, application
from torchwright.serve.http.batch_host import BatchHost
from torchwright.serve.http.connection import connection_class
from torchwright.serve.http.guard import Guard
from torchwright.serve.http.hosts import Hosts
from torchwright.serve.http.service import Service
from torchwright.serve.http.sounds import Sounds
from torchwright.serve.limits import Limits
from torchwright.serve.log import begin_log
from torchwright.serve.openai.served_model import load_model as load_model
from torchwright.serve.preflight import gib
from torchwright.serve.wire.client import LONG_SILENT_SECONDS, SILENT_SECONDS, EngineClient
from torchwright.serve.wire.launch import Launcher

QUEUED = 2048
"""Connections that wait in the kernel to be accepted; beyond, a client tries again after a second."""
DRAIN_POLL_SECONDS = 0.05
"""Between two looks at the requests that a draining server waits for."""


def run(
    target: ServeTarget,
    launcher: Launcher,
    listening: Sequence[socket.socket],
    url: str,
    *,
    keys: Sequence[str],
    hosts: Sequence[str],
    origins: Sequence[str],
    picture_hosts: Sequence[str],
    aliases: Sequence[str],
    adapters: Mapping[str, Path],
    allow_adapters: Path | None,
    allow_weights: Path | None,
    batches: Path | None,
    log_requests: bool,
    tool_call_format: str,
    reasoning_format: str,
    drain_seconds: float,
    begun: float,
    say: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C; raises `ModelError` for a model that cannot be loaded."""
    limits = fitting(Limits(), files := raise_limit())
    if limits.connections < Limits().connections:
        say(f"at most {limits.connections} connections: this process may open {files} files (ulimit -n)")
    begin_log()
    return_large_blocks()  # bodies and grammars come and go
    long = target.served_as in ("recognizer", "painter")
    silent_seconds = LONG_SILENT_SECONDS if long else SILENT_SECONDS
    store = Store(batches, limits) if batches is not None else None
    # Before anything is opened that would have to be closed: its files may be damaged.
    model = None
    if target.served_as in ("writer", "translator"):
        if takes_pictures(target.folder):
            limits = limits.with_pictures()
        model = load_model(target, limits, tool_call_format, reasoning_format)
        model.adapters.update(adapters)
    client = EngineClient(launcher, limits, silent_seconds=silent_seconds)
    service = Service(
        name=target.name,
        client=client,
        model=model,
        folder=target.folder,
        aliases=aliases,
        allow_adapters=allow_adapters,
        allow_weights=allow_weights,
        batches=Batches(store, limits) if store is not None else None,
        sounds=Sounds(limits) if target.served_as == "recognizer" else None,
        limits=limits,
        keys=keys,
        hosts=Hosts(hosts, origins),
        picture_hosts=picture_hosts,
        log_requests=log_requests,
    )
    server = Server(service, url, begun, say, drain_seconds=drain_seconds)
    try:
        asyncio.run(server.serve(sockets=list(listening)))
    finally:
        client.kill()
    if client.state == "failed" and client.ready is None:
        raise ModelError(client.detail)


NO_TEMPLATE = (
    "the model folder has no chat template: conversations are written as a line for each speaker, which models "
    "trained on chats do not expect; put its chat_template.jinja into the folder"
)


class Server(uvicorn.Server):
    """uvicorn, with our limits on connections, and ended by a signal in two steps.

    `begun` is when the command was, in seconds of `time.perf_counter`; `warm` starts the processes that read long
    requests and compile grammars before the first is wanted. After a SIGTERM the server takes requests for
    `drain_seconds` more.
    """

    def __init__(
        self,
        service: Service,
        url: str,
        begun: float,
        say: Callable[[str], None],
        *,
        warm: bool = True,
        drain_seconds: float = 0.0,
    ) -> None:
        self._service, self._url, self._begun, self._say = service, url, begun, say
        self._warm, self.drain_seconds = warm, drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        limits = service.limits
        super().__init__(
            uvicorn.Config(
                application(service, self._lifespan),
                http=connection_class(limits),
                loop="asyncio",  # and not uvloop where something else has brought it: this one is tested
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=limits.idle_seconds,
                backlog=limits.accepted_at_once,
                h11_max_incomplete_event_size=limits.header_bytes,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listening in (
            sockets or []
        ):  # asyncio takes one number for the kernel's queue and for its own turns
            listening.listen(QUEUED)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once.

        Ctrl-C stops listening. SIGTERM comes from whoever replaces the server: until the last answer has ended, the
        port stays open and /ready says 503, so that a gateway sends what comes elsewhere.
        """
        if self._service.stopping:
            self.should_exit = self.force_exit = True
            self._service.client.stop()
            return
        self._service.stopping = True
        if self._service.batches is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._service.batches.stop)
        waiting = self._service.client.waiting
        self._say(
            f"stopping after {waiting} running requests; Ctrl-C again stops at once"
            if waiting
            else "stopping"
        )
        if sig == signal.SIGTERM and self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_drain)
        else:
            self.should_exit = True

    def _begin_drain(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Take requests for the drain's time, refuse them from then on, and exit when the last has ended."""
        await asyncio.sleep(self.drain_seconds)
        self._service.refuses = True
        while self._service.client.waiting:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; uvicorn skips the application's end on a forced exit, and then complains that it is missing."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Guard) -> AsyncIterator[None]:
        service = self._service
        await service.client.start()
        if service.batches is not None:
            service.batches.start(BatchHost(service, app, BATCHED))
        announcing = asyncio.create_task(self._announce())
        try:
            yield
        finally:
            tasks = [announcing, *([self._draining] if self._draining else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if service.batches is not None:
                await service.batches.close()
            closing = [service.client.close(drain=not self.force_exit), service.reader.workers.close()]
            if service.model is not None:
                closing.append(service.model.grammars.close())
            if service.sounds is not None:
                closing.append(service.sounds.close())
            # All at the same time: on a busy machine each process waits its turn to end.
            await asyncio.gather(*closing)

    async def _announce(self) -> None:
        """Say what becomes of the engine."""
        client, said = self._service.client, ""
        while True:
            await client.changed.wait()
            client.changed.clear()
            if client.state == "failed" and client.ready is None:
                self.should_exit = True  # it cannot be loaded: `serve` says why
                return
            text = self._ready_text() if client.state == "ready" else client.detail
            if text != said:
                self._say(text)
            said = text
            if self._warm and client.state == "ready" and client.ready:
                await self._service.warm(client.ready)

    def _ready_text(self) -> str:
        ready = self._service.client.ready
        assert ready is not None, "the engine is ready"
        facts = f"weights {gib(ready.weight_bytes)}"
        if ready.kind == "decoder":
            tokens = ready.pages * ready.page_tokens
            facts += f", KV cache {gib(ready.kv_bytes)} for {tokens} tokens, context {ready.context}"
            facts += f", answers of at most {ready.answer}" if ready.answer is not None else ""
        lines = [
            f"serving '{self._service.name}' at {self._url} after {time.perf_counter() - self._begun:.1f} s: {facts}"
        ]
        notices = [*ready.notices, *([NO_TEMPLATE] if self._service.chat_template == [] else [])]
        return "\n".join([*lines, *(f"notice: {notice}" for notice in notices)])
