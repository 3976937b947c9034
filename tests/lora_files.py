"""Adapters as peft writes them, with random matrices, for the model of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from torchwright.hub.adapter import CONFIG, PREFIX, WEIGHTS, A, B
from torchwright.hub.files import TensorFiles

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    base: Path,
    folder: Path,
    *,
    r: int = 4,
    seed: int = 0,
    std: float = 0.1,
    targets: tuple[str, ...] = LINEAR,
    within: str = "",
    more: dict[str, torch.Tensor] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter of the layers whose names end in `targets` and hold `within`; `more` are further tensors."""
    generator = torch.Generator().manual_seed(seed)
    files, tensors = TensorFiles(base), dict(more or {})
    for name in sorted(files.names()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or within not in module:
            continue
        N, K = files.get(name).shape
        tensors[f"{PREFIX}{module}.{A}"] = torch.randn(r, K, generator=generator) / K**0.5
        tensors[f"{PREFIX}{module}.{B}"] = torch.randn(N, r, generator=generator) * std
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 2.0 * r, "target_modules": [*targets]} | settings
    (folder / CONFIG).write_text(json.dumps(config))
    return folder
