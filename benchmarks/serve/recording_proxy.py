"""A proxy on this machine that records what a client sends to a server, and what it is answered."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

HOP_BY_HOP = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request and the answer's status."""

    method: str
    path: str
    body: Any
    """The request's JSON; None without a body, a text where the body is not JSON."""
    status: int
    answer: str
    ignored: str
    """The fields without effect, as the server's header names them."""


@dataclass
class Recording:
    """The proxy's address, and the exchanges so far."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)


@contextlib.contextmanager
def recording(server: str, seconds: float = 600.0) -> Iterator[Recording]:
    """Run a proxy before a server's address until the block ends."""
    kept: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: the recording says all."""

        def _pass_on(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            headers["accept-encoding"] = "identity"
            found = b""
            with (
                httpx.Client(timeout=seconds, trust_env=False) as http,
                http.stream(self.command, server + self.path, content=sent, headers=headers) as answer,
            ):
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # a client may leave in the middle
                    for part in answer.iter_raw():
                        found += part
                        self.wfile.write(part)
                        self.wfile.flush()
            self.close_connection = True
            kept.append(
                Exchange(
                    method=self.command,
                    path=self.path,
                    body=_body(sent),
                    status=answer.status_code,
                    answer=found.decode(errors="replace"),
                    ignored=answer.headers.get("x-torchwright-ignored", ""),
                )
            )

        do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = do_OPTIONS = _pass_on

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield Recording(f"http://127.0.0.1:{proxy.server_address[1]}", kept)
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join(10)


def _body(sent: bytes) -> Any:
    if not sent:
        return None
    try:
        return json.loads(sent)
    except ValueError:
        return sent.decode(errors="replace")
