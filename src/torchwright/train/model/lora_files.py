"""Adapters as peft writes them: adapter_config.json and adapter_model.safetensors, under the model's own names.

A family whose files keep several of our matrices in one tensor (qkv, gate and up) gets one adapter for it of their
ranks together: A one below the other, B block by block. That is the same sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from torchwright.core.errors import unknown
from torchwright.hub.adapter import CONFIG, MAGNITUDE, PREFIX, WEIGHTS, A, B
from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.model.file_tensor import FileTensor
from torchwright.train.model.fill import whole
from torchwright.train.model.four_bit import FourBitLinear
from torchwright.train.model.lora import Adapter, adapters
from torchwright.train.model.weights import file_tensors


@dataclass(frozen=True, kw_only=True)
class Target:
    """One linear layer as the model's files have it, and the modules that are it."""

    name: str
    """Module path, such as "model.layers.0.self_attn.q_proj"."""
    modules: tuple[str, ...]
    tensor: FileTensor | None = None
    """The file's tensor, for a decoder of ours."""

    @property
    def leaf(self) -> str:
        """peft's name in `target_modules`."""
        return self.name.rpartition(".")[2]


def decoder_targets(config: DecoderConfig) -> list[Target]:
    """Return the linear layers of a decoder's layers, without stacked experts and routers."""
    found = []
    for tensor in file_tensors(config):
        modules = tuple(name.removesuffix(".weight") for name in tensor.parameters)
        linear = all(module.split(".")[-1] in LINEAR for module in modules)
        if tensor.expert is None and tensor.stack is None and tensor.name.endswith(".weight") and linear:
            found.append(Target(name=tensor.name.removesuffix(".weight"), modules=modules, tensor=tensor))
    return found


LINEAR = (
    *("q", "k", "v", "o", "gate", "up", "down", "query_in", "query", "latent", "from_latent"),
    *("gate_in", "step", "gain", "decay"),
)


def chosen(targets: Iterable[Target], leaves: list[str]) -> list[Target]:
    """Those of the names, or all where none are given. Raises `UnknownName` with the nearest."""
    targets = list(targets)
    known = {target.leaf for target in targets}
    for leaf in leaves:
        if leaf not in known:
            raise unknown("layer in lora.targets", leaf, known)
    return [target for target in targets if not leaves or target.leaf in leaves]


def save_adapters(
    model: nn.Module,
    targets: Iterable[Target],
    folder: Path | None,
    settings: dict[str, Any],
    more: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the adapters into a new folder; with no folder only take part in gathering.

    `settings` are peft's own for what the tensors do not say: base_model_name_or_path, r, lora_alpha, lora_dropout.
    They may name `target_modules`, where other layers of the model have the same names.
    `more` are parameters of the model that were trained whole, by their names in its files.
    """
    held = adapters(model)
    tensors = {f"{PREFIX}{name}": value for name, value in (more or {}).items()}
    ranks: dict[str, int] = {}
    leaves: set[str] = set()
    transposed = False
    for target in targets:
        parts = [held[module] for module in target.modules]
        leaves.add(target.leaf)
        transposed |= not isinstance(model.get_submodule(target.modules[0]), nn.Linear | FourBitLinear)
        ranks[target.leaf] = len(parts) * settings["r"]
        for name, value in _tensors(parts, target.tensor):
            tensors[f"{PREFIX}{target.name}.{name}"] = value.cpu().contiguous()
    if folder is None:
        return
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    wider = {leaf: rank for leaf, rank in sorted(ranks.items()) if rank != settings["r"]}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "use_rslora": False,
        "target_modules": sorted(leaves),
        **settings,
        "rank_pattern": wider,
        "alpha_pattern": {
            leaf: settings["lora_alpha"] * rank / settings["r"] for leaf, rank in wider.items()
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tensors(parts: list[Adapter], tensor: FileTensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    def rows(value: torch.Tensor) -> torch.Tensor:
        return value if tensor is None else tensor.as_in_file(value)

    yield A, torch.cat([whole(part.A.detach()) for part in parts])
    yield B, rows(torch.block_diag(*(whole(part.B.detach()) for part in parts)))
    magnitudes = [whole(part.magnitude.detach()) for part in parts if part.magnitude is not None]
    if magnitudes:
        yield MAGNITUDE, rows(torch.cat(magnitudes))
