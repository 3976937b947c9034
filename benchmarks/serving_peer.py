"""A peer of serving_cpu.py in its own interpreter: continuous batching of OpenVINO GenAI, or vLLM on a CPU.

    python serving_peer.py openvino FOLDER THREADS
    python serving_peer.py vllm FOLDER THREADS

Answers each line `REQUESTS PROMPT NEW` on standard input with one line of JSON: seconds until all have ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np

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
    number = 0

    def turn(requests: int, prompt: int, new: int) -> float:
        nonlocal number
        options = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        begun = time.perf_counter()
        handles = []
        for _ in range(requests):
            ids = np.random.randint(10, 8000, (1, prompt)).astype(np.int64)
            handles.append(pipe.add_request(number, ov.Tensor(ids), options))
            number += 1
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

    model = LLM(
        path,
        dtype="bfloat16",
        max_model_len=2048,
        enable_prefix_caching=False,
        max_num_seqs=RUNNING,
        skip_tokenizer_init=True,
    )

    def turn(requests: int, prompt: int, new: int) -> float:
        prompts = [
            {"prompt_token_ids": np.random.randint(10, 8000, prompt).tolist()} for _ in range(requests)
        ]
        options = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
        begun = time.perf_counter()
        model.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - begun

    return turn


def main() -> None:
    kind, path, threads = sys.argv[1:4]
    answers = os.fdopen(os.dup(1), "w")  # libraries print, and some below Python
    os.dup2(2, 1)
    turn = {"openvino": openvino, "vllm": vllm}[kind](path, int(threads))
    turn(1, 16, 4)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        requests, prompt, new = map(int, line.split())
        print(json.dumps({"seconds": turn(requests, prompt, new)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
