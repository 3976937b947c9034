"""A head's folder in SpecForge's layout, which SGLang and vLLM read as well: config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.files import TensorFiles
from torchwright.hub.folder import read_config, resolve
from torchwright.hub.language_part import language_part
from torchwright.models.decoder.draft.eagle import LAYER_PREFIXES, EagleDraft
from torchwright.models.decoder.draft.eagle_config import eagle_config
from torchwright.models.decoder.draft.load import load_draft
from torchwright.models.decoder.weights import DecoderWeights, plain_linear
from torchwright.train.draft.config import HeadSection
from torchwright.train.draft.head import EagleHead
from torchwright.train.draft.shape import described, head_config
from torchwright.train.draft.target import TargetModel
from torchwright.train.model.fill import DEVIATION, whole
from torchwright.train.run.config.data_section import RunError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
EMBEDDING = "embed_tokens.weight"


def started_head(start: str, target: TargetModel) -> tuple[EagleHead, dict[str, Any]]:
    """The head in the folder `start`, and its config.json in SpecForge's layout.

    Raises `ModelError` for a folder that `load_draft` refuses, `RunError` for one without a head.
    """
    path = resolve(start)
    draft = load_draft(path, target.loaded)  # checks every tensor, in words
    if not isinstance(draft, EagleDraft):
        raise RunError(f"head.start = {start} is not an EAGLE-3 head", found=f"a draft of kind {draft.kind}")
    config = read_config(path)
    read = eagle_config(config, path / CONFIG, target_layers=target.decoder.config.layers)
    files = TensorFiles(path)
    tensors = {_plain(name): files.get(name).clone() for name in files.names()}
    files.close()
    ids_D = torch.arange(read.draft_vocabulary)
    if "d2t" in tensors:
        ids_D = ids_D + tensors["d2t"].long()
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = output_layer(target)
    head = EagleHead(read, draft.get_buffer("embedding"), ids_D)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    return head, described(config, read)


def new_head(
    section: HeadSection, ids_D: np.ndarray, target: TargetModel, seed: int
) -> tuple[EagleHead, dict[str, Any]]:
    """A head that is trained from the start, and its config.json.

    Its output layer and final norm are the target's, for the tokens that it can propose. Its states begin as the last
    of the features that it reads, which is next to what such an output layer reads. The rest is random.
    """
    config = head_config(target.decoder.config, section) | {"draft_vocab_size": len(ids_D)}
    read = eagle_config(config, Path("the new head"), target_layers=target.decoder.config.layers)
    head = EagleHead(read, target.decoder.embedding, torch.from_numpy(ids_D))
    random = torch.Generator().manual_seed(seed)
    E = read.layer.model
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * DEVIATION)
        head.fc.weight[:, -E:] += torch.eye(E)
        head.lm_head.weight.copy_(output_layer(target)[head.ids])
        if (norm_E := target.decoder.norm) is not None:
            head.norm.weight.copy_(norm_E)
    return head, config


def output_layer(target: TargetModel) -> torch.Tensor:
    """The target's output layer (V, E) in float32, however the loaded one is packed."""
    config = target.decoder.config
    checkpoint = Checkpoint(target.folder, language_part(read_config(target.folder)))
    weights = DecoderWeights(config, checkpoint, torch.float32, plain_linear, torch.device("cpu"))
    weight = weights.head(weights.embedding()).weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def file_tensors(head: EagleHead, target: TargetModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a head's file, by SpecForge's names; where the head is sharded every process takes part.

    The embedding is left out where it is the target's: who serves the head has it.
    """
    tensors = {
        name: whole(parameter.detach()).to("cpu", dtype).contiguous()
        for name, parameter in head.named_parameters()
    }
    ids_D = head.ids.cpu()
    tensors["d2t"] = ids_D - torch.arange(len(ids_D))
    tensors["t2d"] = torch.zeros(head.config.layer.vocabulary, dtype=torch.bool).index_fill(0, ids_D, True)
    if head.embedding.data_ptr() != target.decoder.embedding.data_ptr():
        tensors[EMBEDDING] = head.embedding.to("cpu", dtype).contiguous()
    return tensors


def write_head(tensors: Mapping[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write a head's folder."""
    folder.mkdir(parents=True)
    kind = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config | {"torch_dtype": kind}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _plain(name: str) -> str:
    """A tensor's name as SpecForge writes it."""
    name = name.removeprefix("model.")
    other = LAYER_PREFIXES[1]
    return LAYER_PREFIXES[0] + name.removeprefix(other) if name.startswith(other) else name
