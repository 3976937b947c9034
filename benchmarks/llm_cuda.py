"""Language models on a CUDA card: Torchwright's decoder on Triton's kernels, the card's bounds, and transformers.

    python benchmarks/llm_cuda.py [--models DIR] [--shape NAME …] [--scheme none|w8a8|w4a8|w4a16 …] [--kv bf16|int8]
                                  [--batch N] [--no-peer] [--json FILE]

Random weights of real shapes (speed does not depend on the values). The peer is transformers in bfloat16 with SDPA, a
static cache and torch.compile (mode reduce-overhead, which records CUDA graphs). Bounds are those of
`torchwright bench`: bytes over the measured bandwidth, operations over the measured matrix rate. It counts w4a16 as two
products of int8, which on a card take as long as the one of bfloat16 that is done. Contenders take turns in one run.
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

import llm_shapes
import turns
from torchwright.hardware.devices.cuda import CUDA
from torchwright.hardware.kernels.gpu import operators
from torchwright.models.decoder import load_decoder
from torchwright.optimization.decode_bench import Sizes, Work, decode_work, point, prefill_work
from torchwright.workloads.huggingface import cache_keyword

PROMPT, NEW = 512, 64
ROUNDS = 7
DEVICE = "cuda"


class Ours:
    """The native decoder on one shape and scheme."""

    def __init__(self, folder: Path, scheme: str, kv: str, device: str = DEVICE) -> None:
        self.name = f"torchwright {scheme.replace('none', 'bf16')}, kv {kv}"
        self.model = load_decoder(folder, torch.bfloat16, scheme, kv, device=device)

    def turn(self, prompt: int, new: int, batch: int) -> dict[str, float]:
        """Seconds of a prompt and of one new token after it, for `batch` sequences together."""
        vocabulary = self.model.config.vocabulary
        ids = torch.randint(10, vocabulary, (batch, prompt)).tolist()
        cache = self.model.new_cache([prompt + new] * batch)
        sequences = [cache.sequence(prompt) for _ in range(batch)]
        begun = _now()
        parts = self._step(cache, sequences, ids)
        middle = _now()
        for _ in range(new):
            parts = self._step(cache, sequences, [[token] for token in parts])
        return {"prefill": middle - begun, "decode": (_now() - middle) / max(new, 1)}

    @torch.inference_mode()
    def _step(self, cache: Any, sequences: list[Any], parts: list[list[int]]) -> list[int]:
        decoder = self.model.decoder
        batch = cache.append(list(zip(sequences, parts, strict=True)))
        return decoder.answer(batch, cache, batch.last_rows_B).values_NV.argmax(-1).tolist()

    def bounds(self, prompt: int, new: int, batch: int) -> dict[str, float]:
        """Seconds at least: of the prompts of which only the last tokens are answered, and of a step after them."""
        return {
            "prefill": self._bound(
                prefill_work(self.model, Sizes(batch=batch, prompt_tokens=prompt, new_tokens=2))
            ),
            "decode": self._bound(
                decode_work(self.model, Sizes(batch=batch, prompt_tokens=prompt, new_tokens=new + 1))
            ),
        }

    def _bound(self, work: Work) -> float:
        found = point("", 1.0, work, CUDA().facts())
        assert found is not None, "the card's ceilings are not measured"
        return found.bound_seconds


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
        # A first call that is not compiled makes the cache, and says of its tensors that they stay where they are:
        # else no CUDA graphs are recorded.
        with torch.inference_mode():
            self.model(torch.ones(batch, 1, dtype=torch.int64, device=device), **self._cached())
        self.prefill = self.decode = self.model.forward
        if compiled:
            self.prefill = torch.compile(self.model.forward, dynamic=False)
            self.decode = torch.compile(self.model.forward, mode="reduce-overhead", dynamic=False)

    @torch.inference_mode()
    def turn(self, prompt: int, new: int, batch: int) -> dict[str, float]:
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
        """The next tokens (B, 1); they are read back, as a server has to."""
        out = call(
            ids,
            position_ids=places[None],
            use_cache=True,
            logits_to_keep=1,
            **self._cached(),
        )
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
    parser = argparse.ArgumentParser(
        description="Language models on a CUDA card against bounds and transformers."
    )
    parser.add_argument("--models", metavar="DIR", help="keep the random models here")
    parser.add_argument("--shape", action="append", choices=llm_shapes.SHAPES, help="may be repeated")
    parser.add_argument(
        "--scheme", action="append", help="none, w8a8, w4a8, w4a16, as `--quantize` takes them"
    )
    parser.add_argument("--kv", default="bf16", choices=("bf16", "int8"))
    parser.add_argument("--batch", type=int, default=1, help="sequences together (default: 1)")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as they finish")
    options = parser.parse_args()
    missing = CUDA.unavailable() or operators.load_fault()
    if missing is not None:
        sys.exit(f"llm_cuda.py measures a CUDA card, and there is none to measure here: {missing}.")
    if operators.INTERPRETED:
        sys.exit("TRITON_INTERPRET=1 runs the kernels on NumPy; unset it to measure.")
    turns.print_machine()
    facts = CUDA().facts()
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in facts.tflops.items())
    print(
        f"{facts.name}; measured: read {facts.read_gb_per_s:.0f} GB/s; tera-operations per second: {rates}\n"
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for shape in options.shape or ["llama-3.2-1b"]:
            folder = llm_shapes.make(shape, Path(options.models or scratch))
            rows += compare(shape, folder, options)
            turns.write_json(options.json, rows)


def compare(shape: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts of PROMPT tokens and NEW after each, all contenders in turn."""
    batch = options.batch
    everyone: list[Any] = [
        Ours(folder, scheme, options.kv) for scheme in options.scheme or ("none", "w8a8", "w4a8", "w4a16")
    ]
    if not options.no_peer:
        everyone.append(Transformers(folder, PROMPT + NEW, batch))
    timed: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in everyone}
    for contender in everyone:
        for _ in range(2):  # kernels are compiled, graphs recorded
            contender.turn(PROMPT, NEW, batch)
    for _ in range(ROUNDS):
        for contender in everyone:
            timed[contender.name].append(contender.turn(PROMPT, NEW, batch))
    print(f"### {shape}, batch {batch}: prompt of {PROMPT}, decode at {PROMPT} to {PROMPT + NEW}\n")
    print(
        "| contender | prefill, tok/s | of bound | decode, tok/s | of bound | over transformers: prefill, decode |"
    )
    print("|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    peer = timed.get(Transformers.name)
    for contender in everyone:
        mine = timed[contender.name]
        seconds = {call: statistics.median(turn[call] for turn in mine) for call in ("prefill", "decode")}
        row: dict[str, Any] = {"shape": shape, "contender": contender.name, "batch": batch}
        row |= {
            "prefill_tok_s": batch * PROMPT / seconds["prefill"],
            "decode_tok_s": batch / seconds["decode"],
        }
        bounds, ratios = {"prefill": "", "decode": ""}, ""
        if isinstance(contender, Ours):
            for call, bound in contender.bounds(PROMPT, NEW, batch).items():
                row[f"{call}_of_bound"] = bound / seconds[call]
                bounds[call] = f"{row[f'{call}_of_bound']:.0%}"
            if peer is not None:
                for call in seconds:
                    pairs = [theirs[call] / ours[call] for theirs, ours in zip(peer, mine, strict=True)]
                    row[f"{call}_over_transformers"] = statistics.median(pairs)
                ratios = ", ".join(f"{row[f'{call}_over_transformers']:.2f}x" for call in seconds)
        rows.append(row)
        print(
            f"| {contender.name} | {row['prefill_tok_s']:.0f} | {bounds['prefill']} | {row['decode_tok_s']:.1f} "
            f"| {bounds['decode']} | {ratios} |",
            flush=True,
        )
    print()
    return rows


if __name__ == "__main__":
    main()
