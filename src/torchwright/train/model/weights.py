"""A model's weights from and to Hugging Face folders, under the names of its family."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from torchwright.core.errors import ModelError
from torchwright.hub.checkpoint import QUANTIZATION, Checkpoint
from torchwright.hub.files import INDEX
from torchwright.hub.folder import copy_files, model_files, read_config
from torchwright.hub.formats.mxfp4 import Mxfp4
from torchwright.hub.tensor_names import EMBEDDING, HEAD
from torchwright.hub.trained import FILE as TRAINED
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import FAMILIES, decoder_config
from torchwright.models.decoder.family import BIASED, Names
from torchwright.train.model.file_tensor import FileTensor, expert_stacks
from torchwright.train.model.fill import fill, named_tensors, whole
from torchwright.train.model.four_bit import FourBit
from torchwright.train.model.layer_input_files import input_layer_tensors, token_input_tensors
from torchwright.train.model.recurrent_files import gated_queries, mixer_tensors
from torchwright.train.model.transformer import SCORE, Transformer

SHARD_BYTES = 4 * 2**30
"""The most bytes of one file, unless a single tensor is larger."""


def file_tensors(config: DecoderConfig, output: str = "lm_head") -> Iterator[FileTensor]:
    """Every tensor of the model's files, in the order of the layers; `output` is what they call the output layer."""
    names = FAMILIES[config.architecture].names
    yield FileTensor(name="model.embed_tokens.weight", parameters=("embedding.weight",))
    yield from token_input_tensors(config)
    for layer in range(config.layers):
        yield from layer_tensors(config, names, layer)
    yield FileTensor(name=f"{names.final_norm}.weight", parameters=("norm.weight",))
    if not config.tied:
        yield FileTensor(name=f"{output}.weight", parameters=("head.weight",))


def layer_tensors(config: DecoderConfig, names: Names, layer: int) -> Iterator[FileTensor]:
    """Every tensor of one layer's files."""
    if config.layer_inputs is not None:
        yield from input_layer_tensors(config, names, layer)
        return
    file, ours = f"model.layers.{layer}.", f"layers.{layer}."
    norms = {
        part: getattr(names, part) for part in ("pre_attention", "post_attention", "pre_mlp", "post_mlp")
    }
    recurrent = bool(config.recurrent) and config.recurrent[layer]
    attention = "attention.attention" if config.parallel else "attention"
    if recurrent or config.parallel:
        mixer = f"{ours}attention.mixer." if config.parallel else f"{ours}attention."
        yield from mixer_tensors(config, names, file, mixer)
    if config.qk_norm != "none" and not recurrent:
        norms |= {"attention.q_norm": names.q_norm, "attention.k_norm": names.k_norm}
    if config.latent is not None:
        norms |= {"attention.latent_norm": names.latent_norm}
        norms |= {"attention.query_norm": names.query_norm} if config.latent.query_rank is not None else {}
    for part, name in norms.items():
        if name is not None:
            yield FileTensor(name=f"{file}{name}.weight", parameters=(f"{ours}{part}.weight",))

    if config.sinks:
        yield FileTensor(name=f"{file}self_attn.sinks", parameters=(f"{ours}attention.sinks.weight",))

    linears = [] if recurrent else _attention_linears(config, names, attention)
    if config.output_gate and not recurrent:
        yield from gated_queries(config, names, file, f"{ours}attention.")
    if config.sparse[layer]:
        assert config.experts
        linears.append(((names.router,), ("mlp.router",), config.experts.router_bias))
        if config.experts.shared:
            linears.append((names.shared_gate_up, ("mlp.shared.gate", "mlp.shared.up"), False))
            linears.append(((names.shared_down,), ("mlp.shared.down",), False))
        if config.experts.shared_gate:
            linears.append(((names.shared_gate,), ("mlp.shared_gate",), False))
        if config.experts.bias:
            yield FileTensor(name=f"{file}{names.expert_bias}", parameters=(f"{ours}mlp.bias",), bias=True)
    else:
        linears.append((names.gate_up, ("mlp.gate", "mlp.up"), config.mlp_bias))
        linears.append(((names.down,), ("mlp.down",), config.mlp_bias))
    for file_names, parts, bias in linears:
        for kind in ("weight", "bias") if bias else ("weight",):
            full = tuple(f"{ours}{part}.{kind}" for part in parts)
            if len(file_names) == 1:
                yield FileTensor(name=f"{file}{file_names[0]}.{kind}", parameters=full)
            else:
                for name, parameter in zip(file_names, full, strict=True):
                    yield FileTensor(name=f"{file}{name}.{kind}", parameters=(parameter,))

    if config.sparse[layer] and "{}" not in names.expert_down:
        assert config.experts
        yield from expert_stacks(config.experts, names, file, f"{ours}mlp.experts.")
    elif config.sparse[layer]:
        assert config.experts
        patterns = zip((*names.expert_gate_up, names.expert_down), ("gate", "up", "down"), strict=True)
        for pattern, part in patterns:
            for expert in range(config.experts.count):
                yield FileTensor(
                    name=f"{file}{pattern.format(expert)}.weight",
                    parameters=(f"{ours}mlp.experts.{part}",),
                    expert=expert,
                )


Wanted = tuple[FileTensor, Sequence[torch.Tensor | FourBit]]
"""A tensor of a file and the parameters that it fills."""
Linears = list[tuple[tuple[str, ...], tuple[str, ...], bool]]
"""Tensors of files, our layers that they hold, and whether these have biases."""


def _attention_linears(config: DecoderConfig, names: Names, block: str) -> Linears:
    out = ((names.o,), (f"{block}.o",), config.o_bias)
    if config.latent is None:
        parts = tuple(f"{block}.{part}" for part in "qkv")
        first = 1 if config.output_gate else 0  # queries lie with their gates in the file
        return [(names.qkv[first:], parts[first:], config.qkv_bias), out]
    ranked = config.latent.query_rank is not None
    queries: Linears = [
        (names.query[:1], ("attention.query_in",), config.qkv_bias),
        (names.query[1:], ("attention.query",), False),
    ]
    return [
        *(queries if ranked else [(names.qkv[:1], ("attention.query",), False)]),
        ((names.latent,), ("attention.latent",), config.qkv_bias),
        ((names.from_latent,), ("attention.from_latent",), False),
        out,
    ]


@torch.no_grad()
def load_weights(model: Transformer, folder: Path) -> None:
    """Fill the model from a folder's safetensors, in the parameters' own dtype; sharded ones take their part.

    A classifier's output layer is left as it is. Biases that choose experts begin at zero if the folder has none.

    Raises `ModelError`, naming file and tensor, for what is missing, damaged or of another shape.
    """
    checkpoint, biased = _open_float(folder)
    wanted, tied = list(_wanted(model)), EMBEDDING if model.config.tied else None
    for tensor, parameters in wanted:
        if tensor.name == tied:
            fill(parameters[0], _tied_table(checkpoint, tuple(parameters[0].shape)))
    fill_from(checkpoint, [one for one in wanted if one[0].name != tied], biased=biased)
    checkpoint.close()


@torch.no_grad()
def fill_from(checkpoint: Checkpoint, wanted: Iterable[Wanted], *, biased: bool) -> None:
    """Fill parameters from a checkpoint's tensors; biases that choose experts are zero unless it is `biased`."""
    # An expert's matrix is read when its turn comes; the parameter of all of them is filled when they are complete.
    gathered: dict[str, list[torch.Tensor]] = {}
    for tensor, parameters in wanted:
        if tensor.bias and not biased:
            fill(parameters[0], torch.zeros(()))
            continue
        shapes = [tuple(parameter.shape) for parameter in parameters]
        if tensor.expert is not None:
            (name,), (shape,) = tensor.parameters, shapes
            parts = gathered.setdefault(name, [])
            parts.append(_whole(checkpoint, tensor.name, shape[1:]))
            if len(parts) == shape[0]:
                fill(parameters[0], torch.stack(gathered.pop(name)))
            continue
        full = _whole(checkpoint, tensor.name, tensor.shape(shapes))
        for parameter, part in zip(parameters, tensor.parts(full, shapes), strict=True):
            fill(parameter, part)


def check_shapes(model: Transformer, folder: Path) -> None:
    """Raise `ModelError` as `load_weights` does for missing tensors and wrong shapes, without reading a value.

    The model may be on the meta device, so that a config.json with sizes of its own takes no memory.
    """
    checkpoint, biased = _open_float(folder)
    for tensor, parameters in _wanted(model):
        if tensor.bias and not biased:
            continue
        shapes = [tuple(parameter.shape) for parameter in parameters]
        tied = tensor.name == EMBEDDING and model.config.tied and EMBEDDING not in checkpoint
        checkpoint.weight(HEAD if tied and HEAD in checkpoint else tensor.name, tensor.shape(shapes))
    checkpoint.close()


def _open_float(folder: Path) -> tuple[Checkpoint, bool]:
    """Open a checkpoint of float weights; the flag says whether its config has biases that choose experts.

    MXFP4, in which gpt-oss is published alone, is made wide as it is read.
    """
    described = read_config(folder)
    checkpoint = Checkpoint(folder, described)
    if checkpoint.quantized and not isinstance(checkpoint.format, Mxfp4):
        raise ModelError(
            f"{folder} is quantized ({checkpoint.format}), and training starts from float weights",
            next="take the model's original checkpoint",
        )
    return checkpoint, _has_biases(described, folder)


def _has_biases(described: dict[str, Any], folder: Path) -> bool:
    """Check whether a config.json's experts have biases that choose them."""
    experts = decoder_config(described, folder / "config.json").experts
    return bool(experts and experts.bias)


def _wanted(model: Transformer) -> Iterator[Wanted]:
    """Yield the tensors that this process's part of the model reads, each with its parameters."""
    parameters: dict[str, torch.Tensor | FourBit] = {**named_tensors(model)}
    parameters |= {name: part for name, part in model.named_modules() if isinstance(part, FourBit)}
    for tensor in file_tensors(model.config, model.output):
        elsewhere = tensor.parameters[0] not in parameters  # of another process's pipeline stage
        if not elsewhere and tensor.name != f"{SCORE}.weight":
            yield tensor, [parameters[name] for name in tensor.parameters]


def _tied_table(checkpoint: Checkpoint, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the table of a tied embedding and output layer, which files hold under either name or under both."""
    found = [_whole(checkpoint, name, shape) for name in (EMBEDDING, HEAD) if name in checkpoint]
    if len(found) == 2 and not torch.equal(*found):
        raise ModelError(
            f"{checkpoint.folder}: config.json ties the output layer to the embedding, and the files hold two",
            next='set "tie_word_embeddings": false in config.json, as the weights say',
        )
    return found[0] if found else _whole(checkpoint, EMBEDDING, shape)


def _whole(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return checkpoint.weight(name, shape).rows(0, shape[0])


@torch.no_grad()
def save_folder(
    model: Transformer,
    config: DecoderConfig,
    folder: Path,
    source: Path | None = None,
    value: Callable[[str], torch.Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights as safetensors under the family's names to a temporary folder, and rename it.

    With `source`, its config.json (with the new dtype), tokenizer and licence files are copied, so that
    `load_decoder(folder)` and transformers read the result; without, the folder holds the weights alone. Where the
    model is sharded every process calls this, and the first one of the group writes. `value` gives a parameter's whole
    value by its name, by default as it is. A file holds `shard_bytes` at most. Raises `ModelError` for a folder that
    exists and holds anything.
    """
    if value is None:
        value = parameter_values(model)
    writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    # Where nothing is gathered the first process may have written by the time at which another comes to look.
    looks = writes or any(isinstance(tensor, DTensor) for tensor in named_tensors(model).values())
    if looks and folder.exists() and any(folder.iterdir()):
        raise ModelError(
            f"the folder to save to, {folder}, is not empty",
            found=", ".join(sorted(path.name for path in folder.iterdir())[:6]),
            next="name a new folder",
        )
    temporary = None
    if writes:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        dtype = write_tensors(value, file_tensors(config, model.output), temporary, shard_bytes)
        if temporary is not None:
            if source is not None:
                _copy_files(source, temporary, dtype, biased=bool(config.experts and config.experts.bias))
            temporary.chmod(0o755)
            os.replace(temporary, folder)
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary)


def parameter_values(model: Transformer) -> Callable[[str], torch.Tensor]:
    """Parameter name → its whole value."""
    tensors = named_tensors(model)
    return lambda name: whole(tensors[name])


def write_tensors(
    whole_value: Callable[[str], torch.Tensor],
    tensors: Iterable[FileTensor],
    folder: Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> torch.dtype:
    """Write the shards and their index, and say what type they have; with no folder only take part in gathering."""
    dtype: torch.dtype | None = None
    files: list[dict[str, torch.Tensor]] = [{}]
    weight_map: list[list[str]] = []
    size = total = 0
    experts: tuple[str, torch.Tensor] | None = None

    def flush() -> None:
        weight_map.append(list(files[-1]))
        if folder is not None:
            save_file(files[-1], folder / f"part-{len(weight_map)}", metadata={"format": "pt"})
        files[-1] = {}

    for tensor in tensors:
        if tensor.expert is None:
            value = tensor.join([whole_value(name) for name in tensor.parameters])
        else:
            # Gathered once for all experts of a kind, which follow each other.
            (name,) = tensor.parameters
            if experts is None or experts[0] != name:
                experts = name, whole_value(name)
            value = experts[1][tensor.expert]
        dtype = dtype or value.dtype
        if size and size + value.nbytes > shard_bytes:
            flush()
            size = 0
        size, total = size + value.nbytes, total + value.nbytes
        if folder is not None:
            files[-1][tensor.name] = value.detach().cpu().contiguous()
        else:
            files[-1][tensor.name] = torch.empty(0)
    flush()
    if folder is not None:
        _name_shards(folder, weight_map, total)
    assert dtype is not None
    return dtype


def _name_shards(folder: Path, weight_map: list[list[str]], total: int) -> None:
    count = len(weight_map)
    if count == 1:
        (folder / "part-1").rename(folder / "model.safetensors")
        return
    index: dict[str, str] = {}
    for place, names in enumerate(weight_map, 1):
        file = f"model-{place:05}-of-{count:05}.safetensors"
        (folder / f"part-{place}").rename(folder / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (folder / INDEX).write_text(text, encoding="utf-8")


def _copy_files(source: Path, folder: Path, dtype: torch.dtype, *, biased: bool) -> None:
    files = model_files(source, weights=False)
    # What the source was trained for is not said of other weights.
    copy_files({name: file for name, file in files.items() if name not in (INDEX, TRAINED)}, folder)
    config = read_config(source)
    config.pop(QUANTIZATION, None)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    if biased and not _has_biases(config, source):
        config["topk_method"] = BIASED
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
