"""A peer of speed.py in its own interpreter: continuous batching of OpenVINO GenAI, or vLLM on a CPU.

Arguments: openvino|vllm FOLDER THREADS. A question of requests, prompt and new tokens is answered by the seconds until
all requests have ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from benchmarks.harness import peers

Turn = Callable[[int, int, int], float]
CACHE_GB = 4
RUNNING = 64


def openvino(path: str, threads: int) -> Turn:
    import openvino as ov  # pyright: ignore[reportMissingImports]
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = CACHE_GB, RUNNING
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 512, True
    scheduler.enable_prefix_caching = False
    pipe = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})
    numbers = iter(range(1 << 30))

    def turn(requests: int, prompt: int, new: int) -> float:
        options = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        begun = time.perf_counter()
        handles = []
        for _ in range(requests):
            ids = np.random.randint(10, 8000, (1, prompt)).astype(np.int64)
            handles.append(pipe.add_request(next(numbers), ov.Tensor(ids), options))
        while pipe.has_non_finished_requests():
            pipe.step()
        return time.perf_counter() - begun

    return turn


def vllm(path: str, threads: int) -> Turn:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    limits = {"max_model_len": 2048, "max_num_seqs": RUNNING}
    model = LLM(path, dtype="bfloat16", enable_prefix_caching=False, skip_tokenizer_init=True, **limits)

    def turn(requests: int, prompt: int, new: int) -> float:
        draw = lambda: {"prompt_token_ids": np.random.randint(10, 8000, prompt).tolist()}
        prompts = [draw() for _ in range(requests)]
        options = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
        begun = time.perf_counter()
        model.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - begun

    return turn


if __name__ == "__main__":
    peers.serve_one_of({"openvino": openvino, "vllm": vllm}, 1, 16, 4)
