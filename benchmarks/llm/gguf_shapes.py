"""Random GGUF files of the benchmarks' shapes, for llama.cpp as a peer of cpu.py.

    python -m benchmarks.llm.gguf_shapes --into DIR [--shape NAME …] [--kinds Q4_0 Q8_0 MXFP4 …]

Names, shapes and keys are those of tests/hub/gguf_models.py, which were compared with llama.cpp. Numbers are random,
and the vocabulary has no words: speed depends on neither. MXFP4 is for experts; the other matrices are Q8_0 there, as
in the published files of gpt-oss. A file is written tensor by tensor and never lies in memory as a whole.
"""

from __future__ import annotations

import importlib
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from benchmarks.harness import run
from benchmarks.llm import shapes

sys.path.insert(0, str(run.ROOT / "tests" / "hub"))
models: Any = importlib.import_module("gguf_models")
files: Any = importlib.import_module("gguf_files")

ARCHITECTURES = {"llama-3.2-1b": "llama", "lfm2-1.2b": "lfm2", "gpt-oss-20b-4-layers": "gpt-oss"}
AT_ONCE = 2**20
"""Blocks that are made and written together."""
STD = 0.02
Part = tuple[str, tuple[int, ...], str]
"""A tensor's name in the file, its shape and its type."""


def main() -> None:
    options = run.options(__doc__, json=False, into=".", shape=list(ARCHITECTURES), kinds=["Q4_0", "Q8_0"])
    for shape in options.shape:
        for kind in options.kinds:
            path = Path(options.into) / f"{shape}-{kind.lower()}.gguf"
            write(path, shape, kind)
            run.say(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


def write(path: Path, shape: str, kind: str) -> None:
    """Write the file of a shape whose matrices have this type."""
    import transformers

    name, fields = shapes.SHAPES[shape]
    config = getattr(transformers, name)(max_position_embeddings=16384, **fields)
    architecture = ARCHITECTURES[shape]
    parts = list(_parts(architecture, config, kind))
    keys = {f"{architecture}.{key}": value for key, value in models.sizes(architecture, config).items()}
    metadata = {"general.architecture": architecture} | keys | _words(config.vocab_size)
    infos, end = [], 0
    for stored, extents, own in parts:
        infos.append(files.info(stored, extents, files.TYPES[own], end))
        size = _bytes_of(extents, own)
        end += size + -size % files.ALIGNMENT
    head = files.header(metadata, infos)
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % files.ALIGNMENT))
        for _, extents, own in parts:
            _fill(file, math.prod(extents), own, random)
            file.write(bytes(-file.tell() % files.ALIGNMENT))


def _parts(architecture: str, config: Any, kind: str) -> Iterator[Part]:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for stored, _, extents, _ in models.parts(architecture, model):
        own = "Q8_0" if kind == "MXFP4" and "_exps" not in stored else kind
        plain = len(extents) == 1 or models.PLAIN.search(stored) is not None
        yield stored, tuple(extents), "F32" if plain else own


def _words(count: int) -> dict[str, Any]:
    """A vocabulary that llama.cpp reads, and nobody uses."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<", "0", "<0", *(f"<{token}>" for token in range(count - 3))],
        "tokenizer.ggml.token_type": [files.I32(1)] * count,
        "tokenizer.ggml.merges": ["< 0"],
        "tokenizer.ggml.bos_token_id": files.U32(1),
        "tokenizer.ggml.eos_token_id": files.U32(2),
    }


def _bytes_of(extents: tuple[int, ...], kind: str) -> int:
    count = math.prod(extents)
    if kind == "F32":
        return 4 * count
    numbers, size = files.SIZES[kind]
    if extents[-1] % numbers:
        raise SystemExit(f"rows of {extents[-1]} numbers are not whole blocks of {kind}")
    return count // numbers * size


def _fill(file: BinaryIO, count: int, kind: str, random: np.random.Generator) -> None:
    if kind == "F32":
        file.write((1 + STD * random.standard_normal(count)).astype(np.float32).tobytes())
        return
    numbers, size = files.SIZES[kind]
    for begin in range(0, count // numbers, AT_ONCE):
        blocks = random.integers(0, 256, (min(AT_ONCE, count // numbers - begin), size), np.uint8)
        halves, levels = files.HALVES[kind]
        for at, share in halves:
            scale = struct.pack("<e", STD / levels * share)
            blocks[:, at : at + 2] = np.frombuffer(scale, np.uint8)
        if kind == "MXFP4":
            blocks[:, 0] = round(math.log2(STD / 3)) + 127
        file.write(blocks.tobytes())


if __name__ == "__main__":
    main()
