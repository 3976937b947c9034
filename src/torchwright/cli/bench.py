"""`torchwright bench`: times, without a search."""

from __future__ import annotations

from typing import Any

import click

from torchwright.cli.options import (
    decoder_options,
    device_option,
    json_option,
    shape_options,
    trust_option,
)
from torchwright.cli.printing import print_result
from torchwright.core.process.interrupts import importing


@click.command("bench")
@click.argument("model", metavar="DIR|MODEL")
@shape_options
@decoder_options
@device_option
@trust_option
@json_option
def command(model: str, trust: bool, as_json: bool, **options: Any) -> None:
    """Time an artifact or a model as it is.

    With --quantize, --kv or --dtype a language model runs on Torchwright's own decoder instead, without a search.
    """
    with importing():
        from torchwright.optimization import api

    print_result(f"bench {model}", api.bench(model, trust=trust, **options), as_json)
