"""MXFP4 and block FP8 weights that stay as they are, against bfloat16 and our own schemes: speed, memory, bits.

    python -m benchmarks.llm.small_floats [--parts layer model] [--threads N] [--busy] [--json FILE]

"layer": a gpt-oss-20b expert's first linear layer (2880 to 5760 features) with random weights, in turns; copies are
rotated, so that weights come from memory. "over bf16" and "over w4a8" are medians of paired ratios. With --busy, for a
machine that others use, one thread's processor time in place of the clock's.

"model": a folder of gpt-oss-20b's sizes, cut to one layer of eight experts and a small vocabulary; experts are random
MXFP4. Each way to load it has a process of its own: how much its memory grew, seconds until it is ready, and tokens per
second of one sequence.
"""

from __future__ import annotations

import importlib
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.turns import ask, in_turns, processes, ratio, seconds
from torchwright.core.scheme import BF16, FP8, MXFP4, W4A8, W8A8, Scheme, scheme_of
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.weight import SmallFloats
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.generation.generate import PREFILL_CHUNK
from torchwright.models.decoder.generation.sampling import Sampling

K, N, COPIES, ROUNDS = 2880, 5760, 6, 40
"""Six copies in 4 bits are 53 MB: more than the last level of cache that one core is given."""
ROWS = (1, 4, 16, 128)
LAYERS, EXPERTS, VOCABULARY, NEW = 1, 8, 8192, 16
WAYS = {"as they are": None, "bfloat16": "none", "w4a8": "w4a8"}


@torch.inference_mode()
def main() -> None:
    options = run.options(__doc__, parts=("layer", "model"), threads=torch.get_num_threads(), busy=False)
    if fault := build.load_fault():
        raise SystemExit(fault)
    torch.set_num_threads(1 if options.busy else options.threads)
    rows = run.Rows(options.json)
    if "layer" in options.parts:
        _layers(rows, time.process_time if options.busy else time.perf_counter)
    if "model" in options.parts:
        _models(rows, options.threads)


def _layers(rows: run.Rows, clock: Callable[[], float]) -> None:
    layers = {
        str(scheme): [_layer(scheme, seed) for seed in range(COPIES)]
        for scheme in (BF16, W8A8, W4A8, MXFP4, scheme_of(FP8.name, 128))
    }
    run.head(("scheme", "rows", "ms", "MB", "GB/s", "over bf16", "over w4a8"))
    for count in ROWS:
        x_BK = torch.randn(count, K, dtype=torch.bfloat16)
        turns = {name: itertools.cycle(copies) for name, copies in layers.items()}
        calls = {name: partial(_time_next, copies, x_BK, clock) for name, copies in turns.items()}
        taken = {name: found[COPIES:] for name, found in in_turns(calls, ROUNDS + COPIES).items()}
        for name, found in taken.items():
            ms, size = 1000 * statistics.median(found), layers[name][0].packed.nbytes
            against = [ratio(taken[other], found) for other in (str(BF16), str(W4A8))]
            row = {"part": "layer", "scheme": name, "rows": count, "ms": ms, "bytes": size}
            cells = (name, count, f"{ms:.3f}", f"{size / 1e6:.1f}", f"{size / ms / 1e6:.1f}")
            rows.add(
                row | {"over_bf16": against[0], "over_w4a8": against[1]},
                (*cells, *(f"{x:.2f}x" for x in against)),
            )


def _time_next(layers: Any, x_BK: torch.Tensor, clock: Callable[[], float]) -> float:
    return seconds(partial(next(layers), x_BK), clock=clock)


def _layer(scheme: Scheme, seed: int) -> PackedLinear:
    random = torch.Generator().manual_seed(seed)
    if not scheme.kept:
        return PackedLinear(torch.randn(N, K, generator=random).bfloat16() / K**0.5, None, scheme)
    codes = torch.randint(0, 1 << scheme.weight_bits, (N, K), generator=random, dtype=torch.uint8)
    groups = N, -(-K // (scheme.group or 1))
    if scheme.weight_bits == 4:
        scales = torch.randint(116, 122, groups, generator=random, dtype=torch.uint8)
    else:
        codes[codes & 127 == 127] = 0
        blocks = torch.rand(-(-N // 128), groups[1], generator=random) / 1000
        scales = blocks.repeat_interleave(128, 0)[:N]  # as in blocks of 128 x 128
    return PackedLinear.from_floats(
        SmallFloats(codes_NK=codes, scales_NG=scales, bits=scheme.weight_bits), None, scheme
    )


def _models(rows: run.Rows, threads: int) -> None:
    run.head(
        (
            "gpt-oss-20b's sizes, one layer of eight experts",
            "memory of the file, GB",
            "grew by, GB",
            "ready in, s",
            "tokens/s",
        )
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = _folder(Path(temporary))
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        with processes(_serve, list(WAYS), str(folder), threads) as pipes:
            ready = {name: ask(pipe) for name, pipe in pipes.items()}
            taken = in_turns({name: partial(ask, pipe) for name, pipe in pipes.items()}, 7)
            for pipe in pipes.values():
                pipe.send(False)
        for name, (grew, took) in ready.items():
            speed = NEW / statistics.median(taken[name][1:])
            row = {
                "part": "model",
                "way": name,
                "file": size,
                "grew": grew,
                "ready_s": took,
                "tokens_per_s": speed,
            }
            cells = (name, f"{size / 1e9:.2f}", f"{grew / 1e9:.2f}", f"{took:.1f}", f"{speed:.1f}")
            rows.add(row, cells)


def _serve(name: str, folder: str, threads: int, pipe: Any) -> None:
    """One way to load: the growth of memory and the seconds first, then the seconds of an answer, until False."""
    torch.set_num_threads(threads)
    build.load_fault()
    before, begun = _peak(), time.perf_counter()
    model = load_decoder(folder, torch.bfloat16, WAYS[name])
    loaded = (_peak() - before, time.perf_counter() - begun)
    pipe.send(True)
    if pipe.recv():
        pipe.send(loaded)
    while pipe.recv():
        begun = time.perf_counter()
        for _ in model.tokens([[5] * 16], NEW, 0, [], PREFILL_CHUNK, Sampling()):
            pass
        pipe.send(time.perf_counter() - begun)


def _peak() -> int:
    """The most bytes that this process has had in memory, files that are mapped included."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _folder(folder: Path) -> Path:
    """A gpt-oss with random weights, its experts in MXFP4."""
    transformers: Any = importlib.import_module("transformers")
    save_file = importlib.import_module("safetensors.torch").save_file
    config = transformers.GptOssConfig(
        num_hidden_layers=LAYERS,
        num_local_experts=EXPERTS,
        vocab_size=VOCABULARY,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=0,
    )
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    random, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in shapes.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            X, inputs, features = tensor.shape
            blocks = X, features, inputs // 32
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, (*blocks, 16), generator=random, dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(114, 119, blocks, generator=random, dtype=torch.uint8)
        else:
            tensors[name] = torch.randn(tensor.shape, generator=random).mul_(0.02).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (folder / "config.json").write_text(json.dumps(written))
    return folder


if __name__ == "__main__":
    sys.exit(main())
