"""`torchwright serve`: what is asked for, the pre-flight, the engine's start, and then the HTTP server.

The server's packages are imported while the engine starts.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from torchwright.core.errors import TorchwrightError, WorkloadError
from torchwright.core.process.orphans import bound_command
from torchwright.core.system import only_linux
from torchwright.serve.background import in_background
from torchwright.serve.folder import ServeTarget, draft_of, find
from torchwright.serve.formats.reasoning import REASONING_FORMATS
from torchwright.serve.formats.tools import TOOL_FORMATS
from torchwright.serve.options import AUTO, NONE, EngineOptions, ServerOptions
from torchwright.serve.preflight import Preflight, preflight
from torchwright.serve.wire.launch import Launcher

for _package in ("uvicorn", "starlette", "zmq", "msgspec", "prometheus_client", "xgrammar"):
    if find_spec(_package) is None:  # before an engine is started
        raise ModuleNotFoundError(f"No module named '{_package}'", name=_package)

KEY_VARIABLE = "TORCHWRIGHT_API_KEY"
NEEDS = {
    "reader": ("a model that reads text", ()),
    "recognizer": ("a speech model", (("python_multipart", "serve"), ("soundfile", "speech"))),
    "translator": ("a model of an encoder and a decoder", ()),
    "painter": ("a pipeline of pictures", (("diffusers", "diffusion"), ("PIL", "diffusion"))),
}
"""Kind of server → its printed name, and the packages and extras that it needs."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Options that can be served: what they name was found, and nothing was loaded or opened yet."""

    options: ServerOptions
    found: ServeTarget
    keys: Sequence[str]
    adapters: Mapping[str, Path]
    figures: Preflight | None
    """None for a model without a cache of pages."""


def serve(options: ServerOptions, say: Callable[[str], None]) -> int:
    """Serve until Ctrl-C; returns the exit code. `say` is given what the user should read.

    Raises `ModelError`, `ArtifactError` or `WorkloadError` for what cannot be served, before or while it is loaded.
    """
    begun = time.perf_counter()
    checked = check(options)
    listening = listen(options)
    url = url_of(listening)
    if options.wait_ready and (code := in_background(listening, url, say)) is not None:
        return code
    say(f"serving '{checked.found.name}' from {checked.found.artifact or checked.found.folder}")
    if checked.figures is not None:
        say(str(checked.figures))
    run(checked, [listening], url, begun=begun, say=say)
    return 0


def check(options: ServerOptions, available: int | None = None) -> Checked:
    """Return what the options name; raises as `serve` does for what is known before anything is loaded.

    `available` is the memory to plan for, as in `preflight`.
    """
    if reason := only_linux("torchwright serve"):
        raise WorkloadError("the server cannot run here", found=reason)
    keys = api_keys(options)
    _check_url_hosts(options.allowed_urls)
    _check_formats(options)
    found = find(options.engine.model)
    adapters = {name: Path(folder) for name, folder in options.engine.adapters}
    _check_model_names(options.served_model_names)
    _check_adapters(adapters, [*options.served_model_names] or [found.name], options.allow_adapters)
    if options.allow_weights is not None and not options.allow_weights.is_dir():
        raise WorkloadError(f"--allow-weights {options.allow_weights} is not a folder")
    if options.served_model_names:
        found = replace(found, name=options.served_model_names[0])
    if found.artifact is not None:
        _refuse_for_artifact(found, options.engine)
    if found.served_as in NEEDS:
        _check_needs(found, options.engine)
    engine = replace(options.engine, draft=draft_of(options.engine.draft, found))
    figures = preflight(found, engine, available)
    return Checked(options=options, found=found, keys=keys, adapters=adapters, figures=figures)


def run(
    checked: Checked,
    listening: Sequence[socket.socket],
    url: str,
    *,
    begun: float,
    say: Callable[[str], None],
) -> None:
    """Load the model and serve it on sockets until a signal; closes them. Raises `ModelError`.

    `begun` is when the command was, in seconds of `time.perf_counter`.
    """
    options = checked.options
    launcher = Launcher(lambda endpoint: engine_command(endpoint, options.engine))
    try:
        launcher.start_ahead()
        from torchwright.serve.http import server  # half a second, in which the engine gets ahead

        server.run(
            checked.found,
            launcher,
            listening,
            url,
            keys=checked.keys,
            hosts=[options.host, *options.allowed_hosts],
            origins=options.allowed_origins,
            picture_hosts=options.allowed_urls,
            aliases=options.served_model_names[1:],
            adapters=checked.adapters,
            allow_adapters=options.allow_adapters,
            allow_weights=options.allow_weights,
            batches=options.batches,
            log_requests=options.log_requests,
            tool_call_format=options.tool_call_format,
            reasoning_format=options.reasoning_format,
            drain_seconds=options.drain_seconds,
            begun=begun,
            say=say,
        )
    finally:
        launcher.close()
        for each in listening:
            each.close()


def _check_formats(options: ServerOptions) -> None:
    """Raise `WorkloadError` for a format that is not in its table."""
    given = {
        "--tool-call-format": (options.tool_call_format, [AUTO, *TOOL_FORMATS]),
        "--reasoning-format": (options.reasoning_format, [AUTO, NONE, *REASONING_FORMATS]),
    }
    for flag, (name, allowed) in given.items():
        if name not in allowed:
            raise WorkloadError(f"{flag} {name}", found="no such format", allowed=", ".join(allowed))


def api_keys(options: ServerOptions) -> list[str]:
    """The keys of the options, or of the environment where they name none.

    Raises `WorkloadError` for a place that holds none: who names one does not mean an open server.
    """
    places = {}
    if options.api_keys:
        places["--api-key"] = list(options.api_keys)
    if options.api_key_file is not None:
        places[f"--api-key-file {options.api_key_file}"] = _lines(options.api_key_file)
    if not places and KEY_VARIABLE in os.environ:
        places[KEY_VARIABLE] = os.environ[KEY_VARIABLE].split()
    for place, keys in places.items():
        if not keys or not all(re.fullmatch(r"[!-~]+", key) for key in keys):
            raise WorkloadError(
                f"{place} holds {'a text that is no key' if keys else 'no key'}",
                allowed="printable ASCII characters without spaces",
            )
    return [key for keys in places.values() for key in keys]


def _check_model_names(names: Sequence[str]) -> None:
    """Raise `WorkloadError` for names that no request could use."""
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice or not all(re.fullmatch(r"[!-~]+", name) for name in names):
        raise WorkloadError(
            "--served-model-name cannot be used",
            found=f"'{twice[0]}' twice" if twice else ", ".join(map(repr, names)),
            allowed="different names of printable ASCII characters without spaces",
        )


def _check_url_hosts(hosts: Sequence[str]) -> None:
    """Raise `WorkloadError` for a `--allow-url` that no URL's host is equal to."""
    wrong = [
        host
        for host in hosts
        if not re.fullmatch(r"[A-Za-z0-9._-]+(:[0-9]+)?|\[[0-9a-fA-F:.]+\](:[0-9]+)?", host)
    ]
    if wrong:
        raise WorkloadError(
            f"--allow-url {wrong[0]} cannot be used",
            allowed="a host alone or with a port, such as images.example.com, 10.0.0.5:8080 or [fd00::5]",
        )


def _check_adapters(adapters: Mapping[str, Path], models: Sequence[str], allowed: Path | None) -> None:
    """Raise `WorkloadError` for an adapter with the model's name, and for a folder that is not there."""
    if taken := [name for name in adapters if name in models]:
        raise WorkloadError(f"--adapter {taken[0]}=…: '{taken[0]}' is the served model's name")
    if allowed is not None and not allowed.is_dir():
        raise WorkloadError(f"--allow-adapters {allowed} is not a folder")


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{file} cannot be read", found=str(error)) from error


def engine_command(endpoint: str, options: EngineOptions) -> list[str]:
    """The command that starts the engine's process."""
    words = ("--endpoint", endpoint, "--parent", str(os.getpid()), "--options", options.to_json())
    return bound_command("torchwright.serve.engine.process", *words)


def _refuse_for_artifact(target: ServeTarget, options: EngineOptions) -> None:
    settled = {
        "--quantize": options.quantize,
        "--kv": options.kv,
        "--dtype": options.dtype,
        "--device": options.device,
        "--quantize-vision": options.quantize_vision,
        "--adapter": options.adapter,
    }
    given = [f"{flag} {value}" for flag, value in settled.items() if value is not None]
    if given:
        raise WorkloadError(
            f"{' '.join(given)} is not for {target.artifact}, which is an artifact and has its own",
            next="leave it out, or name the folder of the model it was made from",
        )


def _check_needs(target: ServeTarget, options: EngineOptions) -> None:
    """Before anything is loaded: raises `TorchwrightError` for a package that is missing, and for options of text."""
    kind, packages = NEEDS[target.served_as]
    for package, extra in packages:
        if find_spec(package) is None:
            raise TorchwrightError(
                f"{kind} is served with {package}, which is not installed",
                next=f"`pip install 'torchwright[{extra}]'`",
            )
    adapters = options.adapter or options.adapters or None
    given: dict[str, object] = {
        "--adapter": adapters,
        "--draft": options.draft,
        "--max-context": options.max_context,
        "--device": None if options.device == "cpu" else options.device,
    }
    if target.served_as != "translator":
        given |= {"--kv": options.kv, "--kv-memory": options.kv_memory}
    if target.served_as in ("painter", "reader"):
        given |= {"--quantize": options.quantize, "--dtype": options.dtype}
    flags = [flag for flag, value in given.items() if value is not None]
    if flags:
        raise WorkloadError(f"{' and '.join(flags)}: not for {target.name}, which is {kind}")


def url_of(listening: socket.socket) -> str:
    """Return the URL by which a listening socket is reached."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def listen(options: ServerOptions) -> socket.socket:
    """The listening socket; taken before anything is loaded, so that a port in use is known at once."""
    listening = bind(options.host, options.port)
    listening.listen()  # who comes before the server's packages are imported is answered then
    return listening


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds a port; raises `WorkloadError` for one in use, and for a host that is not here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError as error:
        raise WorkloadError(
            f"the server cannot listen on {host}, port {port}",
            found=str(error),
            next="choose another with --port, or 0 for a free one",
        ) from error
    return held
