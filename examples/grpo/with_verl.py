"""verl's client of an SGLang server, for weights that `torchwright serve` reads from a folder.

    torchwright serve MODEL --dtype bf16 --allow-weights /dev/shm/weights

verl's `AsyncHttpServerAdapter` sends weights as pickled handles of CUDA memory, and has the server give its memory
back between two phases. Here a set of weights is written as safetensors, and the server pauses while it is trained for:
what it computed is let go, and its memory stays its own. Everything else is verl's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from verl.workers.rollout.sglang_rollout.http_server_engine import (  # pyright: ignore[reportMissingImports]
    AsyncHttpServerAdapter,
)


class Adapter(AsyncHttpServerAdapter):
    """Gives a server the weights of each step; `folder` is that of --allow-weights."""

    def __init__(self, *, folder: Path, **options: Any) -> None:
        super().__init__(launch_server=False, **options)
        self._folder = folder

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> Any:
        """Take the whole tensors of a model; returns when the next token comes from them."""
        new = self._folder / f"{version}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights}, new)
        body = {"model_path": new.name, "weight_version": version, "keep_pause": True}
        answer = await self._make_async_request("update_weights_from_disk", body)
        new.unlink()
        return answer

    async def release_memory_occupation(self, tags: list[str] | None = None) -> Any:
        """Pause, and let keys and values go."""
        answer = await self._make_async_request("pause_generation", {"mode": "retract"})
        await self.flush_cache()
        return answer

    async def resume_memory_occupation(self, tags: list[str] | None = None) -> Any:
        """Go on once keys and values are wanted; verl asks for the weights first, and writes them then."""
        if tags is None or "kv_cache" in tags:
            return await self._make_async_request("continue_generation")
        return {}
