"""Language models on a CUDA card: Torchwright's decoder on Triton's kernels, the card's bounds, and transformers.

    python -m benchmarks.llm.cuda [--models DIR] [--shape NAME …] [--scheme none|w8a8|w4a8|w4a16 …] [--kv bf16|int8]
                                  [--batch N] [--no-peer] [--json FILE]

Random weights of real shapes (speed does not depend on the values). The peer is transformers in bfloat16 with SDPA, a
static cache and torch.compile (mode reduce-overhead, which records CUDA graphs). Bounds are those of
`torchwright bench`: bytes over the measured bandwidth, operations over the measured matrix rate. w4a16 counts there as
two products of int8, which on a card take as long as the one of bfloat16 that is done. Contenders take turns in one
run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.harness.turns import ratio
from benchmarks.llm import native, shapes
from benchmarks.llm.native import Native, Turn
from torchwright.hardware.devices.cuda import CUDA
from torchwright.hardware.kernels.gpu import operators
from torchwright.workloads.huggingface import cache_keyword

PROMPT, NEW = 512, 64
ROUNDS = 7
DEVICE = "cuda"
CALLS = ("prefill", "decode")
COLUMNS = (
    *("contender", "prefill, tok/s", "of bound", "decode, tok/s", "of bound"),
    "over transformers: prefill, decode",
)


class Transformers:
    """The same shape in transformers: bfloat16, SDPA, static cache, compiled."""

    name = "transformers bf16, SDPA, torch.compile"

    def __init__(
        self, folder: Path, longest: int, batch: int, device: str = DEVICE, compiled: bool = True
    ) -> None:
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self.model = model.to(device)
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=longest)
        # The first call, not compiled, allocates the cache and marks its tensors as static: without it no CUDA
        # graphs are recorded.
        with torch.inference_mode():
            self.model(torch.ones(batch, 1, dtype=torch.int64, device=device), **self._cached())
        self.prefill = self.decode = self.model.forward
        if compiled:
            self.prefill = torch.compile(self.model.forward, dynamic=False)
            self.decode = torch.compile(self.model.forward, mode="reduce-overhead", dynamic=False)

    @torch.inference_mode()
    def turn(self, prompt: int, new: int, batch: int) -> Turn:
        device, vocabulary = self.model.device, self.model.config.vocab_size
        ids = torch.randint(10, vocabulary, (batch, prompt), device=device)
        self.cache.reset()
        begun = _now()
        step = self._step(self.prefill, ids, torch.arange(prompt, device=device))
        middle = _now()
        for place in range(prompt, prompt + new):
            step = self._step(self.decode, step, torch.tensor([place], device=device))
        return {"prefill": middle - begun, "decode": (_now() - middle) / max(new, 1)}

    def _step(self, call: Any, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the next tokens (B, 1); they are read back, as a server has to."""
        out = call(ids, position_ids=places[None], use_cache=True, logits_to_keep=1, **self._cached())
        token = out.logits[:, -1:].argmax(-1)
        token.tolist()
        return token.clone()

    def _cached(self) -> dict[str, Any]:
        return {cache_keyword(self.model): self.cache}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    options = run.options(
        __doc__,
        models=str,
        shape=["llama-3.2-1b"],
        scheme=list(native.SCHEMES),
        kv=run.Option(default="bf16", choices=("bf16", "int8")),
        batch=1,
        no_peer=False,
    )
    missing = CUDA.unavailable() or operators.load_fault()
    if missing is not None:
        sys.exit(f"benchmarks.llm.cuda measures a CUDA card, and there is none to measure here: {missing}.")
    if operators.INTERPRETED:
        sys.exit("TRITON_INTERPRET=1 runs the kernels on NumPy; unset it to measure.")
    facts = CUDA().facts()
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in facts.tflops.items())
    read = f"{facts.name}; measured: read {facts.read_gb_per_s:.0f} GB/s"
    rows = run.Rows(options.json, note=f"{read}; tera-operations per second: {rates}")
    with tempfile.TemporaryDirectory() as scratch:
        for shape in options.shape:
            compare(shape, shapes.make(shape, Path(options.models or scratch)), options, rows)


def compare(shape: str, folder: Path, options: argparse.Namespace, rows: run.Rows) -> None:
    """Time prompts of PROMPT tokens and NEW after each, all contenders in turn."""
    batch = options.batch
    ours = [
        Native(folder, scheme, options.kv, device=DEVICE, piece=PROMPT, now=_now) for scheme in options.scheme
    ]
    peers = [] if options.no_peer else [Transformers(folder, PROMPT + NEW, batch)]
    everyone = {each.name: each for each in (*ours, *peers)}
    timed: dict[str, list[Turn]] = {name: [] for name in everyone}
    for each in everyone.values():
        for _ in range(2):  # kernels are compiled, graphs recorded
            each.turn(PROMPT, NEW, batch)
    for _ in range(ROUNDS):
        for name, each in everyone.items():
            timed[name].append(each.turn(PROMPT, NEW, batch))
    print(f"### {shape}, batch {batch}: prompt of {PROMPT}, decode at {PROMPT} to {PROMPT + NEW}\n")
    run.head(COLUMNS)
    for name, each in everyone.items():
        seconds = {call: [turn[call] for turn in timed[name]] for call in CALLS}
        middle = {call: statistics.median(seconds[call]) for call in CALLS}
        row: Row = {"shape": shape, "contender": name, "batch": batch}
        row |= {"prefill_tok_s": batch * PROMPT / middle["prefill"], "decode_tok_s": batch / middle["decode"]}
        bounds, ratios = ["", ""], list[str]()
        if isinstance(each, Native):
            for place, (call, bound) in enumerate(each.bounds(CUDA().facts(), PROMPT, NEW, batch).items()):
                row[f"{call}_of_bound"] = bound / middle[call]
                bounds[place] = f"{row[f'{call}_of_bound']:.0%}"
                if peers:
                    theirs = [turn[call] for turn in timed[Transformers.name]]
                    row[f"{call}_over_transformers"] = ratio(theirs, seconds[call])
                    ratios.append(f"{row[f'{call}_over_transformers']:.2f}x")
        speeds = f"{row['prefill_tok_s']:.0f}", f"{row['decode_tok_s']:.1f}"
        rows.add(row, (name, speeds[0], bounds[0], speeds[1], bounds[1], ", ".join(ratios)))
    print()


if __name__ == "__main__":
    main()
