"""`[lora]` of a run over files: adapters on the linear layers of transformers' own model, and their files.

A classifier's head is trained whole, as peft's `modules_to_save`: it is small, and new classes need a new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.core.layer_types import overridden
from torchwright.train.media.config import MediaLora
from torchwright.train.media.model import Media
from torchwright.train.model.fill import whole
from torchwright.train.model.lora import NAME, adapters, add_adapters, freeze, reset_adapters
from torchwright.train.model.lora_files import Target, chosen, save_adapters


def adapt(model: Media, lora: MediaLora, classes: int | None, seed: int) -> None:
    """Freeze a model but for its head of so many classes, and hang adapters on its layers.

    Raises `ModelError` for a model without linear layers, and `UnknownName` for a target that it does not have.
    """
    targets = _targets(model)
    if not targets:
        raise ModelError(
            f"{type(model.network).__name__} has no linear layers in its blocks to hang adapters on",
            next="train all of its weights: leave [lora] out",
        )
    heads = [] if classes is None else _heads(model, classes)
    freeze(model, torch.float32)
    for name in heads:
        model.get_submodule(name).requires_grad_(True)
    options = {"r": lora.r, "alpha": lora.strength, "dropout": lora.dropout, "dora": lora.dora}
    add_adapters(model, [target.modules[0] for target in chosen(targets, lora.targets)], **options)
    reset_adapters(model, seed)
    model.frozen_norms = True


def write_adapters(model: Media, lora: MediaLora, base: str, folder: Path | None) -> None:
    """Write the adapters and the head in peft's format; the first process has a folder, every process takes part."""
    held = adapters(model)
    trained = {
        name.removeprefix("network."): whole(value.detach()).cpu()
        for name, value in model.named_parameters()
        if value.requires_grad and ".lora." not in name
    }
    settings: dict[str, Any] = {
        "task_type": None,
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.strength,
        "lora_dropout": lora.dropout,
        "use_dora": lora.dora,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in trained}) or None,
    }
    targets = [target for target in _targets(model) if target.modules[0] in held]
    leaves, adapted = {target.leaf for target in targets}, {target.modules[0] for target in targets}
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in adapted}
    if leaves & others:  # as in an encoder whose layers have the same names
        settings["target_modules"] = sorted(target.name for target in targets)
    save_adapters(model, targets, folder, settings, more=trained)


def _targets(model: Media) -> list[Target]:
    """Return the plain linear layers within the model's blocks; another `forward` could not be merged."""
    inside = {module for layer in model.layers for module in layer.modules()}
    return [
        Target(name=name.removeprefix("network."), modules=(name,))
        for name, module in model.named_modules()
        if module in inside
        and isinstance(module, nn.Linear)
        and (NAME in module._modules or not overridden(module, (nn.Linear,)))
    ]


def _heads(model: Media, classes: int) -> list[str]:
    """Return the modules outside of the blocks whose outputs are the classes."""
    inside = {module for layer in model.layers for module in layer.modules()}
    found = [
        name
        for name, module in model.named_modules()
        if module not in inside
        and isinstance(module, nn.Linear | nn.Conv2d)
        and len(module.weight) == classes
    ]
    if not found:
        raise ModelError(
            f"the head of {type(model.network).__name__} was not found",
            found=f"no layer of {classes} outputs",
        )
    return found
