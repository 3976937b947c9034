"""One contender of speed.py, in an interpreter that has it: a Whisper over windows of 30 s, a fixed number of tokens.

Arguments: CONTENDER FOLDER THREADS. A question of batch and tokens is answered by seconds and CPU seconds of all
threads. Those of the encoder alone follow, if it can be called by itself. Features are computed again each time. The
end is forbidden, so that every window has its tokens. torch is imported only for contenders that run on torch: next to
it, in one process, CTranslate2 takes twice as long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import peers
from benchmarks.harness.turns import both_clocks, since
from benchmarks.speech.rules import RATE

CONTENDERS = {
    "torchwright": "ours:Torchwright",
    "transformers": "ours:Transformers",
    "ctranslate2": "theirs:CTranslate2",
    "openvino": "theirs:OpenVINO",
    "whispercpp": "theirs:WhisperCpp",
}


def start() -> tuple[None, Callable[[int, int], dict[str, Any]]]:
    name, folder, threads = sys.argv[1:]
    kind, _, how = name.partition(":")
    how, _, own_threads = how.partition("@")
    module, _, cls = CONTENDERS[kind].partition(":")
    make = getattr(import_module(f"benchmarks.speech.{module}"), cls)
    contender = make(Path(folder), how, int(own_threads or threads))

    def turn(batch: int, tokens: int) -> dict[str, Any]:
        windows = [(0.1 * np.random.randn(30 * RATE)).astype(np.float32) for _ in range(batch)]
        begun = both_clocks()
        count = contender(windows, tokens)
        found = dict(zip(("seconds", "cpu"), since(begun), strict=True)) | {"tokens": count}
        if contender.encode is not None:
            begun = both_clocks()
            contender.encode(windows)
            found |= zip(("encoder", "encoder_cpu"), since(begun), strict=True)
        return found

    return None, turn


if __name__ == "__main__":
    peers.serve(start)
