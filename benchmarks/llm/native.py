"""The native decoder as a contender, its bounds, and the options that name its peers' interpreters."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.peers import Peer
from benchmarks.harness.run import Option
from torchwright.core.records import DeviceFacts
from torchwright.models.decoder import load_decoder
from torchwright.optimization.decode_bench import Sizes, Work, decode_work, point, prefill_work

SCHEMES = ("none", "w8a8", "w4a8", "w4a16")
Turn = dict[str, float]
PEERS = {"openvino": "OpenVINO GenAI", "llama": "llama.cpp", "vllm": "vLLM"}


def peer_options(*kinds: str) -> dict[str, Option]:
    """Return options for `run.options`, each with the interpreter of a peer and its model."""
    return {kind: Option(nargs=2, action="append", default=[], metavar=("PYTHON", "MODEL")) for kind in kinds}


def start_peers(
    module: str, options: argparse.Namespace, kinds: Sequence[str], stack: contextlib.ExitStack
) -> dict[str, Peer]:
    """Start the peers that the options name; `stack` ends them."""
    found: dict[str, Peer] = {}
    for kind in kinds:
        for python, path in getattr(options, kind):
            peer = Peer(module, kind, path, torch.get_num_threads(), python=python)
            stack.callback(peer.close)
            found[f"{PEERS[kind]} {Path(path).stem}"] = peer
    return found


class Native:
    """The native decoder on one shape and scheme."""

    def __init__(
        self,
        folder: Path,
        scheme: str,
        kv: str,
        *,
        device: str = "cpu",
        piece: int = 512,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Load the model; prompts are read in pieces of so many tokens, and `now` is the clock."""
        self.name = f"torchwright {scheme.replace('none', 'bf16')}, kv {kv}"
        self.model = load_decoder(folder, torch.bfloat16, scheme, kv, device=device)
        self.piece, self.now = piece, now

    def turn(self, prompt: int, new: int, batch: int = 1) -> Turn:
        """Return the seconds of a prompt and of a step after it (`decode`: the mean; `step`: the median)."""
        vocabulary = self.model.config.vocabulary
        ids = torch.randint(10, min(8000, vocabulary), (batch, prompt)).tolist()
        cache = self.model.new_cache([prompt + new] * batch)
        sequences = [cache.sequence(prompt) for _ in range(batch)]
        tokens = [17] * batch
        marks = [self.now()]
        for start in range(0, prompt, self.piece):
            tokens = self._step(cache, sequences, [row[start : start + self.piece] for row in ids])
        marks.append(self.now())
        for _ in range(new):
            tokens = self._step(cache, sequences, [[token] for token in tokens])
            marks.append(self.now())
        begun, middle, *ends = marks
        found = {"prefill": middle - begun}
        if ends:
            steps = [after - before for before, after in zip([middle, *ends], ends, strict=False)]
            found |= {"decode": statistics.mean(steps), "step": statistics.median(steps)}
        return found

    @torch.inference_mode()
    def _step(self, cache: Any, sequences: list[Any], parts: list[list[int]]) -> list[int]:
        decoder = self.model.decoder
        batch = cache.append(list(zip(sequences, parts, strict=True)))
        return decoder.answer(batch, cache, batch.last_rows_B).values_NV.argmax(-1).tolist()

    def bounds(self, device: DeviceFacts, prompt: int, new: int, batch: int = 1) -> Turn:
        """Return the least seconds: of prompts of which only the last token is answered, and of a step after them."""
        sizes = lambda tokens: Sizes(batch=batch, prompt_tokens=prompt, new_tokens=tokens)
        return {
            "prefill": _bound(device, prefill_work(self.model, sizes(2))),
            "decode": _bound(device, decode_work(self.model, sizes(new + 1))),
        }


def _bound(device: DeviceFacts, work: Work) -> float:
    found = point("", 1.0, work, device)
    assert found is not None, "the device's ceilings are not measured"
    return found.bound_seconds
