"""`torchwright chat`: a conversation in the terminal."""

from __future__ import annotations

import os
from typing import Any

import click

from torchwright.cli.options import (
    adapter_option,
    count_option,
    decoder_options,
    revision_option,
    trust_option,
)


@click.command("chat")
@click.argument("model", metavar="[DIR|MODEL]", required=False)
@click.option("--url", metavar="URL", help="Talk with a server that runs, in place of a model.")
@click.option("--system", metavar="TEXT", help="The system prompt.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="X",
    show_default="1",
    help="How freely it answers.",
)
@count_option("--max-tokens", show_default="as many as fit", help="Most tokens of an answer.")
@decoder_options
@adapter_option
@revision_option
@trust_option
def command(model: str | None, url: str | None, system: str | None, trust: bool, **options: Any) -> None:
    """Talk with a language model: it remembers the conversation.

    /help lists what can be typed besides, such as /system, /clear and /save FILE. The model is served for the
    conversation alone, as `torchwright serve` serves it; $TORCHWRIGHT_API_KEY is sent to a server of --url.
    """
    from torchwright.serve.chat import Chat, Conversation, LocalServer, Terminal

    sampling = {name: options.pop(name) for name in ("temperature", "max_tokens")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    given = {name: value for name, value in options.items() if value is not None}
    conversation, terminal = Conversation(system=system), Terminal()
    key = os.environ.get("TORCHWRIGHT_API_KEY", "").split()
    if url is not None:
        if model is not None or given:
            raise click.UsageError("--url is for a server that runs: it has its model")
        Chat(url, conversation, terminal, key=key[0] if key else None, **sampling).run()
        return
    words = [] if model is None else [model]
    for name, value in given.items():
        words += [f"--{name}", str(value)]
    with LocalServer([*words, *(["--trust"] if trust else [])]) as local:
        Chat(local, conversation, terminal, key=key[0] if key else None, **sampling).run()
