"""`[lora]` of a run: which layers get adapters, what is kept of them, and what is written at the end."""

from __future__ import annotations

from pathlib import Path

import torch

from torchwright.core.paths import file_digest
from torchwright.hub.folder import model_files
from torchwright.train.model import Transformer
from torchwright.train.model.foreign import Foreign, linear_names
from torchwright.train.model.lora import adapters, add_adapters, freeze
from torchwright.train.model.lora_files import Target, chosen, decoder_targets, save_adapters
from torchwright.train.run.config.run import Lora, Precision


def adapt(model: Transformer | Foreign, lora: Lora, precision: Precision) -> None:
    """Freeze a model and hang adapters on it, empty still. Raises `UnknownName` for a target that it does not have."""
    targets = linear_targets(model)
    wide = lora.base == "fp32" or (lora.base != "bf16" and precision == "fp32")
    freeze(
        model,
        torch.float32 if wide else torch.bfloat16,
        lora.base if lora.base in ("nf4", "int4") else None,
        [module for target in targets for module in target.modules],
    )
    add_adapters(
        model,
        [module for target in chosen(targets, lora.targets) for module in target.modules],
        r=lora.r,
        alpha=lora.strength,
        dropout=lora.dropout,
        dora=lora.dora,
    )


def linear_targets(model: Transformer | Foreign) -> list[Target]:
    """Return the layers that may have adapters, by their names in the model's files."""
    if isinstance(model, Transformer):
        return decoder_targets(model.config)
    return [Target(name=name.removeprefix("network."), modules=(name,)) for name in linear_names(model)]


def write_adapters(model: Transformer | Foreign, lora: Lora, base: str, folder: Path | None) -> None:
    """Write the adapters in peft's format; where they are sharded every process takes part, the first has a folder."""
    settings = {
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.strength,
        "lora_dropout": lora.dropout,
        "use_dora": lora.dora,
    }
    held = adapters(model)
    targets = [target for target in linear_targets(model) if target.modules[0] in held]
    save_adapters(model, targets, folder, settings)


def base_digests(folder: Path) -> dict[str, str]:
    """File → SHA-256 of the frozen weights, which a checkpoint of adapters does not hold."""
    files = model_files(folder, weights=True)
    return {name: file_digest(file) for name, file in files.items() if name.endswith(".safetensors")}
