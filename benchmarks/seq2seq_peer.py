"""CTranslate2 for seq2seq.py, in a process without torch: beside it in one process CTranslate2 takes twice as long.

Lines of JSON in: {"sources": [[word, …], …], "tokens": N}. Lines out: [seconds, seconds of all threads].
"""

from __future__ import annotations

import json
import sys
import time

import ctranslate2  # pyright: ignore[reportMissingImports]


def main(folder: str, how: str, threads: str) -> None:
    translator = ctranslate2.Translator(
        folder, "cpu", compute_type=how, intra_threads=int(threads), inter_threads=1
    )
    print(json.dumps(None), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens = asked["tokens"]
        begun, before = time.perf_counter(), time.process_time()
        found = translator.translate_batch(
            asked["sources"], beam_size=1, min_decoding_length=tokens, max_decoding_length=tokens
        )
        seconds = time.perf_counter() - begun, time.process_time() - before
        assert all(len(row.hypotheses[0]) == tokens for row in found)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
