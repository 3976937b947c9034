"""An MTP layer's files under the checkpoint's own names: the layer by itself, or a copy of its model with the layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from torchwright.core.errors import ModelError
from torchwright.hub.checkpoint import QUANTIZATION, Checkpoint
from torchwright.hub.files import INDEX, TensorFiles
from torchwright.hub.folder import copy_files, model_files, read_config, resolve
from torchwright.hub.language_part import language_part
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.draft.eagle_config import is_eagle
from torchwright.models.decoder.draft.load import check_trained_for
from torchwright.models.decoder.draft.mtp import MtpNames, check_mtp, has_mtp, mtp_names, one_layer
from torchwright.models.decoder.families import FAMILIES
from torchwright.train.draft.files import CONFIG, WEIGHTS, output_layer
from torchwright.train.draft.mtp_head import MtpHead
from torchwright.train.draft.target import TargetModel
from torchwright.train.model.file_tensor import FileTensor, expert_stacks
from torchwright.train.model.fill import named_tensors, whole
from torchwright.train.model.weights import fill_from, layer_tensors
from torchwright.train.run.config.data_section import RunError

LAYER, MODEL = "model-mtp.safetensors", "model-language.safetensors"
"""In a copy of the model: the layer's file, and the one that was model.safetensors, which transformers would take for
all there is."""


def mtp_head(start: str | None, target: TargetModel, dtype: torch.dtype, seed: int) -> tuple[MtpHead, str]:
    """The layer in the folder `start`, else the target's own, else a new one; and where it comes from, in words.

    `dtype` is that of the frozen output layer. Raises `ModelError` for a family whose layer is not known, and for a
    folder without a layer or with that of another model.
    """
    config = target.decoder.config
    mtp_names(config)
    folder = target.folder if start is None else resolve(start)
    described = read_config(folder)
    if start is not None:
        if is_eagle(described):
            raise RunError(f"head.start = {start} is not an MTP layer", found="an EAGLE-3 head")
        check_trained_for(folder, described, config, target.folder)
    head = MtpHead(config, target.decoder.embedding, output_layer(target).to(dtype))
    checkpoint = Checkpoint(folder, language_part(described))
    if start is None and not has_mtp(config, checkpoint):
        head.reset_parameters(seed)
        return head, f"a new layer: {folder} has none"
    check_mtp(folder, config, checkpoint)
    tensors = named_tensors(head)
    head.stacked = any(one.name in checkpoint for one in _expert_files(config))
    files = layer_files(config, stacked=head.stacked)
    fill_from(checkpoint, [(one, [tensors[name] for name in one.parameters]) for one in files], biased=True)
    checkpoint.close()
    return head, f"the layer in {folder}"


def layer_files(config: DecoderConfig, *, stacked: bool) -> Iterator[FileTensor]:
    """Yield every tensor of a model's MTP layer; `stacked` files hold all experts in two."""
    names = mtp_names(config)
    ends = {
        names.join: "join",
        names.embedding_norm: "embedding_norm",
        names.hidden_norm: "hidden_norm",
        names.final_norm: "norm",
    }
    for name, part in ends.items():
        yield FileTensor(name=f"{name.format(config.layers)}.weight", parameters=(f"{part}.weight",))
    prefix = f"{names.layer.format(config.layers)}."
    for tensor in layer_tensors(one_layer(config), FAMILIES[config.architecture].names, 0):
        if tensor.expert is None or not stacked:
            yield replace(tensor, name=tensor.name.replace("model.layers.0.", prefix, 1))
    if stacked:
        yield from _expert_files(config)


def _expert_files(config: DecoderConfig) -> Iterator[FileTensor]:
    """Yield the tensors of all experts where a file holds them in two; none for a layer without experts."""
    if config.experts is not None:
        prefix, names = mtp_names(config).layer.format(config.layers), FAMILIES[config.architecture].names
        yield from expert_stacks(config.experts, names, f"{prefix}.", "layers.0.mlp.experts.")


def mtp_tensors(head: MtpHead, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of the layer's file; where the layer is sharded every process takes part."""
    values = {name: whole(tensor.detach()).to("cpu") for name, tensor in named_tensors(head).items()}
    found: dict[str, torch.Tensor] = {}
    for one in layer_files(head.target, stacked=head.stacked):
        parts = [values[name] for name in one.parameters]
        value = one.join(parts) if one.expert is None else parts[0][one.expert]
        # DeepSeek's biases that choose experts are float32: rounded ones would choose others.
        found[one.name] = value.to(torch.float32 if one.bias else dtype, copy=True)
    return found


def write_mtp(tensors: Mapping[str, torch.Tensor], target: TargetModel, folder: Path) -> None:
    """Write the folder of a layer by itself, with its model's config.json."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    config = {key: value for key, value in read_config(target.folder).items() if key != QUANTIZATION}
    _write_config(config, target.decoder.config, folder)


def check_mergeable(target: TargetModel) -> None:
    """Raise `ModelError` for a target whose folder a trained layer cannot be put into."""
    TensorFiles(target.folder).close()
    if Checkpoint(target.folder, language_part(read_config(target.folder))).quantized:
        raise ModelError(
            f"--merge: {target.folder} is quantized, and the layer is not",
            next="leave --merge out and serve with --draft OUT/model, or train for the model's original checkpoint",
        )


def write_merged(tensors: Mapping[str, torch.Tensor], target: TargetModel, folder: Path) -> None:
    """Write a copy of the target with the layer in the place of its own, if it had one."""
    config, names = target.decoder.config, mtp_names(target.decoder.config)
    source = TensorFiles(target.folder)
    old = {name for name in source.names() if _of_layer(name, names, config.layers)}
    folder.mkdir(parents=True)
    copy_files(model_files(target.folder, weights=False), folder)
    places: dict[str, str] = {}
    for path in sorted({source.path(name) for name in source.names()}):
        kept = [name for name in source.names() if source.path(name) == path and name not in old]
        new = MODEL if path.name == WEIGHTS else path.name
        _copy_without(path, kept, folder / new)
        places |= dict.fromkeys(kept, new)
    source.close()
    layer = {**tensors, **_copies(target, names, next(iter(tensors.values())).dtype)}
    save_file(layer, folder / LAYER, metadata={"format": "pt"})
    places |= dict.fromkeys(layer, LAYER)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    _write_config(read_config(target.folder), config, folder)


def _copies(target: TargetModel, names: MtpNames, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The copies of embedding and output layer that published files of the family hold with the layer."""
    layers, found = target.decoder.config.layers, dict[str, torch.Tensor]()
    if names.embedding is not None:
        found[f"{names.embedding.format(layers)}.weight"] = target.decoder.embedding.to("cpu", dtype).clone()
    if names.output is not None:
        found[f"{names.output.format(layers)}.weight"] = output_layer(target).to(dtype).contiguous()
    return found


def _of_layer(name: str, names: MtpNames, layers: int) -> bool:
    """Check whether a tensor of a file belongs to the MTP layer."""
    parts = (names.layer, names.join, names.embedding_norm, names.hidden_norm, names.final_norm)
    return name.startswith(tuple(f"{part.format(layers)}." for part in parts))


def _copy_without(path: Path, kept: Iterable[str], to: Path) -> None:
    """Copy a file of tensors, of which those of an older layer stay behind."""
    with safe_open(path, framework="pt") as file:
        kept = list(kept)
        if len(kept) == len(list(file.keys())):
            shutil.copyfile(path, to)
        elif kept:
            save_file({name: file.get_tensor(name) for name in kept}, to, metadata=file.metadata())


def _write_config(config: dict[str, Any], target: DecoderConfig, folder: Path) -> None:
    """Write a model's config.json that says that there is a layer, as vLLM and SGLang want it."""
    field = "mtp_num_hidden_layers" if "Qwen3_5" in target.architecture else "num_nextn_predict_layers"
    part = language_part(config)
    inner = config.get("text_config")
    place = config if part is config or not isinstance(inner, dict) else inner
    if not place.get(field):
        place[field] = 1
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
