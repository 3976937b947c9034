"""`torchwright serve`: the pre-flight, the engine, the HTTP server, and how both end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import uvicorn

from torchwright.errors import ModelError, WorkloadError
from torchwright.serve.app import Service
from torchwright.serve.chat import ChatTemplate
from torchwright.serve.client import EngineClient
from torchwright.serve.compile_grammar import GrammarCompiler
from torchwright.serve.connection import connection_class
from torchwright.serve.folder import Target, find
from torchwright.serve.guard import Guard
from torchwright.serve.limits import Limits
from torchwright.serve.options import Options as EngineOptions
from torchwright.serve.preflight import Wish, gib, preflight
from torchwright.serve.prepare import Model
from torchwright.serve.text import Tokenizer
from torchwright.serve.tools import format_of

ENGINE = EngineOptions()
"""Its defaults are the server's."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one, which is printed."""
    api_keys: Sequence[str] = ()
    max_running: int = ENGINE.max_running
    kv_memory: int | None = None
    """Bytes; None is half of the available memory."""
    max_context: int | None = ENGINE.max_context
    speculate: Literal["ngram", "none"] = ENGINE.speculate
    log_requests: bool = False
    deterministic: bool = ENGINE.deterministic
    quantize: str | None = None
    kv: str | None = None
    dtype: str | None = None
    trust: bool = False


def serve(target: str | None, options: Options, say: Callable[[str], None]) -> int:
    """Serve until Ctrl-C; returns the exit code. `say` is given what the user should read.

    Raises `ModelError`, `ArtifactError` or `WorkloadError` for what cannot be served, before or while it is loaded.
    """
    begun = time.perf_counter()
    found, limits = find(target), Limits()
    if found.artifact is not None:
        _refuse_for_artifact(found, options)
    _print_preflight(found, options, say)
    listening = _listen(options)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    client = EngineClient(
        lambda endpoint: engine_command(endpoint, target, options), mailbox_capacity=limits.unread_outputs
    )
    service = Service(
        name=found.name,
        client=client,
        model=None if found.encoder else load_model(found, limits),
        limits=limits,
        keys=options.api_keys,
        log_requests=options.log_requests,
    )
    host, port = listening.getsockname()[:2]
    server = Server(service, f"http://{f'[{host}]' if ':' in host else host}:{port}", begun, say)
    try:
        asyncio.run(server.serve(sockets=[listening]))
    finally:
        client.kill()
    if client.state == "failed" and client.ready is None:
        raise ModelError(client.detail)
    return 0


def load_model(target: Target, limits: Limits) -> Model:
    """What the HTTP process needs of a language model; raises `ModelError` for files that cannot be read."""
    template = ChatTemplate(target.folder)
    return Model(
        name=target.name,
        tokenizer=Tokenizer(target.folder),
        template=template,
        tool_format=format_of(template),
        grammars=GrammarCompiler(target.folder, limits),
        limits=limits,
    )


def engine_command(endpoint: str, target: str | None, options: Options) -> list[str]:
    """The command that starts the engine's process."""
    words = [sys.executable, "-m", "torchwright.serve.process", "--endpoint", endpoint]
    given: dict[str, Any] = {
        "--model": target,
        "--max-running": options.max_running,
        "--kv-memory": options.kv_memory,
        "--max-context": options.max_context,
        "--speculate": options.speculate,
        "--quantize": options.quantize,
        "--kv": options.kv,
        "--dtype": options.dtype,
    }
    words += [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    words.append("--deterministic" if options.deterministic else "--no-deterministic")
    return [*words, "--trust"] if options.trust else words


def parse_bytes(text: str) -> int:
    """Bytes of a text such as 4GiB, 500MB or 1073741824; raises `ValueError` for any other."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"'{text}' is no size; write 4GiB, 500MB or a number of bytes")
    return round(float(match[1]) * UNITS[match[2] or ""])


class Server(uvicorn.Server):
    """uvicorn, with our limits on connections, and ended by Ctrl-C in two steps.

    `begun` is when the command was, in seconds of `time.perf_counter`; `warm` starts the process that compiles
    grammars before the first is wanted.
    """

    def __init__(
        self, service: Service, url: str, begun: float, say: Callable[[str], None], *, warm: bool = True
    ) -> None:
        self._service, self._url, self._begun, self._say = service, url, begun, say
        self._warm = warm
        limits = service.limits
        super().__init__(
            uvicorn.Config(
                service.app(self._lifespan),
                http=connection_class(limits),
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=limits.idle_seconds,
                h11_max_incomplete_event_size=limits.header_bytes,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        if self.should_exit:
            self.force_exit = True
            self._service.client.stop()
            return
        self.should_exit = True
        waiting = self._service.client.waiting
        self._say(
            f"stopping after {waiting} running requests; Ctrl-C again stops at once"
            if waiting
            else "stopping"
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn leaves the application's end out where it is forced, and then complains of it."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Guard) -> AsyncIterator[None]:
        service = self._service
        await service.client.start()
        announcing = asyncio.create_task(self._announce())
        try:
            yield
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            if service.model is not None:
                await service.model.grammars.close()
            await service.client.close(drain=not self.force_exit)

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
            if self._warm and client.state == "ready" and client.ready and self._service.model is not None:
                await self._service.model.grammars.warm(client.ready)

    def _ready_text(self) -> str:
        ready = self._service.client.ready
        assert ready is not None, "the engine is ready"
        facts = f"weights {gib(ready.weight_bytes)}"
        if ready.kind == "decoder":
            tokens = ready.pages * ready.page_tokens
            facts += f", KV cache {gib(ready.kv_bytes)} for {tokens} tokens, context {ready.context}"
        lines = [
            f"serving '{self._service.name}' at {self._url} after {time.perf_counter() - self._begun:.1f} s: {facts}"
        ]
        return "\n".join([*lines, *(f"notice: {notice}" for notice in ready.notices)])


def _print_preflight(target: Target, options: Options, say: Callable[[str], None]) -> None:
    wish = Wish(
        quantize=options.quantize,
        kv=options.kv,
        dtype=options.dtype,
        kv_memory=options.kv_memory,
        max_context=options.max_context,
        max_running=options.max_running,
    )
    figures = preflight(target, wish)
    say(f"serving '{target.name}' from {target.artifact or target.folder}")
    if figures is not None:
        say(str(figures))


def _refuse_for_artifact(target: Target, options: Options) -> None:
    settled = {"--quantize": options.quantize, "--kv": options.kv, "--dtype": options.dtype}
    given = [f"{flag} {value}" for flag, value in settled.items() if value is not None]
    if given:
        raise WorkloadError(
            f"{' '.join(given)} is not for {target.artifact}, which is an artifact and has its own",
            next="leave it out, or name the folder of the model it was made from",
        )


def _listen(options: Options) -> socket.socket:
    """The listening socket; taken before anything is loaded, so that a port in use is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise WorkloadError(
            f"the server cannot listen on {options.host}, port {options.port}",
            found=str(error),
            next="choose another with --port, or 0 for a free one",
        ) from error
    return listening
