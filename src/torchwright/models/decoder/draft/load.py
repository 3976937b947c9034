"""From a folder to the draft of a loaded decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError
from torchwright.core.scheme import read_scheme
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.files import TensorFiles
from torchwright.hub.folder import MTP, read_config, resolve
from torchwright.hub.language_part import language_part
from torchwright.hub.mtp import is_mtp_layer
from torchwright.hub.tokenizer import find_tokenizer
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.draft.draft import Draft
from torchwright.models.decoder.draft.eagle import EagleDraft, HeadWeights
from torchwright.models.decoder.draft.eagle_config import eagle_config, is_eagle
from torchwright.models.decoder.draft.mtp import MtpDraft, check_mtp
from torchwright.models.decoder.draft.small import SmallDraft
from torchwright.models.decoder.families import decoder_config
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.models.decoder.load import linear_maker, load_decoder
from torchwright.models.decoder.model import Decoder

OF_TEXT = ("eos", "bos", "context")
"""Fields of a configuration that change no tensor and no token's state."""


def load_draft(folder: str | Path, loaded: LoadedPagedModel, quantize: str | None = None) -> Draft:
    """The draft in a folder (or of a hub id) for a loaded decoder: a head, MTP layer, or small model of its tokens.

    `MTP` is the MTP layer in the model's own folder. `quantize` takes what `load_decoder` does. Raises `ModelError` for
    a head, layer or model of other sizes or tokens.
    """
    if folder == MTP:
        return _mtp(loaded.folder, read_config(loaded.folder), loaded, quantize).eval()
    path = resolve(str(folder))
    if path.resolve() == loaded.folder.resolve():
        raise ModelError(
            f"the draft in {path} is the model itself",
            found="proposals that are always right, and cost as much as the tokens",
            next="take an EAGLE-3 head, or a smaller model with the same tokens",
        )
    config = read_config(path)
    if is_eagle(config):
        return _eagle(path, config, loaded, quantize).eval()
    if is_mtp_folder(path):
        return _mtp(path, config, loaded, quantize).eval()
    return _small(path, loaded, quantize).eval()


def is_mtp_folder(path: Path) -> bool:
    """Check whether a folder holds an MTP layer alone, as `torchwright train --draft mtp` writes it."""
    return any(path.glob("*.safetensors")) and is_mtp_layer(TensorFiles(path).names())


def _eagle(path: Path, config: dict[str, Any], loaded: LoadedPagedModel, quantize: str | None) -> Draft:
    decoder = loaded.decoder
    if not isinstance(decoder, Decoder):
        raise ModelError(
            f"the EAGLE-3 head in {path} cannot be used with {loaded.folder}",
            found="a model that does not run on Torchwright's own decoder, whose layers a head reads",
            next="take a small model of the same tokenizer as the draft, or no draft",
        )
    file = path / "config.json"
    read = eagle_config(config, file, target_layers=decoder.config.layers)
    sizes = {"vocabulary": read.layer.vocabulary, "model size": read.target_model}
    for name, found in sizes.items():
        allowed = decoder.config.vocabulary if name == "vocabulary" else decoder.config.model
        if found != allowed:
            raise ModelError(
                f"the head in {path} was trained for another model than {loaded.folder}",
                found=f"a {name} of {found}",
                allowed=str(allowed),
            )
    dtype = decoder.embedding.dtype
    make_linear = linear_maker(read_scheme(quantize), dtype, loaded.device)
    return EagleDraft(read, HeadWeights(path, read, dtype, make_linear, loaded.device), decoder)


def _mtp(path: Path, config: dict[str, Any], loaded: LoadedPagedModel, quantize: str | None) -> Draft:
    decoder = loaded.decoder
    if not isinstance(decoder, Decoder):
        raise ModelError(
            f"--draft {MTP}: {loaded.folder} does not run on Torchwright's own decoder",
            next="take a small model of the same tokenizer as the draft, or no draft",
        )
    if decoder.ways > 1:
        raise ModelError(
            f"--draft {MTP}: {decoder.ways} processes divide {loaded.folder}, and its MTP layer is not divided",
            next="take an EAGLE-3 head or a small model as the draft, or no draft",
        )
    if path != loaded.folder:
        check_trained_for(path, config, decoder.config, loaded.folder)
    checkpoint = Checkpoint(path, language_part(config))
    check_mtp(path, decoder.config, checkpoint)
    dtype = decoder.embedding.dtype
    return MtpDraft(decoder, checkpoint, dtype, linear_maker(read_scheme(quantize), dtype, loaded.device))


def check_trained_for(path: Path, config: dict[str, Any], target: DecoderConfig, folder: Path) -> None:
    """Raise `ModelError` for an MTP layer in `path` whose config.json is not that of the model in `folder`."""
    described, file = language_part(config), path / "config.json"
    own = decoder_config(described, file)
    different = [
        field.name
        for field in fields(target)
        if field.name not in OF_TEXT and getattr(own, field.name) != getattr(target, field.name)
    ]
    if different:
        name = different[0]
        raise ModelError(
            f"the MTP layer in {path} was trained for another model than {folder}",
            found=f"{name.replace('_', ' ')}: {getattr(own, name)}",
            allowed=str(getattr(target, name)),
        )


def _small(path: Path, loaded: LoadedPagedModel, quantize: str | None) -> Draft:
    dtype = torch.float32 if loaded.decoder.embedding.dtype == torch.float32 else torch.bfloat16
    draft = load_decoder(path, dtype, quantize, device=loaded.device.type)
    if draft.config.state_shapes or draft.config.varies_by_length:
        raise ModelError(
            f"{path} cannot be a draft",
            found="layers with a state, or angles that depend on the prompt's length",
            allowed="a model whose layers all keep keys and values",
        )
    if difference := _difference(_tokens(draft), _tokens(loaded)):
        raise ModelError(
            f"the draft in {path} has other tokens than {loaded.folder}",
            found=difference,
            next="take a model of the same family, whose tokenizer is the same",
        )
    return SmallDraft(draft.decoder, loaded.config.vocabulary)


def _tokens(loaded: LoadedPagedModel) -> dict[str, int]:
    """A model's tokens and their ids; numbers stand for themselves where the folder has no tokenizer."""
    if find_tokenizer(loaded.folder) is None:
        return {str(id): id for id in range(loaded.config.vocabulary)}
    return loaded.text.vocabulary()


def _difference(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str | None:
    """The first difference between a draft's tokens and the model's, in words."""
    for token, id in ours.items():
        if theirs.get(token) != id:
            return f"the model's token {token!r} is {id}, and the draft's {theirs.get(token)}"
    return None if len(theirs) == len(ours) else f"{len(theirs)} tokens, and the model has {len(ours)}"
