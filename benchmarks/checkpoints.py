"""Quantized checkpoints by format and family: read, equal to what they stand for, and fast beside our own packing.

    python benchmarks/checkpoints.py [--formats awq,Q4_K] [--threads N] [--json FILE]

The checkpoints are made here, by the writers of tests/hub/ (the formats' published descriptions, number by number), of
random models. Equal: the largest difference of a logit (of order 1) from transformers' on the weights that the integers
stand for, in float32, for each family at a size of 256 features; and whether in bfloat16 the layers that keep the
integers give the bits of dequantized ones. Speed: tokens per second of one sequence of a Llama of 1024 features, from
the checkpoint as it is and from the original weights under the scheme that is named, in turn.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import turns
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.generate import PREFILL_CHUNK, LoadedDecoder
from torchwright.models.decoder.sampling import Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hub"))
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
"""Name → (settings and writer of a folder, or None for a type of GGUF; what the original is packed as beside it)."""
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.bos_token_id": files.U32(1),
    "tokenizer.ggml.eos_token_id": files.U32(2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantized checkpoints: read, equal, fast.")
    parser.add_argument("--formats", default=",".join(FORMATS), help="some of them, by name")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch's pool")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as they finish")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    turns.print_machine()
    print(
        "| format | what it becomes | "
        + " | ".join(made.FAMILIES)
        + " | same bits | tokens/s | beside ours |"
    )
    print("|---|---|" + "---|" * (len(made.FAMILIES) + 3), flush=True)
    rows = []
    for name in options.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, Path(folder)))
        print(line(rows[-1]), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1))


def row(name: str, folder: Path) -> dict[str, Any]:
    """One format: each family at a small size, then the speed."""
    found: dict[str, Any] = {"format": name, "difference": {}, "same_bits": True}
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


def speed(name: str, folder: Path) -> dict[str, Any]:
    model = made.build("llama", **LARGE)
    original = folder / "original"
    model.save_pretrained(original)
    beside = FORMATS[name][1]
    path = checkpoint(name, model, folder / "large")
    begun = time.perf_counter()
    theirs = load_decoder(path, torch.bfloat16)
    ready = time.perf_counter() - begun
    ours = load_decoder(original, torch.bfloat16, quantize=beside)
    both = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS + 1)][1:]
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


def seconds(model: LoadedDecoder) -> float:
    begun = time.perf_counter()
    for _ in model.tokens([[5] * 16], NEW, 0, [], PREFILL_CHUNK, Sampling()):
        pass
    return time.perf_counter() - begun


def line(found: dict[str, Any]) -> str:
    differences = " | ".join(f"{value:.0e}" for value in found["difference"].values())
    became = found["became"].partition(": ")[2]
    bits = "yes" if found["same_bits"] else "no"
    return (
        f"| {found['format']} | {became} | {differences} | {bits} | {found['tokens_per_s']:.0f} | "
        f"{found['speedup']} of {found['beside']} |"
    )


if __name__ == "__main__":
    main()
