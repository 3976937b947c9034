"""The fleet's own small server: the figures of all replicas and of the gateway, and the replicas' loads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Protocol

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from torchwright.serve.fleet.asking import Answer
from torchwright.serve.fleet.metrics import join
from torchwright.serve.http.guard import Guard
from torchwright.serve.http.hosts import Hosts
from torchwright.serve.limits import Limits
from torchwright.serve.wire.metrics import CONTENT_TYPE

CONNECTIONS = 32
"""Scrapers and probes, at the same time."""


class Servers(Protocol):
    """Whom the status is asked of."""

    def names(self) -> Sequence[str]:
        """Return the names of the replicas, in the order of `ask_all`."""
        ...

    async def ask_all(self, path: str) -> list[Answer]:
        """Return each replica's answer."""
        ...

    async def gateway_metrics(self) -> Answer: ...

    def restarts(self) -> dict[str, int]:
        """Name of a replica or of the gateway → how often it was started again."""
        ...

    @property
    def ready(self) -> bool:
        """True while the gateway takes requests and has a replica."""
        ...


def application(servers: Servers, *, keys: Sequence[str], hosts: Sequence[str]) -> ASGIApp:
    """Return the server's application, guarded as that of a replica."""

    async def metrics(request: Request) -> Response:
        answers, gateway = await asyncio.gather(servers.ask_all("/metrics"), servers.gateway_metrics())
        texts = {
            name: answer.body.decode("utf-8", "replace")
            for name, answer in zip((*servers.names(), "gateway"), (*answers, gateway), strict=True)
            if answer.status == 200
        }
        up = {name: name in texts for name in (*servers.names(), "gateway")}
        return Response(own(up, servers.restarts()) + join(texts), headers={"content-type": CONTENT_TYPE})

    async def loads(request: Request) -> Response:
        answers = await servers.ask_all("/v1/loads")
        found = [
            {**load, "dp_rank": rank}
            for rank, answer in enumerate(answers)
            if answer.status == 200
            for load in answer.json()["loads"]
        ]
        facts = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": version("torchwright"),
            "dp_rank_count": len(answers),
            "loads": found,
        }
        return JSONResponse(facts)

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": servers.ready}, status_code=200 if servers.ready else 503)

    routes = [Route("/metrics", metrics), Route("/v1/loads", loads), Route("/ready", ready)]
    return Guard(
        Router(routes),
        keys=keys,
        hosts=Hosts(hosts),
        log_requests=False,
        count=lambda path, status: None,
    )


def own(up: dict[str, bool], restarts: dict[str, int]) -> str:
    """Return the fleet's own figures as text for Prometheus."""
    families = (
        ("torchwright:fleet_up", "gauge", "1 for a server whose figures are here.", up),
        ("torchwright:fleet_restarts_total", "counter", "Times that a server was started again.", restarts),
    )
    return "".join(
        f"# HELP {name} {help}\n# TYPE {name} {kind}\n"
        + "".join(f'{name}{{server="{server}"}} {int(value)}\n' for server, value in values.items())
        for name, kind, help, values in families
    )


class StatusServer(uvicorn.Server):
    """uvicorn without signal handlers: the fleet has its own."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS,
                h11_max_incomplete_event_size=Limits().header_bytes,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
