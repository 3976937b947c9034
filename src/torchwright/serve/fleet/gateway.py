"""Shepherd Model Gateway (`smg`) as a child: its options, its manifest of replicas, and its next life when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwright.core.process import folders
from torchwright.core.process.orphans import bound_command
from torchwright.serve.fleet.asking import Answer, ask
from torchwright.serve.fleet.child import Child, Relay
from torchwright.serve.fleet.kept_alive import KeptAlive
from torchwright.serve.fleet.options import LOOPBACK, Policy

RETRIES = 5
"""Tries of a request that no replica has begun to answer."""
FIRST_RETRY_MS = 200
"""From the first try to the second; each further pause is half as long again, 1.6 s in all. With SMG's own 50 ms, all
tries could fall into the time in which a dead replica's port is closed, and SMG answers 500 then. Its successor listens
on the port soon after, and answers 503 with `Retry-After`."""
FAILURES = 3
"""Failures in a row that open a replica's circuit. Fewer than the retries: cache-aware routing chooses the same replica
again until then, and the last tries must reach another."""
OPEN_SECONDS = 5
"""Time until a replica behind an open circuit is tried again; its probes go on meanwhile."""
PROBE_SECONDS = 2
"""Between two probes of a replica."""
PROBE_TIMEOUT_SECONDS = 5
"""Longest answer of a probe: a burst of a thousand requests keeps a replica on a shared core busy for seconds. With two
failed probes a hanging replica gets no further request after 14 seconds at most."""
FAILED_PROBES = 2
GRACE_SECONDS = 3600
"""Running streams may take so long after the gateway was asked to end; the fleet ends it before, when they have."""
READY_PAUSE_SECONDS = 0.1
RUNNING = re.compile(rb"^smg_admission_inflight ([0-9.e+]+)$", re.MULTILINE)
"""Its figure of requests that it holds until their last byte."""


@dataclass(frozen=True)
class Place:
    """One server in the gateway's manifest: another id at the same place is another life, with an empty cache."""

    id: str
    place: str
    model: str | None = None
    """The one model that it has for the gateway; None where the server tells."""


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """The gateway's settings, the same in each of its lives."""

    host: str
    """An address, not a name."""
    port: int
    policy: Policy
    keys: Sequence[str]
    origins: Sequence[str]
    body_bytes: int
    """Bytes of a request at most."""
    aliases: Sequence[str]
    """Further names of the first model."""
    models: Sequence[str]
    """The model and its adapters, by the names that requests use; empty for servers elsewhere."""


class Gateway(KeptAlive):
    """The gateway over all of its processes' lives."""

    def __init__(self, options: GatewayOptions, *, relay: Relay, changed: asyncio.Event) -> None:
        """`changed` is set whenever `ready` or `ended` is another."""
        super().__init__("the gateway", relay=relay, changed=changed)
        self._options = options
        self._folder = folders.make_for_sockets("gateway")  # of mode 0700
        self._metrics_place = ""

    @property
    def models(self) -> Sequence[str]:
        return self._options.models

    @property
    def _manifest(self) -> Path:
        return self._folder.path / "replicas.json"

    @property
    def place(self) -> str:
        """HOST:PORT where this machine reaches it."""
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self._options.host, self._options.host)
        return f"{f'[{host}]' if ':' in host else host}:{self._options.port}"

    def route_to(self, places: Sequence[Place]) -> None:
        """Have requests sent to these servers from now on, and to no others."""
        workers = [
            {"id": each.id, "url": f"http://{each.place}"} | ({"model_id": each.model} if each.model else {})
            for each in places
        ]
        aside = self._manifest.with_suffix(".new")
        aside.write_text(json.dumps({"version": 1, "workers": workers}), encoding="utf-8")
        aside.replace(self._manifest)  # never half a manifest

    def close(self) -> None:
        self._folder.remove()

    async def running(self) -> int:
        """Return the number of requests that have not ended, 0 where it does not say."""
        found = RUNNING.search((await self.metrics()).body)
        return int(float(found[1])) if found else 0

    async def metrics(self) -> Answer:
        """Return its own figures."""
        return await ask(self._metrics_place, "/metrics") if self._metrics_place else Answer(0)

    def _start(self) -> Child:
        metrics_port = _free_port()  # where another program takes it first, the next life has another
        self._metrics_place = f"{LOOPBACK}:{metrics_port}"
        given = arguments(self._options, self._manifest, metrics_port)
        return Child.start(
            "gateway",
            bound_command("torchwright.serve.fleet.gateway_process"),
            given=json.dumps(given).encode(),
            relay=self._relay,
        )

    async def _watch(self, child: Child) -> float | None:
        """See `KeptAlive`; a life counts from its start."""
        begun = asyncio.get_running_loop().time()
        with contextlib.suppress(asyncio.CancelledError):
            while (await ask(self.place, "/readiness")).status != 200:
                await asyncio.sleep(READY_PAUSE_SECONDS)
            self._become(True)
        return begun


def arguments(options: GatewayOptions, manifest: Path, metrics_port: int) -> list[str]:
    """Return SMG's command line; values stand behind an equals sign, because a key may begin with a hyphen."""
    settings: dict[str, object] = {
        "--host": options.host,
        "--port": options.port,
        "--policy": options.policy,
        "--discovery-provider": "file",
        "--discovery-file": manifest,
        "--discovery-check-interval-secs": PROBE_SECONDS,
        "--worker-startup-check-interval": 1,
        "--prometheus-host": LOOPBACK,
        "--prometheus-port": metrics_port,
        "--max-payload-size": options.body_bytes,
        "--log-level": "warn",  # the replicas log requests
        "--history-backend": "none",  # nothing is stored
        "--retry-max-retries": RETRIES,
        "--retry-initial-backoff-ms": FIRST_RETRY_MS,
        "--cb-failure-threshold": FAILURES,
        "--cb-success-threshold": 1,
        "--cb-timeout-duration-secs": OPEN_SECONDS,
        "--health-check-endpoint": "/ready",
        "--health-check-interval-secs": PROBE_SECONDS,
        "--health-check-timeout-secs": PROBE_TIMEOUT_SECONDS,
        "--health-failure-threshold": FAILED_PROBES,
        "--health-success-threshold": 1,
        "--shutdown-grace-period-secs": GRACE_SECONDS,
        # A key of nobody's: clients neither see nor change the replicas.
        "--control-plane-api-keys": f"fleet:fleet:admin:{secrets.token_hex(32)}",
    }
    words = [f"{flag}={value}" for flag, value in settings.items()]
    words.append("--disable-tokenizer-autoload")  # the replicas tokenize, and nothing is downloaded
    # Without a replica its model stays known: a request is answered by 503, which clients try again, and not by 404.
    words.append("--no-remove-unhealthy-workers")
    words += [f"--model-alias={alias}={options.models[0]}" for alias in options.aliases]
    if options.origins:
        words += ["--cors-allowed-origins", *options.origins]
    if options.keys:
        first, *more = options.keys
        words.append(f"--api-key={first}")  # of its own questions, too
        words += [f"--tenant-api-key=key{number}:{key}" for number, key in enumerate(more, 2)]
    return words


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as free:
        return free.getsockname()[1]
