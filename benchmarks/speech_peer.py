"""One contender of speech.py, in whatever interpreter has it: a Whisper over windows of 30 s, a fixed number of tokens.

    python benchmarks/speech_peer.py CONTENDER FOLDER THREADS

Answers every line "BATCH TOKENS" on standard input with one line of JSON: seconds, seconds of CPU time of all threads,
and seconds of the encoder alone, where it can be called by itself. Features are made anew each time. The end is
forbidden, so that every window has its tokens. torch is imported for those alone that run on it: beside it, in one
process, CTranslate2 takes twice as long.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np

from speech_rules import RATE

CONTENDERS = {
    "torchwright": "speech_ours:Torchwright",
    "transformers": "speech_ours:Transformers",
    "ctranslate2": "speech_theirs:CTranslate2",
    "openvino": "speech_theirs:OpenVINO",
    "whispercpp": "speech_theirs:WhisperCpp",
}


def main() -> None:
    name, folder, threads = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    kind, _, how = name.partition(":")
    how, _, own_threads = how.partition("@")
    module, _, cls = CONTENDERS[kind].partition(":")
    contender = getattr(import_module(module), cls)(Path(folder), how, int(own_threads or threads))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        batch, tokens = map(int, line.split())
        windows = [(0.1 * np.random.randn(30 * RATE)).astype(np.float32) for _ in range(batch)]
        begun, before = time.perf_counter(), time.process_time()
        count = contender(windows, tokens)
        found = {
            "seconds": time.perf_counter() - begun,
            "cpu": time.process_time() - before,
            "tokens": count,
        }
        if contender.encode is not None:
            begun, before = time.perf_counter(), time.process_time()
            contender.encode(windows)
            found |= {"encoder": time.perf_counter() - begun, "encoder_cpu": time.process_time() - before}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
