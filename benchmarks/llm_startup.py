"""Packed weights of a real shape: seconds to the first token in a new process, and its peak memory.

    python benchmarks/llm_startup.py [--models DIR] [--shape llama-3.2-1b] [--quantize w4a8] [--json FILE]
    python benchmarks/llm_startup.py --serve [MODEL]

Random weights; the files are in the page cache. Seconds count from `import torch`'s end; memory is what the process has
at most beyond that (resident, shared file pages included), beside the bytes of packed weights, embedding and cache.
`--serve` measures `torchwright serve MODEL` instead, the bundled model without one: from the command to the line that
says it is ready, and to a client's first token, each start in turn with one of `import torch` alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

import llm_shapes
import turns
from serving_load import server
from torchwright.models.decoder.load import load_decoder
from torchwright.models.decoder.packed import write_packed

STARTS = 5
SERVED = {
    "torch_s": "import torch, in a process of its own",
    "ready_s": "ready",
    "first_token_s": "first token",
    "beyond_s": "first token beyond import torch",
}
CHILD = """
import json, sys, time, torch
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
before, begun = status("VmRSS"), time.perf_counter()
from pathlib import Path
from torchwright.models.decoder.packed import read_packed
model = read_packed(Path(sys.argv[1]), Path(sys.argv[2]))
ready = time.perf_counter() - begun
ids = list(range(10, 42))
model.generate(ids, max_new_tokens=1, stop=[])
first = time.perf_counter() - begun
model.generate(ids, max_new_tokens=64, stop=[])
peak = status("VmHWM") - before
kept = sum(t.nbytes for name, t in model.decoder.state_dict().items() if name != "embedding")
cache = sum(t.nbytes for layer in model.new_cache([96]).layers for t in (layer.k, layer.v))
print(json.dumps({"ready_s": ready, "first_token_s": first, "peak": peak, "weights": kept, "cache": cache}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up and memory of packed weights.")
    parser.add_argument("--models", metavar="DIR", help="keep the random model here")
    parser.add_argument("--shape", default="llama-3.2-1b", choices=llm_shapes.SHAPES)
    parser.add_argument("--quantize", default="w4a8")
    parser.add_argument(
        "--serve", metavar="MODEL", nargs="?", const="", help="measure the server's start with this model"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    turns.print_machine()
    if options.serve is not None:
        rows = [_serving(options.serve) for _ in range(STARTS)]
        print(
            f"torchwright serve {options.serve or '(bundled)'}, seconds after the command, {STARTS} starts:"
        )
        for name, words in SERVED.items():
            seconds = [row[name] for row in rows]
            print(f"{words:38} {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})")
        turns.write_json(options.json, rows)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder, packed = llm_shapes.make(options.shape, Path(options.models or scratch)), Path(scratch)
        write_packed(load_decoder(folder, torch.bfloat16, options.quantize), packed)
        command = [sys.executable, "-c", CHILD, str(packed), str(folder)]
        rows = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(STARTS)
        ]
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    beyond = middle["peak"] - middle["weights"] - middle["cache"]
    print(f"{options.shape}, {options.quantize}; from the end of `import torch`:")
    print(f"ready after {middle['ready_s']:.2f} s, first token after {middle['first_token_s']:.2f} s;")
    print(f"peak memory {middle['peak'] / 1e6:.0f} MB: packed weights {middle['weights'] / 1e6:.0f} MB,")
    print(f"cache {middle['cache'] / 1e6:.0f} MB, all else {beyond / 1e6:.0f} MB")
    turns.write_json(options.json, [middle])


def _serving(model: str) -> dict[str, float]:
    """Seconds of one start, by the names of `SERVED`."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch_s = time.perf_counter() - begun
    begun = time.perf_counter()
    with server(*([model] if model else [])) as (url, _):
        ready_s = time.perf_counter() - begun
        asked = {"prompt": "def first(", "max_tokens": 16, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as response:
            next(response.iter_lines())
            first_s = time.perf_counter() - begun
    return {
        "torch_s": torch_s,
        "ready_s": ready_s,
        "first_token_s": first_s,
        "beyond_s": first_s - torch_s,
    }


if __name__ == "__main__":
    main()
