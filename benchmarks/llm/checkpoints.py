"""Quantized checkpoints by format and family: read, equal to the weights they stand for, and timed against our packing.

    python -m benchmarks.llm.checkpoints [--formats awq Q4_K …] [--threads N] [--json FILE]

The checkpoints are written here from random models, by the writers of tests/hub/ (the formats' published descriptions,
number by number). The difference is the largest of a logit (of order 1) from transformers' on the weights that the
integers stand for. It is taken in float32, for each family at a size of 256 features. "same bits" compares the layers
that keep the integers with dequantized ones in bfloat16. Speed is tokens per second of one sequence of a Llama of 1024
features. The checkpoint as it is takes turns with the original weights under the named scheme.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.harness.turns import seconds
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.generation.generate import PREFILL_CHUNK, LoadedDecoder
from torchwright.models.decoder.generation.sampling import Sampling

sys.path.insert(0, str(run.ROOT / "tests" / "hub"))
made: Any = importlib.import_module("quantized")
files: Any = importlib.import_module("gguf_files")

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
}
NEW, ROUNDS = 24, 15
INT4, ROWS = {"num_bits": 4, "type": "int"}, {"strategy": "token", "dynamic": True, "symmetric": True}
INT8, FLOAT8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float", "strategy": "channel"}
FORMATS: dict[str, tuple[Callable[[], Any] | None, str]] = {
    "awq": (lambda: made.awq(128), "w4a16:group_size=128"),
    "gptq": (lambda: made.gptq(128), "w4a16:group_size=128"),
    "gptq by activation order": (lambda: made.gptq(128, act_order=True), "w4a16:group_size=128"),
    "compressed-tensors int4": (
        lambda: made.compressed("pack-quantized", INT4 | {"strategy": "group", "group_size": 128}),
        "w4a16:group_size=128",
    ),
    "compressed-tensors w8a8": (
        lambda: made.compressed("int-quantized", INT8 | {"strategy": "channel"}, INT8 | ROWS),
        "w8a8",
    ),
    "compressed-tensors fp8": (lambda: made.compressed("float-quantized", FLOAT8), "w8a8"),
    "block fp8": (lambda: made.block_fp8([128, 128]), "w8a8"),
    "bitsandbytes nf4": (lambda: made.nf4(double=True), "w4a16"),
    "torchao int8": (lambda: made.torchao("Int8Tensor", lambda N, K: [1, K]), "w8a8"),
    "Q4_0": (None, "w4a16"),
    "Q4_K": (None, "w4a16"),
    "Q5_K": (None, "w8a8"),
    "Q6_K": (None, "w8a8"),
    "Q8_0": (None, "w8a8"),
}
"""Name → (settings and writer of a folder, or None for a type of GGUF; the scheme that the original is packed with)."""
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.bos_token_id": files.U32(1),
    "tokenizer.ggml.eos_token_id": files.U32(2),
}


def main() -> None:
    options = run.options(__doc__, formats=tuple(FORMATS), threads=torch.get_num_threads())
    torch.set_num_threads(options.threads)
    columns = ("format", "what it becomes", *made.FAMILIES, "same bits", "tokens/s", "over ours")
    rows = run.Rows(options.json, columns)
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            found = row(name, Path(folder))
        rows.add(found, cells(found))


def row(name: str, folder: Path) -> Row:
    """Return one format: each family at a small size, then the speed."""
    found: Row = {"format": name, "difference": {}, "same_bits": True}
    ids_BT = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    for family in made.FAMILIES:
        model = made.build(family)
        path = checkpoint(name, model, folder / family)
        difference = load_decoder(path).logits(ids_BT) - made.logits(model, ids_BT)
        found["difference"][family] = difference.abs().max().item()
        kept, wide = (load_decoder(path, torch.bfloat16, quantize=how) for how in (None, "none"))
        rounds = (kept.stored or "").endswith("w8a8")  # its own inputs are rounded, as the checkpoint asks
        found["same_bits"] &= rounds or torch.equal(kept.logits(ids_BT), wide.logits(ids_BT))
    return found | speed(name, folder)


def speed(name: str, folder: Path) -> Row:
    model = made.build("llama", **LARGE)
    original = folder / "original"
    model.save_pretrained(original)
    beside = FORMATS[name][1]
    path = checkpoint(name, model, folder / "large")
    begun = time.perf_counter()
    theirs = load_decoder(path, torch.bfloat16)
    ready = time.perf_counter() - begun
    ours = load_decoder(original, torch.bfloat16, quantize=beside)
    both = [[seconds(partial(generate, model)) for model in (ours, theirs)] for _ in range(ROUNDS + 1)][1:]
    return {
        "became": theirs.stored,
        "ready_s": ready,
        "tokens_per_s": NEW / sorted(after for _, after in both)[ROUNDS // 2],
        "beside": beside,
        "speedup": str(paired_speedup(*zip(*both, strict=True))),
    }


def checkpoint(name: str, model: Any, path: Path) -> Path:
    writer = FORMATS[name][0]
    if writer is not None:
        return made.write(model, path, *writer())
    tokens = [f"token{index}" for index in range(model.config.vocab_size)]
    lists = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * len(tokens)}
    file = path.with_suffix(".gguf")
    return files.model_file(file, model, lambda _: name, VOCABULARY | lists)


def generate(model: LoadedDecoder) -> None:
    for _ in model.tokens([[5] * 16], NEW, 0, [], PREFILL_CHUNK, Sampling()):
        pass


def cells(found: Row) -> tuple[str, ...]:
    differences = [f"{value:.0e}" for value in found["difference"].values()]
    became = found["became"].partition(": ")[2]
    bits = "yes" if found["same_bits"] else "no"
    speed = f"{found['tokens_per_s']:.0f}", f"{found['speedup']} of {found['beside']}"
    return (found["format"], became, *differences, bits, *speed)


if __name__ == "__main__":
    main()
