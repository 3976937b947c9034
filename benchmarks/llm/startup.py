"""Packed weights of a real shape: seconds to the first token in a new process, and its peak memory.

    python -m benchmarks.llm.startup [--models DIR] [--shape llama-3.2-1b] [--quantize w4a8] [--json FILE]
    python -m benchmarks.llm.startup --serve [MODEL]

Random weights; the files are in the page cache. Seconds count from the end of `import torch`. Memory is the peak of the
process beyond that (resident, shared file pages included), next to the bytes of packed weights, embedding and cache.
`--serve` measures `torchwright serve MODEL` instead, the bundled model without one. Times run from the command to the
line that says it is ready, and to a client's first token. Starts of `import torch` alone take turns with it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.harness.turns import seconds
from benchmarks.llm import shapes
from benchmarks.serve.server import server
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
    serve = run.Option(metavar="MODEL", nargs="?", const="")
    shape = run.Option(default="llama-3.2-1b", choices=shapes.SHAPES)
    options = run.options(__doc__, models=str, shape=shape, quantize="w4a8", serve=serve)
    rows = run.Rows(options.json)
    if options.serve is not None:
        for _ in range(STARTS):
            rows.add(_serving(options.serve))
        print(
            f"torchwright serve {options.serve or '(bundled)'}, seconds after the command, {STARTS} starts:"
        )
        for name, words in SERVED.items():
            found = [row[name] for row in rows]
            print(f"{words:38} {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder, packed = shapes.make(options.shape, Path(options.models or scratch)), Path(scratch)
        write_packed(load_decoder(folder, torch.bfloat16, options.quantize), packed)
        command = [sys.executable, "-c", CHILD, str(packed), str(folder)]
        starts = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(STARTS)
        ]
    middle = {key: statistics.median(row[key] for row in starts) for key in starts[0]}
    mb = {key: f"{middle[key] / 1e6:.0f} MB" for key in ("peak", "weights", "cache")}
    beyond = middle["peak"] - middle["weights"] - middle["cache"]
    print(f"{options.shape}, {options.quantize}; from the end of `import torch`:")
    print(f"ready after {middle['ready_s']:.2f} s, first token after {middle['first_token_s']:.2f} s;")
    print(f"peak memory {mb['peak']}: packed weights {mb['weights']},")
    print(f"cache {mb['cache']}, all else {beyond / 1e6:.0f} MB")
    rows.add(middle)


def _serving(model: str) -> Row:
    """Return the seconds of one start, by the names of `SERVED`."""
    torch_s = seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
    begun = time.perf_counter()
    with server(model) as (url, _):
        ready_s = time.perf_counter() - begun
        asked = {"prompt": "def first(", "max_tokens": 16, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as response:
            next(response.iter_lines())
            first_s = time.perf_counter() - begun
    found = {"torch_s": torch_s, "ready_s": ready_s, "first_token_s": first_s}
    return found | {"beyond_s": first_s - torch_s}


if __name__ == "__main__":
    main()
