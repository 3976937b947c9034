"""`torchwright serve --replicas`: what is asked for, whether it fits, and then the fleet."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

from torchwright.core.errors import TorchwrightError, WorkloadError
from torchwright.core.system import only_linux
from torchwright.models.vision.reader import takes_pictures
from torchwright.serve.background import in_background
from torchwright.serve.command import Checked, api_keys, bind, check, url_of
from torchwright.serve.descriptors import raise_limit
from torchwright.serve.fleet.cores import divide, usable
from torchwright.serve.fleet.fleet import Fleet, Lines
from torchwright.serve.fleet.gateway import Gateway, GatewayOptions
from torchwright.serve.fleet.options import LOOPBACK, MOST_REPLICAS, FleetOptions
from torchwright.serve.fleet.replicas import Replica
from torchwright.serve.limits import Limits
from torchwright.serve.log import begin_log
from torchwright.serve.options import KV_SHARE, ServerOptions
from torchwright.serve.preflight import Preflight, available_bytes, gib

OPEN = (
    "the gateway asks for no key, and unlike a single server it does not check the host that a browser names: a web "
    "page may reach it from this machine; --api-key-file keeps it out"
)
REASONS = {
    "--allow-adapters": "the gateway has no path for it",
    "--allow-weights": "the gateway has no path for it; send it to each server of --replicas HOST:PORT,HOST:PORT",
    "--batches": "the gateway has no path for it, and each server would have files of its own",
    "--allowed-host": "the gateway does not check the host; --api-key-file keeps foreign pages out",
}


def serve(options: FleetOptions, say: Callable[[str], None]) -> int:
    """Serve until Ctrl-C; returns the exit code. `say` is given what the user should read.

    Raises `TorchwrightError` for what cannot be served, before or while it is loaded.
    """
    begun = time.perf_counter()
    if reason := only_linux("torchwright serve --replicas"):
        raise WorkloadError("the servers cannot run here", found=reason)
    if find_spec("smg") is None:
        raise TorchwrightError(
            "--replicas needs Shepherd Model Gateway (smg), which is not installed",
            next="`pip install 'torchwright[fleet]'`",
        )
    count = options.replicas.count
    cores = divide(usable(), count) if count else []
    checked = check_replicas(options.server, count) if count else None
    keys = checked.keys if checked is not None else api_keys(options.server)
    held = bind(options.server.host, options.server.port)
    url = url_of(held)
    if options.server.wait_ready and (code := in_background(held, url, say, "/readiness")) is not None:
        return code
    if checked is not None:
        say(
            f"serving {count} replicas of '{checked.found.name}' from {checked.found.artifact or checked.found.folder}"
        )
        if checked.figures is not None:
            say(in_total(checked.figures, count))
    address = held.getsockname()[0]
    with held, bind(options.server.host, options.metrics_port) as status:
        status.listen()
        metrics_url = url_of(status)

        def announce() -> str:
            seconds = time.perf_counter() - begun
            name = f"'{checked.found.name}'" if checked else ", ".join(options.replicas.places)
            shares = " | ".join(",".join(map(str, each)) for each in cores)
            where = f": {count} replicas on processors {shares}" if cores else ""
            line = f"serving {name} at {url} after {seconds:.1f} s{where}; figures at {metrics_url}/metrics"
            return line if keys else f"{line}\nnotice: {OPEN}"

        begin_log()
        raise_limit()
        gateway = GatewayOptions(
            host=address,
            port=held.getsockname()[1],
            policy=options.policy,
            keys=keys,
            origins=options.server.allowed_origins,
            body_bytes=body_bytes(checked),
            models=[checked.found.name, *checked.adapters] if checked else [],
            aliases=options.server.served_model_names[1:],
        )
        asyncio.run(_run(options, checked, gateway, cores, status, announce, say))
    return 0


async def _run(
    options: FleetOptions,
    checked: Checked | None,
    gateway: GatewayOptions,
    cores: Sequence[Sequence[int]],
    status: socket.socket,
    announce: Callable[[], str],
    say: Callable[[str], None],
) -> None:
    lines, changed = Lines(), asyncio.Event()
    replicas = [
        Replica(number, checked.options, processors, relay=lines.relay, changed=changed)
        for number, processors in enumerate(cores)
        if checked is not None
    ]
    fleet = Fleet(
        replicas,
        options.replicas.places,
        Gateway(gateway, relay=lines.relay, changed=changed),
        lines,
        changed=changed,
        keys=gateway.keys,
        hosts=[options.server.host],
        say=say,
    )
    await fleet.run(status, announce)


def check_replicas(server: ServerOptions, count: int, available: int | None = None) -> Checked:
    """Return the options of each of `count` replicas of this machine.

    `available` is the memory to share, in bytes; by default what this machine has now.

    Raises `TorchwrightError` for options that are not for them, and for too little memory: each has its own weights,
    and an equal share of what is there for keys and values.
    """
    one_server_only = {
        "--allow-adapters": server.allow_adapters,
        "--allow-weights": server.allow_weights,
        "--batches": server.batches,
        "--allowed-host": server.allowed_hosts or None,
    }
    for flag, value in one_server_only.items():
        if value is not None:
            raise WorkloadError(f"{flag} is not for --replicas", found=REASONS[flag])
    available = available_bytes() if available is None else available
    checked = check(server, available)
    if unknown := [name for name in server.served_model_names[1:] if "=" in name]:
        raise WorkloadError(
            f"--served-model-name '{unknown[0]}' is not for --replicas",
            found="the gateway takes a further name up to its first '='",
            next="give it as the first name, or without '='",
        )
    if (places := count * (1 + len(checked.adapters))) > MOST_REPLICAS:
        raise WorkloadError(
            f"--replicas {count} with {len(checked.adapters)} adapters",
            found=f"{places} places for the gateway, one for each name of each replica",
            allowed=f"at most {MOST_REPLICAS}",
        )
    if checked.found.served_as == "painter":
        raise WorkloadError(
            f"--replicas {count}", found="a pipeline of pictures, which the gateway has no path for"
        )
    engine = server.engine
    if (device := engine.device or checked.found.device) != "cpu":
        raise WorkloadError(
            f"--replicas {count} on {device}",
            found="replicas share this machine's cores, and none of them has a part of a device",
            next=f"one server on {device}, without --replicas",
        )
    if engine.kv_memory is None and (checked.figures is not None or checked.found.served_as == "translator"):
        engine = replace(engine, kv_memory=int(available * KV_SHARE / count))
    mine = replace(
        server,
        engine=engine,
        host=LOOPBACK,
        port=0,
        api_keys=checked.keys,
        api_key_file=None,
        wait_ready=False,
    )
    checked = check(mine, available)
    figures = checked.figures
    if figures is not None and count * figures.weight_bytes > figures.available_bytes:
        fitting = figures.available_bytes // max(1, figures.weight_bytes)
        raise WorkloadError(
            f"--replicas {count}",
            found=f"{gib(figures.available_bytes)} of memory for {count} times {gib(figures.weight_bytes)} of weights, "
            "which replicas do not share",
            allowed=f"at most {fitting}" if fitting else "none: not even one fits",
            next=figures.advice or "--quantize w4a8 makes the weights smaller",
        )
    return checked


def in_total(figures: Preflight, count: int) -> str:
    """Return the figures of one replica, and those of all as its last line."""
    total = count * (figures.weight_bytes + figures.kv_bytes)
    more = "" if total <= figures.available_bytes else ": more than there is, give a smaller --kv-memory"
    return f"{figures}\nreplicas   {count}, in all about {gib(total)} of {gib(figures.available_bytes)} available{more}"


def body_bytes(checked: Checked | None) -> int:
    """Return the most bytes of a request's body that a replica takes; of servers elsewhere, those of any kind."""
    limits = Limits()
    if checked is None or checked.found.served_as == "recognizer":
        return limits.upload_bytes
    return limits.picture_body_bytes if takes_pictures(checked.found.folder) else limits.body_bytes
