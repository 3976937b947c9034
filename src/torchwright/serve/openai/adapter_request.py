"""Requests that load and unload adapters, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from torchwright.serve.openai.parse import Body

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")]


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter"""

    refused: ClassVar[dict[str, str]] = {"is_3d_lora_weight": "experts take no adapters"}

    lora_name: Name
    """The name by which requests choose the adapter in `model`."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """The adapter's folder, below the one of `--allow-adapters`."""
    load_inplace: bool = False
    """Take the place of the adapter that has the name; its running requests keep it."""


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter"""

    refused: ClassVar[dict[str, str]] = {"lora_int_id": "use lora_name"}

    lora_name: Name
    """The adapter's name."""
