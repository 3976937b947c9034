"""A native encoder and decoder of text as an artifact keeps them: packed for the kernels, with each layer's form.

seq2seq.safetensors   every tensor of both sides
seq2seq.json          the form of each packed layer, the type of cached keys and values, and the languages
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from torchwright.core.errors import ArtifactError, ModelError
from torchwright.core.json_file import read_json
from torchwright.hardware.kernels.linear import PackedForm, PackedLinear
from torchwright.hub.fields import Fields
from torchwright.hub.folder import find_object, read_config
from torchwright.models.decoder.artifact_parts import ArtifactParts
from torchwright.models.decoder.load import KV_DTYPES
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.seq2seq.encoder import Encoder
from torchwright.models.decoder.seq2seq.rules import read_rules
from torchwright.models.decoder.seq2seq.stacks import SIDES, stack_family
from torchwright.models.decoder.seq2seq.translator import Embedding, LoadedSeq2Seq

TENSORS, FORMS = "seq2seq.safetensors", "seq2seq.json"
ENCODER = {"table": "embedding", "positions": "positions", "norm": "embedding_norm"}
"""Parts before the encoder, by their names among the encoder's parts."""
SHARED = re.compile(r"layers\.[1-9]\d*\.attention\.bias")
"""The first layer's, once more."""


def write_packed(model: LoadedSeq2Seq, folder: Path) -> None:
    """Keep a model whose linear layers are packed."""
    sides = {"encoder": model.encoder, "decoder": model.decoder}
    tensors = {
        f"{side}.{name}": tensor
        for side, module in sides.items()
        for name, tensor in module.state_dict().items()
        if not SHARED.fullmatch(name)
    }
    for name, tensor in model.embedding.state_dict().items():
        part, dot, rest = name.partition(".")
        tensors[f"encoder.{ENCODER[part]}{dot}{rest}"] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    forms = {
        f"{side}.{name}": layer.form.as_dict()
        for side, module in sides.items()
        for name, layer in module.named_modules()
        if isinstance(layer, PackedLinear)
    }
    described = {
        "kv": next(name for name, dtype in KV_DTYPES.items() if dtype == model.kv_dtype),
        "first": model.rules.first,
        "source_language": model.source_language,
        "layers": forms,
    }
    (folder / FORMS).write_text(json.dumps(described, indent=1), encoding="utf-8")


def read_packed(folder: Path, model_folder: Path) -> LoadedSeq2Seq:
    """The model that `write_packed` kept; `model_folder` holds config.json and the tokenizer.

    Raises `ArtifactError` for files that are damaged or do not fit the configuration.
    """
    try:
        described = read_json(folder / FORMS)
        forms = {name: PackedForm.from_dict(form) for name, form in described["layers"].items()}
        tensors = load_file(folder / TENSORS)
        config = read_config(model_folder)
        family = stack_family(config)
        if family is None:
            raise ValueError("config.json is of no such model")
        fields = Fields(model_folder / "config.json", config)
        parts = {side: ArtifactParts(family.read(fields, side), side, forms, tensors) for side in SIDES}
        vocabulary = parts["decoder"].config.vocabulary
        rules = read_rules(fields, find_object(model_folder / "generation_config.json"), vocabulary)
        first, source = described["first"], described["source_language"]
        if first is not None and not (type(first) is int and 0 <= first < vocabulary):
            raise ValueError(f"the first token is {str(first)[:80]}")
        if not isinstance(source, str | None):
            raise ValueError(f"the source's language is {str(source)[:80]}")
        return LoadedSeq2Seq(
            Embedding(parts["encoder"]).eval(),
            Encoder(parts["encoder"].config, parts["encoder"]).eval(),
            Decoder(parts["decoder"].config, parts["decoder"]).eval(),
            model_folder,
            kv_dtype=KV_DTYPES[described["kv"]],
            rules=replace(rules, first=first),
            source_language=source,
        )
    except (
        *(OSError, SafetensorError, RuntimeError, ValueError, LookupError),
        *(TypeError, AttributeError, ModelError),
    ) as error:
        raise ArtifactError(
            f"the encoder and decoder in {folder} cannot be read", found=f"{type(error).__name__}: {error}"
        ) from error
