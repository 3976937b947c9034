"""`torchwright serve`: the server."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from torchwright.cli.failures import packages_of
from torchwright.cli.options import (
    byte_count,
    count_option,
    decoder_options,
    on_device,
    revision_option,
    served_adapters_option,
    trust_option,
    vision_option,
)
from torchwright.cli.printing import say
from torchwright.core.errors import WorkloadError
from torchwright.core.process.interrupts import end_command
from torchwright.serve.fleet.options import METRICS_PORT, POLICIES, FleetOptions, Replicas
from torchwright.serve.options import MOST_DRAIN_SECONDS, EngineOptions, ServerOptions

ENGINE, SERVER = EngineOptions(), ServerOptions()
FLEET = ("replicas", "policy", "metrics_port")
"""Options of a fleet alone."""
GATEWAY = (
    *FLEET,
    "host",
    "port",
    "api_keys",
    "api_key_file",
    "allowed_origins",
    "wait_ready",
)
"""Options that also mean something where the servers run elsewhere."""


@click.command("serve")
@click.argument("model", metavar="[DIR|MODEL]", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Where to listen.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    metavar="N",
    help="0 takes a free one.",
)
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    metavar="NAME",
    show_default="the folder's",
    help="The model's name in requests. Repeatable; answers carry the first.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="Answer only requests with this key. Repeatable. Other users of this machine see it in the list of processes.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The same with a key in each line of a file. Without either, keys are read from $TORCHWRIGHT_API_KEY.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Without a key: a further name by which the server may be called, such as *.example.com. Repeatable.",
)
@click.option(
    "--allowed-origin",
    "allowed_origins",
    multiple=True,
    metavar="ORIGIN",
    help="A web page that may call the server from a browser, such as https://chat.example.com; * is every page. "
    "Pages of this machine may without. Repeatable.",
)
@click.option(
    "--allow-url",
    "allowed_urls",
    multiple=True,
    metavar="HOST",
    help="Fetch pictures of http and https URLs from this host, which may name a port, as HOST:PORT. It must have a "
    "public address, unless HOST is an address itself. Repeatable; without it pictures come as data URLs alone.",
)
@count_option(
    "--max-running",
    default=ENGINE.max_running,
    show_default=True,
    help="Answers in progress at the same time.",
)
@count_option(
    "--max-queue",
    default=ENGINE.max_queue,
    show_default=True,
    help="Answers that wait for their turn. What comes beyond is refused with status 429.",
)
@count_option(
    "--step-tokens",
    default=ENGINE.step_tokens,
    show_default=True,
    help="Tokens of one step, at least as many as run. Fewer make answers wait less for the prompts of others.",
)
@click.option(
    "--kv-memory",
    callback=byte_count,
    metavar="SIZE",
    show_default="half of the available memory",
    help="Memory for keys and values, such as 4GiB.",
)
@count_option("--max-context", show_default="the model's", help="Tokens of prompt and answer together.")
@click.option(
    "--speculate",
    type=click.Choice(["ngram", "none"]),
    default=ENGINE.speculate,
    show_default=True,
    help="Propose tokens from what stands in the text already; the answer is the same.",
)
@click.option(
    "--draft",
    metavar="DIR|mtp|none",
    show_default="an artifact's own",
    help="Also propose tokens by this EAGLE-3 head or small model with the same tokens, or by the model's own MTP "
    "layer; the answer is the same.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=ENGINE.prefix_cache,
    show_default=True,
    help="Keep what was computed of a prompt for others that begin alike.",
)
@click.option(
    "--tool-call-format",
    default=SERVER.tool_call_format,
    show_default=True,
    metavar="NAME",
    help="How the model writes tool calls, where the chat template does not tell: hermes, mistral and others "
    "(docs/serve.md).",
)
@click.option(
    "--reasoning-format",
    default=SERVER.reasoning_format,
    show_default=True,
    metavar="NAME",
    help="How the model marks its reasoning, where the chat template does not tell: think and others "
    "(docs/serve.md). none leaves it in the text.",
)
@click.option(
    "--wait-ready",
    is_flag=True,
    help="Serve in the background: print the URL and the process id, and return, when requests are taken.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0, MOST_DRAIN_SECONDS),
    default=SERVER.drain_seconds,
    show_default=True,
    metavar="S",
    help="After a SIGTERM, take requests for so long while /ready says 503, until gateways have noticed. Then running "
    "requests finish.",
)
@click.option(
    "--replicas",
    metavar="N|HOST:PORT,…",
    help="N servers on cores of their own behind Shepherd Model Gateway, or the gateway alone, before servers that run "
    "elsewhere.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default=POLICIES[0],
    show_default=True,
    help="With --replicas: how the gateway chooses one.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=METRICS_PORT,
    show_default=True,
    metavar="N",
    help="With --replicas: where all figures are, as /metrics. 0 takes a free one.",
)
@click.option("--log-requests", is_flag=True, help="Log a line for every request, not only for faults.")
@click.option(
    "--deterministic/--no-deterministic",
    default=None,
    help="The same request gives the same answer, alone or in any company; the default for native families. A model on "
    "transformers' own code then gives one answer at a time.",
)
@decoder_options
@on_device("cpu, or an artifact's own")
@vision_option
@served_adapters_option
@click.option(
    "--allow-adapters",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Let clients load adapters below this folder, by /v1/load_lora_adapter.",
)
@click.option(
    "--allow-weights",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Let clients change the model's weights to others below this folder, by /update_weights_from_disk, and pause "
    "generation.",
)
@click.option(
    "--batches",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Take files and batches by /v1/files and /v1/batches, and keep them in this folder, over restarts too. "
    "They run behind other requests.",
)
@click.option(
    "--adapter-memory",
    callback=byte_count,
    default=str(ENGINE.adapter_memory),
    show_default="1GiB",
    metavar="SIZE",
    help="Memory for adapters with a name, all together.",
)
@revision_option
@trust_option
@click.pass_context
def command(context: click.Context, **_: Any) -> int:
    """Serve a language model, a sentence encoder or a speech model by OpenAI's API.

    An artifact answers as it was optimized. Any other language model runs on Torchwright's own decoder. Ctrl-C lets
    running requests finish; a second one stops at once.
    """
    asked = read_options(context)
    with packages_of("serve", "the server's packages"):
        from torchwright.serve import command as room

        if isinstance(asked, FleetOptions):
            from torchwright.serve.fleet import command as fleet_room

            serve = functools.partial(fleet_room.serve, asked)
        else:
            serve = functools.partial(room.serve, asked)
    code = serve(say)
    end_command(code)
    return code


def read_options(context: click.Context) -> ServerOptions | FleetOptions:
    """Return what the command line asks for; raise `WorkloadError` for options without effect."""
    from torchwright.hub.folder import at_revision

    options = dict(context.params)
    fleet = _fleet(context, options)
    model = at_revision(options.pop("model"), options.pop("revision"))
    options["adapter"], options["adapters"] = options.pop("adapters")
    names = [field.name for field in dataclasses.fields(EngineOptions) if field.name in options]
    engine = EngineOptions(model=model, **{name: options.pop(name) for name in names})
    server = ServerOptions(engine=engine, **options)
    return server if fleet is None else FleetOptions(server=server, **fleet)


def _fleet(context: click.Context, options: dict[str, Any]) -> dict[str, Any] | None:
    """Take the fleet's options out of the others, None without --replicas.

    Raises `WorkloadError` for options without effect.
    """
    fleet = {name: options.pop(name) for name in FLEET}
    given = [name for name in context.params if _was_given(context, name)]
    if fleet["replicas"] is None:
        useless = [name for name in given if name in FLEET]
        if useless:
            raise WorkloadError(f"{_flag(context, useless[0])} is for --replicas")
        return None
    fleet["replicas"] = Replicas.parse(fleet["replicas"])
    useless = [name for name in given if name not in GATEWAY]
    if fleet["replicas"].places and useless:
        raise WorkloadError(
            f"{_flag(context, useless[0])} is not for servers that run elsewhere",
            next="give it to the servers that --replicas names",
        )
    return fleet


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _flag(context: click.Context, name: str) -> str:
    parameter = next(each for each in context.command.params if each.name == name)
    return parameter.opts[0] if isinstance(parameter, click.Option) else "a model"
