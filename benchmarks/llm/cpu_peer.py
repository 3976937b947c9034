"""A peer of cpu.py in its own interpreter: OpenVINO GenAI or llama.cpp on the same shape.

Arguments: openvino FOLDER THREADS, or llama FILE.gguf THREADS. A question of prompt and new tokens is answered by the
seconds of the prompt and of a new token.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.harness import peers

Turn = Callable[[int, int], dict[str, float]]


def openvino(path: str, threads: int) -> Turn:
    import openvino as ov  # pyright: ignore[reportMissingImports]
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]

    pipe = genai.LLMPipeline(path, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def turn(prompt: int, new: int) -> dict[str, float]:
        ids = np.random.randint(10, 8000, (1, prompt)).astype(np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        options = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        metrics = pipe.generate(inputs, options).perf_metrics
        return {"prefill": metrics.get_ttft().mean / 1e3, "decode": metrics.get_tpot().mean / 1e3}

    return turn


def llama(path: str, threads: int) -> Turn:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    sizes = {"n_ctx": 16384, "n_batch": 512, "n_ubatch": 512}
    model = llama_cpp.Llama(path, n_threads=threads, n_threads_batch=threads, verbose=False, **sizes)

    def turn(prompt: int, new: int) -> dict[str, float]:
        model.reset()
        ids = np.random.randint(10, 8000, prompt + new).tolist()
        begun = time.perf_counter()
        model.eval(ids[:prompt])
        middle = time.perf_counter()
        for token in ids[prompt:]:
            model.eval([token])
        return {"prefill": middle - begun, "decode": (time.perf_counter() - middle) / new}

    return turn


if __name__ == "__main__":
    peers.serve_one_of({"openvino": openvino, "llama": llama}, 16, 4)
