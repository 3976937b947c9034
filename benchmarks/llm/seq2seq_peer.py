"""CTranslate2 for seq2seq.py, in a process without torch: next to torch in one process it takes twice as long.

Arguments: FOLDER COMPUTE_TYPE THREADS. A question of sources (as words) and new tokens is answered by the seconds of
the clock and of all threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import ctranslate2  # pyright: ignore[reportMissingImports]

from benchmarks.harness import peers
from benchmarks.harness.turns import both_clocks, since


def start() -> tuple[None, Callable[[list[list[str]], int], tuple[float, float]]]:
    folder, how, threads = sys.argv[1:]
    translator = ctranslate2.Translator(
        folder, "cpu", compute_type=how, intra_threads=int(threads), inter_threads=1
    )

    def turn(sources: list[list[str]], tokens: int) -> tuple[float, float]:
        length = {"min_decoding_length": tokens, "max_decoding_length": tokens}
        begun = both_clocks()
        found = translator.translate_batch(sources, beam_size=1, **length)
        seconds = since(begun)
        assert all(len(row.hypotheses[0]) == tokens for row in found)
        return seconds

    return None, turn


if __name__ == "__main__":
    peers.serve(start)
