"""`torchwright pull`: a model of the hub, downloaded."""

from __future__ import annotations

from typing import Any

import click

from torchwright.cli.options import json_option, revision_option
from torchwright.cli.printing import print_result


@click.command("pull")
@click.argument("model", metavar="ORG/NAME")
@revision_option
@json_option
def command(model: str, revision: str | None, as_json: bool) -> None:
    """Download a model of the hub, or go on where a download ended.

    Configuration, tokenizer and safetensors: no pickle and no code. They lie in the hub's own cache, where all verbs
    and other tools find them: $HF_HOME says where. $HF_TOKEN opens what is private or gated.
    """
    from torchwright.core.errors import ModelError
    from torchwright.hub.folder import at_revision, download, is_hub_id

    target = at_revision(model, revision) or model
    if not is_hub_id(target):
        raise ModelError(f"'{model}' is no hub id", allowed="ORG/NAME, with @REVISION if wanted")
    folder = download(target, allowed="a hub id, ORG/NAME")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    facts: dict[str, Any] = {"model": target, "path": str(folder), "bytes": size}
    print_result(f"pull {target}", facts, as_json)
